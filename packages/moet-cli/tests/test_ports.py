import os
import socket

import pytest

from moet_cli.ports import check_port, free_port
from moet_core.errors import ConfigError


def test_a_free_port_can_be_used():
    check_port("127.0.0.1", free_port("127.0.0.1"))


def test_a_port_in_use_names_its_owner_and_the_way_out():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        wanted = (
            rf"Port {port} on 127\.0\.0\.1 is in use by process {os.getpid()} \(.*python.*--set"
        )
        with pytest.raises(ConfigError, match=wanted):
            check_port("127.0.0.1", port)


def test_an_address_of_another_machine():
    with pytest.raises(ConfigError, match=r"cannot listen on port 80\d\d of 192\.0\.2\.1: "):
        check_port("192.0.2.1", 8033)


def test_a_host_name_that_does_not_exist():
    with pytest.raises(ConfigError, match="--set host=ADDRESS"):
        check_port("no-such-host.invalid", 8033)

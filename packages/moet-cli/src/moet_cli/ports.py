"""TCP ports: a free one, or who has taken this one."""

import errno
import socket

import psutil

from moet_core.errors import ConfigError

__all__ = ["check_port", "free_port"]


def free_port(host: str) -> int:
    """Return a port of `host` that nobody listens on now."""
    with _bind(host, 0) as listener:
        port: int = listener.getsockname()[1]
        return port


def check_port(host: str, port: int) -> None:
    """Make sure that a server can listen on `port` of `host`.

    Raises:
        ConfigError: it cannot; the text names who listens there, if this user may know.
    """
    try:
        _bind(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} on {host} is in use by {_owner(port)}; stop that process, or choose "
                "another port with --set port=N (0: a free one)."
            ) from error
        raise ConfigError(
            f"moet cannot listen on port {port} of {host}: {error.strerror}; choose others with "
            "--set host=ADDRESS and --set port=N."
        ) from error


def _bind(host: str, port: int) -> socket.socket:
    (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listener = socket.socket(family, kind, protocol)
    try:
        # As servers do: a connection of an ended server, still in TIME_WAIT, is no obstacle.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def _owner(port: int) -> str:
    for connection in psutil.net_connections("tcp"):
        address = connection.laddr
        if connection.status == psutil.CONN_LISTEN and address and address.port == port:
            if connection.pid is None:
                break
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                command = "?"
            return f"process {connection.pid} ({command[:80]})"
    return "a process of another user"

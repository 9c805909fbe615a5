"""`moet serve` as users run it: a process of its own, its output, its exit code."""

import json
import os
import re
import signal
import socket

import pytest

from moet_cli.ports import free_port


@pytest.fixture
def port():
    return free_port("127.0.0.1")


def lines_until(process, event):
    """Read JSON lines up to the one that announces `event`, and return that one."""
    for line in process.stdout:
        found = json.loads(line)
        if found["event"] == event:
            return found
    raise AssertionError(f"no {event}: {process.stderr.read()}")


class TestDryRun:
    def test_shows_every_value_and_where_it_came_from(self, moet, model, port):
        done = moet("serve", str(model), "--set", f"port={port}", "--dry-run", "--", "-tp", "1")
        assert done.code == 0
        assert re.search(rf"│ port +│ {port} ", done.out)
        assert "vLLM argument after --" in done.out
        assert "(vLLM decides)" in done.out
        assert "-m moet_vllm.server serve" in done.out
        assert "2 tensors" in done.out

    def test_json_is_one_object_and_nothing_is_started(self, moet, port):
        done = moet("serve", "demo", "--json", "--dry-run", "--", "--port", str(port))
        (plan,) = done.objects()
        assert done.code == 0
        assert plan["options"]["port"] == {
            "value": port,
            "source": "vLLM argument after --",
            "instead_of": [{"value": 8000, "source": "default"}],
        }
        assert plan["checks"]["model"].endswith("complete")
        assert not moet.pids.exists()


class TestRun:
    @pytest.mark.parametrize(
        ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
    )
    def test_serves_until_a_signal_stops_the_whole_tree(self, moet, port, number, code):
        command = ("serve", "demo", "--json", "--set", f"port={port}")
        process = moet.start(*command, mode="family")
        ready = lines_until(process, "ready")
        assert ready["url"] == f"http://127.0.0.1:{port}/v1"
        assert ready["converted"][0]["bits_per_weight"] == 2.25
        process.send_signal(number)
        done = moet.finish(process)
        assert done.code == code
        assert done.err.endswith(f"moet: stopped by {number.name}\n")
        assert moet.all_gone(2)

    def test_a_signal_while_starting_stops_the_whole_tree(self, moet, wait_until):
        process = moet.start("serve", "demo", "--set", "port=0", mode="silent,family,stubborn")
        wait_until(lambda: len(moet.server_pids()) == 2)
        process.send_signal(signal.SIGINT)
        assert moet.finish(process).code == 130
        assert moet.all_gone(2)

    def test_the_server_does_not_outlive_a_killed_moet(self, moet, port, wait_until):
        command = ("serve", "demo", "--json", "--set", f"port={port}")
        process = moet.start(*command, mode="family,stubborn")
        lines_until(process, "ready")
        process.kill()
        moet.finish(process)
        wait_until(lambda: moet.all_gone(2))

    def test_a_dead_worker_is_one_message_and_exit_code_1(self, moet):
        done = moet("serve", "demo", "--set", "port=0", mode="worker-dies")
        assert done.code == 1
        assert "VllmWorker-1 (pid 4242) was killed by SIGKILL" in done.err
        assert "Traceback" not in done.err
        assert moet.all_gone(1)

    def test_without_the_plugin_it_fails_closed(self, moet):
        done = moet("serve", "demo", "--json", "--set", "port=0", mode="unconverted")
        assert done.code == 1
        assert done.objects()[-1]["exit_code"] == 1
        assert "the moet plugin did not run" in done.objects()[-1]["error"]
        assert moet.all_gone(1)

    def test_the_log_holds_the_servers_output(self, moet, tmp_path):
        done = moet("serve", "demo", "--set", "port=0", "--set", "log=my.log", mode="crash")
        assert done.code == 1
        assert "my.log" in done.err
        assert "ValueError: layer 3 has no experts" in (tmp_path / "my.log").read_text()


class TestRefusals:
    """One message, no traceback, nothing started."""

    @pytest.fixture
    def refused(self, moet):
        def run(*args, code, **environment):
            done = moet("serve", *args, **environment)
            assert done.code == code, done.err
            *_, message = done.err.splitlines()
            assert "Traceback" not in done.err
            assert not moet.pids.exists()
            return message

        return run

    def test_unknown_recipe(self, refused):
        assert "did you mean 'demo'?" in refused("demmo", code=2)

    def test_unknown_option(self, refused):
        message = refused("demo", "--set", "max_model_length=3", code=2)
        assert "did you mean 'max_model_len'?" in message

    def test_unknown_flag(self, refused):
        assert "did you mean '--dry-run'?" in refused("demo", "--dryrun", code=2)

    def test_vllm_arguments_without_dashes_before_them(self, refused):
        assert "unexpected extra argument" in refused("demo", "extra", code=2)

    def test_port_in_use(self, refused):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            message = refused("demo", "--set", f"port={port}", code=1)
        assert f"Port {port} on 127.0.0.1 is in use by process {os.getpid()}" in message

    def test_missing_shard(self, refused, model):
        (model / "model-00002-of-00002.safetensors").unlink()
        message = refused(str(model), "--set", "port=0", code=1)
        assert "model-00002-of-00002.safetensors" in message

    def test_short_shard(self, refused, model):
        shard = model / "model-00002-of-00002.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])
        assert shard.name in refused(str(model), "--set", "port=0", code=1)

    def test_gpu_recipe_without_a_gpu(self, refused):
        message = refused("demo-gpu", "--set", "port=0", code=1, CUDA_VISIBLE_DEVICES="")
        assert "needs 1 NVIDIA GPU(s), found 0" in message

    def test_a_log_that_cannot_be_written(self, refused):
        message = refused("demo", "--json", "--set", "port=0", "--set", "log=/dev/null/x", code=1)
        assert "The server's log /dev/null/x cannot be written" in message

    def test_verbose_shows_where_an_error_was_raised(self, moet):
        done = moet("serve", "demmo", "--verbose")
        assert done.code == 2
        assert "Traceback (most recent call last)" in done.err
        assert done.err.splitlines()[-1].startswith("moet: Unknown recipe 'demmo'")

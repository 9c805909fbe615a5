import io

import pytest

from moet_cli.guard import ServerEnded
from moet_cli.server_events import parse_event
from moet_vllm import events

ENDED = 'moet-event: {"event":"server-ended","pid":7,"exitcode":-9}'


def test_what_the_plugin_emits_is_read_back(monkeypatch):
    event = events.ProcessEnded("VllmWorker-1", 5, -9, "SIGKILL", 1)
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    events.emit(event)
    assert parse_event(stream.getvalue()) == event


@pytest.mark.parametrize(
    "prefix", ["", "(Worker_TP0 pid=12) ", "(EngineCore pid=1) (Worker pid=2) "]
)
def test_process_prefixes_are_skipped(prefix):
    assert parse_event(prefix + ENDED) == ServerEnded(pid=7, exitcode=-9)


@pytest.mark.parametrize(
    "line",
    [
        f"INFO Received request cmpl-1: prompt: '{ENDED}'",
        "moet-event: {not json",
        'moet-event: {"event":"unheard-of"}',
        "moet-event is a word",
    ],
)
def test_anything_else_is_an_ordinary_line(line):
    assert parse_event(line) is None

"""A fleet outlives the failures of its engines, and says what they were.

The engines here cannot be built (their checkpoint does not exist) or are not engines at all; what
real ones answer is shown by the scripts themselves.
"""

import sys
import threading
import time

import pytest
from served import fleet as module
from served.engine import PORTS_EACH, first_port
from served.fleet import Engine, EngineError, Spec, fleet
from served.identity import Case, compare, measurements
from served.steps import reach

ECHO = """
import json, os, sys, time
spec = json.loads(sys.stdin.readline())
out = os.fdopen(int(sys.argv[1]), "w")
def say(message):
    out.write(json.dumps(message) + chr(10)); out.flush()
say({"graphs": 0})
for line in sys.stdin:
    order = json.loads(line)
    print("order", order["task"], flush=True)
    if order["task"] == "fail":
        say({"error": "ValueError: no"})
    elif order["task"] == "sleep":
        time.sleep(60)
    elif order["task"] == "end":
        sys.exit(3)
    else:
        say({"result": order["arguments"]})
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Return a process that follows the protocol and builds nothing."""
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    run = module.subprocess.Popen

    def popen(command, **options):
        return run([sys.executable, str(script), command[-1]], **options)

    monkeypatch.setattr(module.subprocess, "Popen", popen)
    found = Engine(Spec(name="an echo", model="nothing"), tmp_path)
    found.begin()
    assert found.wait(20)
    yield found
    found.stop(5)


def test_an_order_returns_what_the_task_returned(engine):
    assert engine.ask("echo", streams=4) == {"streams": 4}
    assert engine.ready["graphs"] == 0
    assert engine.log.name == "an-echo.log"


def test_a_task_that_fails_leaves_the_engine_of_use(engine):
    with pytest.raises(EngineError, match="an echo, fail: ValueError: no"):
        engine.ask("fail")
    assert engine.ask("echo") == {}


def test_a_task_that_takes_too_long_ends_the_engine(engine):
    with pytest.raises(EngineError, match="no answer within 0 s"):
        engine.ask("sleep", seconds=0.2)
    with pytest.raises(EngineError, match="no answer within"):
        engine.ask("echo")


def test_an_engine_that_ended_says_so(engine):
    with pytest.raises(EngineError, match="it ended with status 3"):
        engine.ask("end")
    assert engine.tail() == "order end"


def test_an_engine_waits_for_the_one_it_needs_and_does_not_start_without(
    engine, tmp_path, monkeypatch
):
    first = Spec(name="first", model="nothing")
    second = Spec(name="second", model="nothing", after="first")
    with fleet([second, first], tmp_path / "logs", 20) as engines:
        assert list(engines) == ["first", "second"]
        assert all(one.ready for one in engines.values())
    assert all(one.error == "it was stopped" for one in engines.values())
    monkeypatch.setattr(Engine, "wait", lambda self, seconds: False)
    with fleet([second, first], tmp_path / "logs", 20) as engines:
        assert list(engines) == ["first"]


def test_models_load_when_the_script_says_so(engine, tmp_path):
    steps = tmp_path / "steps"
    spec = Spec(name="held", model="nothing")
    logs = tmp_path / "logs"
    releases = threading.Timer(0.5, reach, (steps, "load"))
    began = time.monotonic()
    releases.start()
    with fleet([spec], logs, 20, steps) as engines:
        assert time.monotonic() - began >= 0.5
        assert engines["held"].ready
        assert engines["held"].ready["seconds"] <= time.monotonic() - began - 0.5


def test_an_engine_whose_port_was_taken_starts_once_more(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "APART_SECONDS", 0)
    (tmp_path / "echo.py").write_text(
        "import pathlib, sys\n"
        f"first = pathlib.Path({str(tmp_path / 'first')!r})\n"
        "if not first.exists():\n    first.touch(); sys.exit('code: -98, name: EADDRINUSE')\n"
        + ECHO
    )
    with fleet([Spec(name="late", model="nothing")], tmp_path / "logs", 20) as engines:
        assert not engines["late"].error
        assert engines["late"].ask("echo", streams=1) == {"streams": 1}
    (tmp_path / "echo.py").write_text("import sys; sys.exit('EADDRINUSE')")
    with fleet([Spec(name="never", model="nothing")], tmp_path / "logs", 20) as engines:
        assert engines["never"].error == "it ended with status 1"


def test_ports_of_engines_that_start_together_differ():
    ports = [first_port(process) for process in range(4_194_000, 4_194_000 + 2500)]
    spans = {port // PORTS_EACH for port in ports}
    assert len(spans) == len(ports)
    assert min(ports) >= 10_000
    assert max(ports) + PORTS_EACH <= 30_000


def test_an_unknown_predecessor_is_an_error(tmp_path):
    with (
        pytest.raises(ValueError, match="unknown"),
        fleet([Spec(name="a", model="", after="b")], tmp_path, 1),
    ):
        pass


def test_comparisons_name_the_run_that_differs():
    listed = [Case(name="w2", moet={}), Case(name="half", moet={}, like="w2", what="pool")]
    same, other = {"tokens": [[1]], "hashes": ["a"]}, {"tokens": [[1]], "hashes": ["b"]}
    results = {
        "w2": {"answers": {"1 cold": same, "1 warm": same, "4 cold": same}},
        "half": {"answers": {"1 cold": same, "1 warm": other}, "counts": {"steps": 5}},
    }
    records = compare(listed, results)
    assert [(record["run"], record["same"]) for record in records] == [
        ("1 cold", True),
        ("1 warm", False),
    ]
    unhashed = {"w2": {"answers": {"1 cold": {**same, "hashes": []}}}}
    unhashed["half"] = unhashed["w2"]
    assert [record["same"] for record in compare(listed, unhashed)] == [False]
    again = compare([Case(name="w2", moet={}, like="w2")], results)
    assert [(record["run"], record["same"]) for record in again] == [("1 warm", True)]
    figures = {one.name: one.median for one in measurements("m", records)}
    assert figures["every logit: m, pool, combinations"] == 2
    assert figures["every logit: m, pool, that differ"] == 1
    assert figures["every logit: m, pool, steps"] == 5

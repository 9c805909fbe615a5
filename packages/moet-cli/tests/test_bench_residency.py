"""`moet bench residency`, on traces of a few tokens."""

import json

import numpy as np
import pytest

from moet_cli.main import main
from moet_core.results import read_result
from moet_core.simulate import POLICIES, Settings, simulate
from moet_core.traces import RoutingTrace, save_trace, together


def make(seed, experts=8, decoded=30):
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(experts)[:2] for _ in range(2 * (decoded + 4))])
    return RoutingTrace(
        chosen.reshape(-1, 2, 2).astype(np.uint16),
        np.arange(4, decoded + 5),
        np.arange(decoded + 1) == 0,
        experts,
    )


@pytest.fixture
def files(tmp_path):
    for seed, name in enumerate(("prose", "code")):
        save_trace(tmp_path / f"{name}.npz", make(seed))
    return ["--trace", str(tmp_path / "prose.npz"), "--trace", str(tmp_path / "code.npz")]


def run(tmp_path, *args):
    path = tmp_path / "r.json"
    assert main(["bench", "residency", *args, "--out", str(path), "--force"]) == 0
    return {found.name: found.median for found in read_result(path).measurements}


def test_every_figure_is_the_simulator_s(tmp_path, files):
    found = run(tmp_path, *files, "--coverage", "50", "--coverage", "75", "--together")
    traces = {"prose": make(0), "code": make(1), "together": together([make(0), make(1)])}
    assert len(found) == 5 * 3 * 2 * len(POLICIES)
    for name, trace in traces.items():
        for policy in POLICIES:
            for coverage, slots in ((50, 8), (75, 12)):
                wanted = simulate(trace, slots, policy, Settings())
                where = f"at {coverage} %: {name}, {policy}"
                assert found[f"hit rate {where}"] == wanted.hit_rate
                assert found[f"clean steps {where}"] == wanted.clean / wanted.steps
                assert found[f"repaired steps {where}"] == wanted.repaired
                assert found[f"misses {where}"] == wanted.misses / wanted.steps
                assert found[f"moves {where}"] == wanted.moved / wanted.steps


def test_all_policies_and_sizes_unless_some_are_named(tmp_path, files):
    assert len(run(tmp_path, *files[:2])) == 5 * 10 * len(POLICIES)
    found = run(tmp_path, *files[:2], "--policy", "moet", "--coverage", "25")
    assert [name for name in found if "hit rate" in name] == ["hit rate at 25 %: prose, moet"]


@pytest.mark.parametrize(
    ("option", "settings"),
    [
        (["--half-life", "2"], Settings(half_life=2)),
        (["--margin", "0.25"], Settings(margin=0.25)),
        (["--promotions", "0"], Settings(promotions=0)),
        (["--count-prompts"], Settings(count_prompts=True)),
    ],
)
def test_each_setting_reaches_the_policy(tmp_path, option, settings):
    trace = make(7, decoded=300)
    save_trace(tmp_path / "t.npz", trace)
    args = ["--trace", str(tmp_path / "t.npz"), "--policy", "moet", "--coverage", "62.5"]
    found = run(tmp_path, *args, *option)
    wanted, usual = (simulate(trace, 10, "moet", s) for s in (settings, Settings()))
    assert found["moves at 62.5 %: t, moet"] == wanted.moved / wanted.steps
    assert wanted != usual, "the setting changes nothing here: choose another trace"


def test_json_is_one_object(tmp_path, files, capsys):
    run(tmp_path, *files[:2], "--coverage", "50", "--json")
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["result"]["kind"] == "residency"


class TestRefusals:
    @pytest.fixture
    def error(self, tmp_path, capsys):
        def run(*args, code=2):
            out = tmp_path / "none.json"
            assert main(["bench", "residency", *args, "--out", str(out)]) == code
            assert not out.exists()
            return capsys.readouterr().err

        return run

    def test_no_trace(self, error):
        assert "Missing option '--trace'" in error()

    def test_an_unknown_policy(self, error, files):
        assert "LRU" in error(*files, "--policy", "LRV")

    def test_two_traces_of_one_name(self, error, files):
        assert "different names, got 'prose' twice" in error(*files[:2], *files[:2])

    def test_a_trace_that_decodes_nothing(self, error, tmp_path):
        trace = make(0)
        prefill = RoutingTrace(trace.chosen, trace.ends, np.ones_like(trace.prefill), 8)
        save_trace(tmp_path / "t.npz", prefill)
        assert "found none but prefill" in error("--trace", str(tmp_path / "t.npz"))

    def test_models_that_cannot_be_served_together(self, error, tmp_path, files):
        save_trace(tmp_path / "t.npz", make(0, experts=9))
        message = error(*files, "--trace", str(tmp_path / "t.npz"), "--together")
        assert "--together: traces must share" in message

    def test_what_is_no_trace(self, error, tmp_path):
        (tmp_path / "t.npz").write_bytes(b"none")
        assert "is not a routing trace" in error("--trace", str(tmp_path / "t.npz"), code=1)

    def test_a_result_is_not_replaced_by_accident(self, tmp_path, files):
        path = tmp_path / "r.json"
        path.write_text("{}")
        assert main(["bench", "residency", *files, "--out", str(path)]) == 1
        assert path.read_text() == "{}"

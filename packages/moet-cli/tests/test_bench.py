import json

from moet_cli.client import Answer
from moet_cli.measure import prompt_of
from moet_core.results import read_result


class TestRun:
    def test_writes_a_result_with_samples_and_origin(self, moet, tmp_path):
        done = moet("bench", "run", "demo", "--json", "--out", "r.json")
        assert done.code == 0, done.err
        result = read_result(tmp_path / "r.json")
        found = {m.name: m for m in result.measurements}
        assert len(found["decode"].samples) == 5
        assert found["decode"].min > 10
        assert found["time to first token"].max < 10
        assert found["prefill prompt"].min > 150
        assert found["host memory"].max > 10_000_000
        assert (result.recipe, result.suite) == ("demo", "quick")
        assert result.command.argv[1:4] == ("bench", "run", "demo")
        assert result.command.server[0] == "env"
        assert {"VLLM_CPU_KVCACHE_SPACE=1", "moet_vllm.server"} <= set(result.command.server)
        assert done.objects()[0]["result"] == json.loads((tmp_path / "r.json").read_text())
        assert moet.all_gone(1)

    def test_an_existing_file_is_refused_before_anything_runs(self, moet, tmp_path):
        (tmp_path / "r.json").write_text("precious")
        done = moet("bench", "run", "demo", "--out", "r.json")
        assert done.code == 1
        assert "exists already" in done.err
        assert (tmp_path / "r.json").read_text() == "precious"
        assert not moet.pids.exists()


class TestPrompts:
    def test_no_two_share_their_first_word(self):
        assert prompt_of(5, 1000).split()[0] != prompt_of(5, 1001).split()[0]

    def test_the_same_seed_gives_the_same_words(self):
        assert prompt_of(150, 7) == prompt_of(150, 7)
        assert len(prompt_of(150, 7).split()) == 150


def test_the_rate_is_that_of_the_whole_request():
    assert Answer("p", "t", 1, 12, 1.0, 3.0).rate == 4.0


def test_codecs_writes_a_figure_for_each(moet, tmp_path):
    done = moet("bench", "codecs", "--seconds", "0.001", "--out", "c.json")
    assert done.code == 0, done.err
    result = read_result(tmp_path / "c.json")
    names = {m.name for m in result.measurements}
    assert {"encode nvfp4 to w2, torch", "encode bf16 to fp4-mx, numpy"} <= names
    assert result.kind == "codecs"
    assert str(tmp_path / "c.json").endswith(done.out.splitlines()[-1].removeprefix("result: "))

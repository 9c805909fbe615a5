from pathlib import Path
from types import SimpleNamespace

import pytest

import moet_kernels.sass.table
from moet_cli.main import main
from moet_core.results import read_result
from moet_kernels.sass.halves import Halves
from moet_kernels.sass.study import Study
from moet_kernels.sass.table import committed_table
from moet_kernels.sass.tools import have_tools

RESULTS = Path(__file__).parents[3] / "bench/results"
TABLES = Path(moet_kernels.sass.table.__file__).parent / "tables"

needs_compiler = pytest.mark.skipif(
    not have_tools("nvdisasm", "nvcc", "ptxas"),
    reason="the CUDA programs are not installed (nox -s sass installs them)",
)


@pytest.fixture
def kernels(capsys):
    """Run a command in this process; its exit code and what it said."""

    def run(*args):
        code = main(["kernels", *map(str, args)])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


@pytest.fixture
def studied(monkeypatch):
    """A study that takes no time: what is committed is learnt, half of it gives one wrong word."""

    def study(arch, folder, seeds):
        halves = tuple(Halves(10, 6, 3, ("w",)) for _ in seeds)
        table = committed_table(arch)
        return Study(arch.name, table, 100, 99, ("BRX: 1",), halves, 2, (), (), (2,))

    monkeypatch.setattr("moet_kernels.sass.study.study", study)


def test_learn_writes_the_committed_tables(kernels, studied, tmp_path):
    done = kernels("learn", tmp_path / "tables")
    assert (done.code, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines()] == ["sm_90a:", "sm_120a:"]
    for name in ("sm_90a.json.gz", "sm_120a.json.gz"):
        committed = TABLES / name
        assert (tmp_path / "tables" / name).read_bytes() == committed.read_bytes(), name


def test_measure_writes_a_result_file(kernels, studied, tmp_path):
    out = tmp_path / "out.json"
    done = kernels("measure", "--out", out, "--splits", "2")
    assert (done.code, done.out) == (0, f"result: {out}\n")
    result = read_result(out)
    found = {m.name: m.samples for m in result.measurements}
    assert found["sm_120a half: wrong bits"] == (1, 1)
    assert found["sm_90a words that are refused"] == (1,)
    assert result.kind == "sass-corpus"
    assert "Refused on sm_90a, form: words: BRX: 1." in result.notes


def test_measure_never_replaces_a_file_unasked(kernels, tmp_path):
    out = tmp_path / "out.json"
    out.write_text("mine")
    done = kernels("measure", "--out", out)
    assert done.code == 1
    assert "--force to replace it" in done.err
    assert out.read_text() == "mine"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("sass-*.json")), ids=lambda path: path.stem)
def test_committed_results_are_of_clean_checkouts(path):
    result = read_result(path)
    assert result.commit is not None
    assert not result.commit.dirty
    assert result.started < result.finished


def test_the_corpus_was_measured():
    assert read_result(RESULTS / "sass-corpus.json").kind == "sass-corpus"


@needs_compiler
def test_bundle_and_record_without_a_run(kernels, tmp_path):
    done = kernels("bundle", tmp_path / "bundle")
    assert done.code == 0, done.err
    assert done.out.startswith(f"{tmp_path / 'bundle'}: 2 kernels, 5 cases, ")
    done = kernels("record", tmp_path / "bundle", tmp_path, "--to", tmp_path / "results")
    assert done.code == 1
    assert "machine.json cannot be read" in done.err

import json

import pytest

from moet_cli import main as entry
from moet_cli.options import OPTIONS
from moet_cli.output import Output, printable


@pytest.fixture
def moet_here(capsys):
    """Return a function that runs a command in this process."""

    def run(*args):
        code = entry.main(args)
        return code, *capsys.readouterr()

    return run


class TestRecipes:
    def test_list_shows_every_recipe(self, moet_here):
        code, out, _ = moet_here("recipes", "list")
        assert code == 0
        assert "demo-gpu" in out

    def test_list_as_json(self, moet_here):
        _, out, err = moet_here("recipes", "list", "--json")
        assert json.loads(out)["recipes"]["demo-gpu"]["requires"] == {"gpus": 1}
        assert err == ""

    def test_show_is_yaml(self, moet_here):
        code, out, _ = moet_here("recipes", "show", "demo")
        assert code == 0
        assert "  model: tinymoe\n" in out

    def test_show_of_an_unknown_one(self, moet_here):
        code, out, err = moet_here("recipes", "show", "demo-gpus")
        assert (code, out) == (2, "")
        assert "did you mean 'demo-gpu'?" in err


class TestUsage:
    @pytest.mark.parametrize(
        ("args", "nearest"),
        [
            (["serv"], "'serve'"),
            (["recipes", "lst"], "'list'"),
            (["bench", "run", "demo", "--suit", "x"], "'--suite'"),
            (["bench", "run", "demo", "--suite", "quik"], "'quick'"),
        ],
    )
    def test_unknown_names_exit_2_with_the_nearest(self, moet_here, args, nearest):
        code, out, err = moet_here(*args)
        assert (code, out) == (2, "")
        assert f"did you mean {nearest}?" in err
        assert len(err.splitlines()) == 1

    def test_a_missing_argument_points_to_the_help(self, moet_here):
        code, _, err = moet_here("serve")
        assert code == 2
        assert err.endswith("See moet serve --help.\n")

    @pytest.mark.parametrize("group", [[], ["recipes"], ["bench"]])
    def test_no_command_shows_the_help(self, moet_here, group):
        code, out, err = moet_here(*group)
        assert (code, out) == (2, "")
        assert err.startswith("Usage: moet ")

    def test_help_is_no_error(self, moet_here):
        code, out, err = moet_here("serve", "--help")
        assert (code, err) == (0, "")
        assert "[-- VLLM_ARGUMENTS...]" in out
        assert all(name in out for name in OPTIONS)

    def test_version_names_what_it_runs_on(self, moet_here):
        code, out, _ = moet_here("--version")
        assert code == 0
        assert out.startswith("moet 0.1.0")
        assert ", vllm " in out


class TestInternalError:
    @pytest.fixture(autouse=True)
    def broken(self, monkeypatch):
        def fail(*_):
            raise KeyError("k")

        monkeypatch.setattr(Output, "result", fail)

    def test_is_one_line(self, moet_here):
        code, _, err = moet_here("recipes", "list")
        assert code == 1
        assert err.startswith("moet: internal error, KeyError: 'k'")
        assert "Traceback" not in err

    @pytest.mark.parametrize(
        "args", [["--verbose", "recipes", "list"], ["recipes", "list", "--verbose"]]
    )
    def test_verbose_shows_where(self, moet_here, args):
        code, _, err = moet_here(*args)
        assert code == 1
        assert "Traceback" in err


def test_printable_text_cannot_steer_the_terminal():
    assert printable("a\x1b[2J\u202eb\nc") == "a\ufffd[2J\ufffdb\nc"

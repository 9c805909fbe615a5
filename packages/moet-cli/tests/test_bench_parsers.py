"""`moet bench parsers`, on replies of a few hundred characters."""

from pathlib import Path

import pytest

from moet_cli.main import main
from moet_core.results import read_result
from moet_vllm.parsers import FAMILIES, bench


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZE", 400)
    monkeypatch.setattr(bench, "SIZES", (200, 800))


@pytest.mark.usefixtures("_short")
def test_it_writes_a_figure_for_every_family(tmp_path: Path) -> None:
    path = tmp_path / "parsers.json"
    assert main(["bench", "parsers", "--runs", "2", "--out", str(path)]) == 0
    names = [found.name for found in read_result(path).measurements]
    for family in FAMILIES:
        assert {f"{family}: value", f"{family}: growth"} <= set(names)


@pytest.mark.usefixtures("_short")
def test_a_result_is_not_replaced_by_accident(tmp_path: Path) -> None:
    path = tmp_path / "parsers.json"
    path.write_text("{}")
    assert main(["bench", "parsers", "--runs", "1", "--out", str(path)]) == 1
    assert path.read_text() == "{}"

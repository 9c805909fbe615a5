"""The hostile files under attacks/: refused with the right kind, quickly, in little memory."""

import json
import tracemalloc
from pathlib import Path

import pytest

from moet_store import ExpertStore, PackError, PackReader, verify_pack

ATTACKS = Path(__file__).parent / "attacks"
EXPECTED = json.loads((ATTACKS / "expected.json").read_text())


def kind_of_reading(path):
    """Open a pack and read its row; returns the kind of the error, None if there was none."""
    try:
        with ExpertStore(PackReader([path]), 1) as store:
            (completion,) = store.wait(store.submit([(3, 0)]))
            found = completion.error
            assert (found is None) == (store.get((3, 0)) is not None)
    except PackError as error:
        found = error
    return None if found is None else found.kind.name


def test_every_attack_has_its_folder():
    assert {path.name for path in ATTACKS.iterdir() if path.is_dir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_reading(name):
    tracemalloc.start()
    try:
        assert kind_of_reading(ATTACKS / name / "a.pack") == EXPECTED[name]
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", EXPECTED)
def test_verifying(name):
    report = verify_pack(ATTACKS / name / "a.pack", deep=True)
    wanted = EXPECTED[name]
    assert [problem.kind for problem in report.problems] == ([] if wanted is None else [wanted])

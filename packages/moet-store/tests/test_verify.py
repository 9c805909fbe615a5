import pytest

from moet_store import PackErrorKind, find_packs, verify_pack


def test_a_good_pack(make_pack):
    path, spec = make_pack()
    report = verify_pack(path)
    assert (report.spec, report.layers, report.rows, report.problems) == (spec, 3, 0, ())


def test_a_good_pack_to_the_last_row(make_pack):
    path, _ = make_pack(experts=9)
    seen = []
    report = verify_pack(path, deep=True, progress=lambda done, total: seen.append((done, total)))
    assert (report.rows, report.problems) == (27, ())
    assert seen == [(done, 27) for done in range(1, 28)]


def test_one_stripe_is_checked_alone(make_pack):
    path, _ = make_pack(stripe=1, stripes=2)
    report = verify_pack(path, deep=True)
    assert (report.rows, report.problems) == (6, ())


def test_layers_that_are_not_written_are_named(make_pack):
    path, _ = make_pack(written=(2,))
    report = verify_pack(path, deep=True)
    problems = [(problem.kind, problem.layer) for problem in report.problems]
    assert problems == [("ROW_MISSING", 1), ("ROW_MISSING", 5)]
    assert report.rows == 4


def test_a_missing_file(tmp_path):
    (problem,) = verify_pack(tmp_path / "absent.pack").problems
    assert problem.kind == "IO"
    assert "No such file" in problem.message


def test_a_folder_of_packs(make_pack, tmp_path):
    first, _ = make_pack()
    second, _ = make_pack(tier="fine")
    assert find_packs(tmp_path) == sorted([first, second])
    assert find_packs(first) == [first]


@pytest.mark.parametrize("name", ["empty", "absent"])
def test_no_packs(tmp_path, refused, name):
    (tmp_path / "empty").mkdir()
    with refused(PackErrorKind.NOT_A_PACK):
        find_packs(tmp_path / name)

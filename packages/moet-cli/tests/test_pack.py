import shutil

import pytest

from moet_core.results import read_result
from moet_store import PackWriter, plain_spec

ROW = 4096


@pytest.fixture
def pack(tmp_path):
    spec = plain_spec("rows", payload_bytes=ROW, layers=(2, 3), experts=3)
    with PackWriter(tmp_path, spec) as writer:
        for layer in spec.layers:
            writer.write_layer(layer, [bytes([layer + expert]) * ROW for expert in range(3)])
    return writer.path, spec


def damage(pack):
    path, spec = pack
    with path.open("r+b") as file:
        file.seek(spec.offset(3, 1))
        file.write(b"damage")


class TestVerify:
    def test_a_good_pack(self, moet, pack):
        done = moet("pack", "verify", str(pack[0]))
        assert (done.code, done.err) == (0, "")
        assert "good" in done.out
        assert "not read" in done.out

    def test_a_folder_to_the_last_row(self, moet, pack, tmp_path):
        done = moet("pack", "verify", str(tmp_path), "--deep", "--json")
        assert done.code == 0
        (found,) = done.objects()
        assert (found["event"], found["good"]) == ("verify", True)
        (report,) = found["packs"]
        assert (report["pack"], report["layers"], report["rows"]) == (str(pack[0]), 2, 6)

    def test_damage_in_a_row_is_named_by_the_deep_check_only(self, moet, pack):
        damage(pack)
        assert moet("pack", "verify", str(pack[0])).code == 0
        done = moet("pack", "verify", str(pack[0]), "--deep")
        assert done.code == 1
        assert f"{pack[0]}, layer 3, expert 1: row damaged" in done.out

    def test_damage_as_json(self, moet, pack):
        damage(pack)
        done = moet("pack", "verify", str(pack[0]), "--deep", "--json")
        (problem,) = done.objects()[0]["packs"][0]["problems"]
        assert (done.code, problem["kind"]) == (1, "ROW_DAMAGED")
        assert (problem["file"], problem["layer"], problem["expert"]) == (str(pack[0]), 3, 1)

    def test_no_pack(self, moet, tmp_path):
        done = moet("pack", "verify", str(tmp_path / "absent"))
        assert done.code == 1
        assert "wanted a *.pack file or a folder of them" in done.err
        assert "Traceback" not in done.err

    def test_an_unknown_command_of_the_group(self, moet):
        done = moet("pack", "verfiy", "x")
        assert done.code == 2
        assert "verify" in done.err


QUICK = ["--row-mib", "0.25", "--size-gib", "0.05", "--rounds", "2", "--seconds", "0.05"]


class TestBenchStore:
    @pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
    def test_with_fio(self, moet, tmp_path):
        done = moet("bench", "store", ".", *QUICK, "--out", "r.json", "--json")
        assert done.code == 0, done.err
        (found,) = done.objects()
        assert found["ratio_to_fio"] == found["ratios"]["0.25 MiB"] > 0
        assert found["yardsticks"]["0.25 MiB"].startswith("fio io_uring depth ")
        result = read_result(tmp_path / "r.json")
        assert result.kind == "store"
        assert {len(m.samples) for m in result.measurements} == {2}
        assert {"fio", "liburing", "xxhash"} <= set(result.versions)
        assert [path.name for path in tmp_path.iterdir()] == ["r.json"]

    def test_without_fio_it_says_what_it_compares_with(self, moet):
        done = moet("bench", "store", ".", *QUICK, "--out", "r.json", "--json", PATH="/nowhere")
        assert done.code == 0, done.err
        assert "fio is not installed" in done.err
        (found,) = done.objects()
        assert found["ratio_to_fio"] is None
        assert found["yardsticks"] == {"0.25 MiB": "plain O_DIRECT preadv loop"}

    def test_an_existing_file_is_refused_before_anything_runs(self, moet, tmp_path):
        (tmp_path / "r.json").write_text("precious")
        done = moet("bench", "store", ".", *QUICK, "--out", "r.json")
        assert done.code == 1
        assert "exists already" in done.err
        assert (tmp_path / "r.json").read_text() == "precious"

    def test_a_full_drive_is_told_before_anything_is_written(self, moet, tmp_path):
        done = moet("bench", "store", ".", "--row-mib", "64", "--size-gib", "16000")
        assert done.code == 1
        assert "no space: wanted 17,1" in done.err
        assert list(tmp_path.iterdir()) == []

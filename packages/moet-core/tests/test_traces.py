"""Routing traces come back as they were saved, and nothing else is taken for one."""

from contextlib import suppress

import numpy as np
import pytest

from moet_core.errors import ConfigError
from moet_core.traces import MAX_TRACE_BYTES, RoutingTrace, load_trace, save_trace, together


def make(prompt=3, decoded=2, experts=8, seed=0):
    """Return a trace of 2 layers, top 3: one prefill step, then decode steps of a token."""
    rng = np.random.default_rng(seed)
    count = prompt + decoded
    chosen = np.stack([rng.permutation(experts)[:3] for _ in range(2 * count)])
    return RoutingTrace(
        chosen.reshape(count, 2, 3).astype(np.uint16),
        np.arange(prompt, count + 1),
        np.arange(decoded + 1) == 0,
        experts,
    )


def fields(trace):
    return trace.chosen.tolist(), trace.ends.tolist(), trace.prefill.tolist(), trace.experts


@pytest.mark.parametrize("experts", [8, 256, 257, 384])
def test_saved_and_loaded(tmp_path, experts):
    trace = make(prompt=40, decoded=40, experts=experts)
    save_trace(tmp_path / "t.npz", trace)
    found = load_trace(tmp_path / "t.npz")
    assert fields(found) == fields(trace)
    assert found.chosen.dtype == np.uint16


def test_equal_traces_give_equal_bytes(tmp_path):
    for name in ("a", "b"):
        save_trace(tmp_path / name, make())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_sizes_and_steps():
    trace = make()
    assert (trace.layers, trace.top_k) == (2, 3)
    steps = list(trace.steps())
    assert [prefill for prefill, _ in steps] == [True, False, False]
    np.testing.assert_array_equal(np.concatenate([chosen for _, chosen in steps]), trace.chosen)
    assert [len(chosen) for _, chosen in steps] == [3, 1, 1]


class TestTogether:
    def test_decode_steps_of_a_turn_are_one_step(self):
        long, short = make(decoded=3, seed=1), make(decoded=1, seed=2)
        found = together([long, short])
        assert found.prefill.tolist() == [True, True, False, False, False]
        assert np.diff(found.ends, prepend=0).tolist() == [3, 3, 2, 1, 1]
        wanted = [long.chosen[:3], short.chosen[:3], long.chosen[3:4], short.chosen[3:]]
        np.testing.assert_array_equal(found.chosen, np.concatenate([*wanted, long.chosen[4:]]))

    def test_models_of_different_sizes(self):
        with pytest.raises(ValueError, match=r"must share .* \[\(2, 3, 8\), \(2, 3, 9\)\]"):
            together([make(), make(experts=9)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chosen": np.zeros((5, 2, 3), np.int64)}, "chosen must be uint16 with 3 dim.* got int64"),
        ({"chosen": np.zeros((0, 2, 3), np.uint16)}, r"not empty, got uint16 \(0, 2, 3\)"),
        ({"ends": np.array([3, 4, 5], np.int32)}, "ends must be int64"),
        ({"prefill": np.array([1, 0, 0])}, "prefill must be bool"),
        ({"ends": np.array([3, 5])}, "2 steps end but 3 have a kind"),
        ({"ends": np.array([3, 3, 5])}, "end at token 5, got ends from 3 to 5"),
        ({"ends": np.array([0, 4, 5])}, "end at token 5, got ends from 0 to 5"),
        ({"ends": np.array([3, 4, 6])}, "end at token 5, got ends from 3 to 6"),
        ({"experts": 7}, "experts must be below 7, got 7"),
        ({"chosen": np.zeros((5, 2, 3), np.uint16)}, "the same expert of a layer twice"),
    ],
)
def test_arrays_that_are_no_trace(changes, message):
    trace = make()
    parts = {name: getattr(trace, name) for name in ("chosen", "ends", "prefill", "experts")}
    with pytest.raises(ValueError, match=message):
        RoutingTrace(**(parts | changes))


class TestFile:
    def write(self, path, drop=(), **changes):
        arrays = {
            "version": np.int64(1),
            "experts": np.int64(8),
            "chosen": make().chosen,
            "ends": make().ends,
            "prefill": make().prefill,
        }
        kept = {name: array for name, array in (arrays | changes).items() if name not in drop}
        with path.open("wb") as file:
            np.savez_compressed(file, **kept)
        return path

    def test_the_helper_writes_a_good_file(self, tmp_path):
        assert fields(load_trace(self.write(tmp_path / "t"))) == fields(make())

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"version": np.int64(2)}, "wanted version 1, found version 2"),
            ({"version": np.float64(1)}, r"wanted one int64 as version, found float64 \(\)"),
            ({"experts": np.array([8])}, r"wanted one int64 as experts, found int64 \(1,\)"),
            ({"chosen": make().chosen.astype(np.int64)}, "experts as uint8 or uint16, found int64"),
            ({"ends": make().ends + 1}, "arrays that agree .* end at token 5"),
            ({"more": np.int64(1)}, r"the arrays chosen, .*, found .*more\.npy"),
            ({"drop": ("ends",)}, r"the arrays chosen, ends, .* found"),
            ({"ends": np.array([{}, 1, 2], object)}, "a compressed .npz of plain arrays"),
        ],
    )
    def test_other_arrays(self, tmp_path, changes, message):
        path = self.write(tmp_path / "t.npz", **changes)
        with pytest.raises(ConfigError, match=rf"t\.npz is not a routing trace: .*{message}"):
            load_trace(path)

    def test_no_file(self, tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
            load_trace(tmp_path / "none.npz")

    def test_no_archive(self, tmp_path):
        (tmp_path / "t.npz").write_bytes(b"version https://git-lfs")
        with pytest.raises(
            ConfigError, match=r"wanted a compressed .npz .*, found File is not a zip"
        ):
            load_trace(tmp_path / "t.npz")

    def test_damage_anywhere_is_an_error(self, tmp_path):
        path = self.write(tmp_path / "t.npz")
        data = path.read_bytes()
        for at in range(0, len(data), 7):
            path.write_bytes(data[:at])
            with pytest.raises(ConfigError):
                load_trace(path)
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
            with suppress(ConfigError):
                assert fields(load_trace(path)) == fields(make())  # a byte that nobody reads

    def test_a_file_that_would_fill_memory(self, tmp_path, monkeypatch):
        monkeypatch.setattr("moet_core.traces.MAX_TRACE_BYTES", 100)
        assert MAX_TRACE_BYTES > 100
        with pytest.raises(ConfigError, match="wanted 100 bytes at most, found "):
            load_trace(self.write(tmp_path / "t.npz"))

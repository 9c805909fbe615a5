"""The prefill kernels in the emulator, against their stated arithmetic and their twins."""

import msgspec
import numpy as np
import pytest

from moet_kernels.sass.emulate import emulate
from moet_kernels.sass.errors import EmulationError, Fault
from moet_kernels.sass.tools import have_tools
from moet_kernels.sm120.cases import CODECS, PREFILL, launch_of, make_case, mistake, run_case
from moet_kernels.sm120.write_tiles import TILES_KERNELS

WHOLE = [kernel for kernel in TILES_KERNELS if kernel.steps == 4]
HALF = [kernel for kernel in TILES_KERNELS if kernel.steps == 2]
EVERY_COUNT = (*range(17),)
needs_nvdisasm = pytest.mark.skipif(not have_tools("nvdisasm"), reason="nvdisasm is missing")


@pytest.fixture(params=TILES_KERNELS, ids=lambda kernel: kernel.name)
def kernel(request):
    return request.param


def case_of(kernel, k, *, exact, n=64, counts=(16, 1, 9, 0), seed=0, limit=np.inf):
    shape = CODECS[kernel.codec], *((n, k) if kernel.down else (k, n)), counts, seed
    return make_case(*shape, down=kernel.down, exact=exact, limit=limit, tiling=PREFILL)


def small(kernel, **options):
    """A case of few columns that are all the kernel's."""
    return case_of(kernel, 256 if kernel.steps == 4 else 192, **options)


def check(programs, kernel, case):
    found = run_case(programs(kernel.name), case)
    assert mistake(case, found) is None
    return found


@pytest.mark.parametrize("kernel", WHOLE, ids=lambda k: k.name)
@pytest.mark.parametrize("k", [128, 384, 512, 1024, 2048, 4096, 6144, 7168])
def test_representable_data_is_exact(programs, kernel, k):
    counts = EVERY_COUNT if k == 384 else (16, 1, 9, 0)
    check(programs, kernel, case_of(kernel, k, exact=True, counts=counts, seed=k))


@pytest.mark.parametrize("kernel", WHOLE, ids=lambda k: k.name)
@pytest.mark.parametrize("k", [384, 2048, 7168])
def test_random_data_is_within_1e_6(programs, kernel, k):
    check(programs, kernel, case_of(kernel, k, exact=False, seed=k, limit=7.0))


@pytest.mark.parametrize("kernel", HALF, ids=lambda k: k.name)
@pytest.mark.parametrize("k", [64, 192, 576])
@pytest.mark.parametrize("exact", [True, False])
def test_columns_divisible_by_64_only(programs, kernel, k, exact):
    check(programs, kernel, case_of(kernel, k, exact=exact, counts=EVERY_COUNT, seed=k))


@pytest.mark.parametrize("n", [64, 128, 192, 256, 320])
def test_every_kind_of_last_block(programs, kernel, n):
    check(programs, kernel, small(kernel, exact=False, n=n, counts=(16, 1), seed=n))


@needs_nvdisasm
@pytest.mark.parametrize("variant", ["tuned", "safe", "twin"])
def test_every_cubin_gives_the_same_bytes(programs, kernel, variant):
    case = case_of(kernel, 96 * kernel.steps, exact=False, n=192, limit=3.0)
    found = run_case(programs(kernel.name, variant), case)
    for name, value in check(programs, kernel, case).items():
        assert found[name].tobytes() == value.tobytes(), name


def test_a_vector_alone_and_among_others_has_the_same_bits(programs, kernel):
    case = small(kernel, exact=False, counts=(16,))
    together = check(programs, kernel, case)
    for place in (0, 7, 8, 15):
        groups = case.groups.copy()
        groups["count"] = 1
        for name in ("pair", "token"):
            groups[name][0, 0] = case.groups[name][0, place]
        alone = run_case(programs(kernel.name), msgspec.structs.replace(case, groups=groups))
        pair = groups["pair"][0, 0]
        for name in set(together) - {"written"}:
            assert (alone[name][pair] == together[name][pair]).all(), (place, name)


def test_only_the_rows_of_a_tile_are_written(programs, kernel):
    case = small(kernel, exact=True, counts=(3, 2, 12))
    groups = case.groups.copy()
    groups["count"][1] = 0
    found = run_case(programs(kernel.name), msgspec.structs.replace(case, groups=groups))
    kept = np.ones(len(case.expected), bool)
    kept[case.groups["pair"][1, :2]] = False
    parts = found["written"][: case.expected.size * (4 if kernel.down else 1)]
    assert (parts.reshape(len(kept), -1).all(axis=1) == kept).all()
    assert (parts.reshape(len(kept), -1).any(axis=1) == kept).all()


def test_only_the_vectors_of_a_tile_are_read(programs, kernel):
    case = small(kernel, exact=True, counts=(11, 3))
    used = case.groups["pair" if kernel.down else "token"][0, :11]
    groups = case.groups.copy()
    groups["count"][1] = 0
    launch, buffers = launch_of(msgspec.structs.replace(case, groups=groups))
    for buffer, of in ((buffers[1], case.vectors), (buffers[2], case.scales)):
        rows = buffer.written.reshape(of.shape)
        rows[:] = False
        rows[used] = True
    assert not buffers[1].written.all() or not kernel.down
    emulate(programs(kernel.name), launch, buffers)
    assert buffers[4].written.any()


def test_a_row_outside_of_the_pool_is_an_error(programs, kernel):
    case = small(kernel, exact=True, counts=(1,))
    groups = case.groups.copy()
    groups["row"] = 1
    with pytest.raises(EmulationError) as caught:
        run_case(programs(kernel.name), msgspec.structs.replace(case, groups=groups))
    assert caught.value.fault == Fault.OUT_OF_BOUNDS


@pytest.mark.parametrize("kernel", [k for k in WHOLE if not k.down], ids=lambda k: k.name)
@pytest.mark.parametrize("limit", [0.5, 4.0])
def test_gate_and_up_are_clamped(programs, kernel, limit):
    case = small(kernel, exact=False, limit=limit)
    check(programs, kernel, case)
    unlimited = msgspec.structs.replace(case, limit=np.inf)
    assert mistake(case, run_case(programs(kernel.name), unlimited)) is not None


@pytest.mark.parametrize("kernel", WHOLE[:2], ids=lambda k: k.name)
def test_nan_stays_nan(programs, kernel):
    """In its vector alone: a NaN in E4M3 makes the sums, their scale and the codes NaN."""
    case = small(kernel, exact=True, counts=(16,), limit=7.0)
    vectors = case.vectors.copy()
    bad = case.groups["pair" if kernel.down else "token"][0, 5]
    vectors[bad, 100] = 0x7F
    found = run_case(programs(kernel.name), msgspec.structs.replace(case, vectors=vectors))
    pair = case.groups["pair"][0, 5]
    wrong = np.isnan(found["parts"]) if kernel.down else found["codes"] & 0x7F == 0x7F
    assert wrong[pair].all()
    assert not np.delete(wrong, pair, axis=0).any()

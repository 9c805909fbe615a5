"""The decode kernels in the emulator, against their stated arithmetic and their twins."""

import msgspec
import numpy as np
import pytest

from moet_kernels.sass.emulate import emulate
from moet_kernels.sass.errors import EmulationError, Fault
from moet_kernels.sass.tools import have_tools
from moet_kernels.sm120 import cases, cases_bf16
from moet_kernels.sm120.cases import CODECS, make_case
from moet_kernels.sm120.cases_bf16 import make_bf16_case
from moet_kernels.sm120.write import KERNELS

WHOLE = [kernel for kernel in KERNELS if kernel.steps == 4]
HALF = [kernel for kernel in KERNELS if kernel.steps == 2]
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 0)
needs_nvdisasm = pytest.mark.skipif(not have_tools("nvdisasm"), reason="nvdisasm is missing")


def case_of(kernel, k, *, exact, n=96, counts=COUNTS, seed=0, limit=np.inf):
    hidden, intermediate = (n, k) if kernel.down else (k, n)
    shape = hidden, intermediate, counts, seed
    options = {"down": kernel.down, "exact": exact, "limit": limit}
    if kernel.codec == "bf16":
        return make_bf16_case(*shape, **options)
    return make_case(CODECS[kernel.codec], *shape, **options)


def of(kernel):
    """What runs and judges a kernel's cases."""
    return cases_bf16 if kernel.codec == "bf16" else cases


def check(programs, kernel, case):
    found = of(kernel).run_case(programs(kernel.name), case)
    assert of(kernel).mistake(case, found) is None
    return found


@pytest.mark.parametrize("kernel", WHOLE, ids=lambda k: k.name)
@pytest.mark.parametrize("k", [128, 384, 512, 1024, 2048, 4096, 6144, 7168])
def test_representable_data_is_exact(programs, kernel, k):
    check(programs, kernel, case_of(kernel, k, exact=True, n=64, seed=k))


@pytest.mark.parametrize("kernel", WHOLE, ids=lambda k: k.name)
@pytest.mark.parametrize("k", [384, 2048, 7168])
def test_random_data_is_within_1e_6(programs, kernel, k):
    check(programs, kernel, case_of(kernel, k, exact=False, n=64, seed=k, limit=7.0))


@pytest.mark.parametrize("kernel", HALF, ids=lambda k: k.name)
@pytest.mark.parametrize("k", [64, 192, 576])
@pytest.mark.parametrize("exact", [True, False])
def test_columns_divisible_by_64_only(programs, kernel, k, exact):
    check(programs, kernel, case_of(kernel, k, exact=exact, seed=k))


@pytest.mark.parametrize("n", [32, 64, 96, 128, 160, 192])
def test_every_kind_of_last_tile(programs, kernel, n):
    k = 256 if kernel.steps == 4 else 192
    check(programs, kernel, case_of(kernel, k, exact=False, n=n, counts=(8, 1), seed=n))


@needs_nvdisasm
@pytest.mark.parametrize("variant", ["tuned", "safe", "twin"])
@pytest.mark.parametrize("exact", [True, False])
def test_every_cubin_gives_the_same_bytes(programs, kernel, variant, exact):
    case = case_of(kernel, 288 * kernel.steps, exact=exact, limit=3.0)
    found = of(kernel).run_case(programs(kernel.name, variant), case)
    for name, value in check(programs, kernel, case).items():
        assert found[name].tobytes() == value.tobytes(), name


def test_a_vector_alone_and_among_others_has_the_same_bits(programs, kernel):
    k = 256 if kernel.steps == 4 else 192
    case = case_of(kernel, k, exact=False, counts=(8,))
    together = check(programs, kernel, case)
    for place in range(8):
        groups = case.groups.copy()
        groups["count"] = 1
        for name in ("pair", "token"):
            groups[name][0, 0] = case.groups[name][0, place]
        alone = of(kernel).run_case(
            programs(kernel.name), msgspec.structs.replace(case, groups=groups)
        )
        pair = groups["pair"][0, 0]
        for name in set(together) - {"written"}:
            assert (alone[name][pair] == together[name][pair]).all(), (place, name)


def test_only_the_rows_of_a_group_are_written(programs, kernel):
    k = 256 if kernel.steps == 4 else 192
    case = case_of(kernel, k, exact=True, counts=(3, 2, 4))
    groups = case.groups.copy()
    groups["count"][1] = 0
    found = of(kernel).run_case(programs(kernel.name), msgspec.structs.replace(case, groups=groups))
    kept = np.ones(len(case.expected), bool)
    kept[case.groups["pair"][1, :2]] = False
    size = 4 if kernel.down else 2 if kernel.codec == "bf16" else 1
    parts = found["written"][: case.expected.size * size]
    assert (parts.reshape(len(kept), -1).all(axis=1) == kept).all()
    assert (parts.reshape(len(kept), -1).any(axis=1) == kept).all()


def test_only_the_vectors_of_a_group_are_read(programs, kernel):
    k = 256 if kernel.steps == 4 else 192
    case = case_of(kernel, k, exact=True, counts=(2, 3))
    used = case.groups["pair" if kernel.down else "token"][0, :2]
    groups = case.groups.copy()
    groups["count"][1] = 0
    launch, buffers = of(kernel).launch_of(msgspec.structs.replace(case, groups=groups))
    inputs = [(buffers[1], k), (buffers[2], k // 32)]
    if kernel.codec == "bf16":
        inputs = [(buffers[1], 2 * k)]
    for buffer, size in inputs:
        rows = buffer.written.reshape(-1, size)
        rows[:] = False
        rows[used] = True
    emulate(programs(kernel.name), launch, buffers)
    assert buffers[3 if kernel.codec == "bf16" else 4].written.any()


def test_a_row_outside_of_the_pool_is_an_error(programs, kernel):
    case = case_of(kernel, 256 if kernel.steps == 4 else 192, exact=True, counts=(1,))
    groups = case.groups.copy()
    groups["row"] = 1
    with pytest.raises(EmulationError) as caught:
        of(kernel).run_case(programs(kernel.name), msgspec.structs.replace(case, groups=groups))
    assert caught.value.fault == Fault.OUT_OF_BOUNDS


GATE_UP = [kernel for kernel in WHOLE if not kernel.down and kernel.codec in ("w2", "bf16")]


@pytest.mark.parametrize("kernel", GATE_UP, ids=lambda k: k.name)
@pytest.mark.parametrize("limit", [0.5, 4.0])
def test_gate_and_up_are_clamped(programs, kernel, limit):
    case = case_of(kernel, 256, exact=False, limit=limit)
    check(programs, kernel, case)
    unlimited = msgspec.structs.replace(case, limit=np.inf)
    assert of(kernel).mistake(case, of(kernel).run_case(programs(kernel.name), unlimited))


@pytest.mark.parametrize("name", ["bf16_down", "bf16_down_k64"])
@pytest.mark.parametrize("scales", [(0, 1, 2), (219, 220)])
def test_scales_of_any_size_are_exact(programs, name, scales):
    """Byte 0 is 2^-127, a subnormal float32."""
    (kernel,) = (kernel for kernel in KERNELS if kernel.name == name)
    k = 256 if kernel.steps == 4 else 192
    case = case_of(kernel, k, exact=True, counts=(3, 1))
    rows = case.rows.copy()
    length = case.layout.scales2.length
    drawn = np.random.default_rng(3).choice(np.array(scales, np.uint8), (len(rows), length))
    rows[:, case.layout.scales2.slice] = drawn
    vectors = cases_bf16.from_bfloat16(case.vectors).astype(np.float64)
    expected = cases.expected_of(case.layout, rows, case.groups, vectors, case.limit, down=True)
    check(programs, kernel, msgspec.structs.replace(case, rows=rows, expected=expected))


@pytest.mark.parametrize("judge", [cases, cases_bf16])
def test_a_wrong_result_is_described(judge):
    case = case_of(WHOLE[1], 128, exact=True, counts=(2,))
    parts = case.expected.astype(np.float32)
    assert judge.mistake(case, {"parts": parts}) is None
    parts[1, 5] += 1
    assert judge.mistake(case, {"parts": parts}).startswith("element [1, 5] is ")
    assert "(1 of 192 differ)" in judge.mistake(case, {"parts": parts})
    parts[1, 5] = np.nan
    assert judge.mistake(case, {"parts": parts}).startswith("element [1, 5] is nan")


@pytest.mark.parametrize("kernel", GATE_UP, ids=lambda k: k.name)
@pytest.mark.parametrize("limit", [7.0, np.inf])
def test_a_vector_that_is_not_a_number_stays_one(programs, kernel, limit):
    case = case_of(kernel, 256, exact=True, counts=(3,), limit=limit)
    vectors = case.vectors.copy()
    bad = int(case.groups["token"][0, 1])
    vectors[bad, 40] = 0x7FC0 if kernel.codec == "bf16" else 0x7F
    found = of(kernel).run_case(
        programs(kernel.name), msgspec.structs.replace(case, vectors=vectors)
    )
    values = found["activated"] if "activated" in found else cases.E4M3_VALUES[found["codes"]]
    lost = np.zeros(values.shape, bool)
    lost[case.groups["pair"][0, 1]] = True
    assert (np.isnan(values) == lost).all()

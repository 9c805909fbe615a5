import numpy as np
import pytest
from msgspec import structs

from moet_core.errors import TensorError
from moet_core.samples import FORMATS, difficult_source, typical_source
from moet_core.sources import (
    FloatSource,
    Fp8Source,
    Mxfp4Source,
    Nvfp4Source,
    to_float64,
    validate,
)

N, K = 16, 64


def with_value(array, row, column, value):
    changed = array.copy()
    changed[row, column] = value
    return changed


def test_mxfp4_value_is_nibble_times_power_of_two():
    source = typical_source("mxfp4", N, K)
    nibbles = with_value(source.nibbles, 2, 1, 0x9F)  # columns 2 and 3: -6 and -0.5
    scale = with_value(source.scale, 2, 0, 130)
    values = to_float64(Mxfp4Source("x", nibbles, scale))
    assert values[2, 2:4].tolist() == [-48.0, -4.0]


def test_fp8_value_is_weight_times_its_blocks_scale():
    weight = np.full((48, 64), 0x38, dtype=np.uint8)  # 1.0
    scale = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    values = to_float64(Fp8Source("x", weight, scale, (20, 40)))
    assert values[19, 39:41].tolist() == [1, 2]
    assert values[20, 39:41].tolist() == [3, 4]
    assert values[47, [0, 63]].tolist() == [5, 6]


def test_nvfp4_value_is_nibble_times_two_scales():
    nibbles = np.full((16, 16), 0xB7, dtype=np.uint8)  # 6 and -1.5
    scale = np.full((16, 2), 0x40, dtype=np.uint8)  # 2.0
    values = to_float64(Nvfp4Source("x", nibbles, scale, np.float32(0.1)))
    scale_2 = float(np.float32(0.1))
    assert values[0, :2].tolist() == [12 * scale_2, -3 * scale_2]


def test_bf16_bits_are_read_as_bf16():
    bits = np.full((16, 32), 0xC020, dtype=np.uint16)
    assert to_float64(FloatSource("x", bits, bf16=True))[3, 3] == -2.5


@pytest.mark.parametrize("source_format", FORMATS)
def test_samples_are_valid(source_format):
    validate(typical_source(source_format, N, K))
    validate(difficult_source(source_format, N, K))


def test_nan_and_infinity_are_named_with_their_place():
    source = typical_source("fp32", N, K)
    for value, what in ((np.nan, "NaN"), (-np.inf, "infinity")):
        bad = structs.replace(source, weight=with_value(source.weight, 3, 17, value))
        with pytest.raises(TensorError, match=f"got {what} at row 3, column 17 of the weight"):
            validate(bad)


def test_the_first_bad_value_is_named():
    source = typical_source("bf16", N, K)
    weight = with_value(with_value(source.weight, 5, 0, 0x7FC0), 4, 60, 0xFF80)
    with pytest.raises(TensorError, match="infinity at row 4, column 60"):
        validate(structs.replace(source, weight=weight))


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_e4m3_nan_is_refused_in_weights_and_scales(byte):
    fp8, nvfp4 = typical_source("fp8", N, K), typical_source("nvfp4", N, K)
    where = f"NaN \\(byte 0x{byte:02X}\\) at row 1, column 2 of the"
    with pytest.raises(TensorError, match=f"{where} weight"):
        validate(structs.replace(fp8, weight=with_value(fp8.weight, 1, 2, byte)))
    with pytest.raises(TensorError, match=f"{where} scale"):
        validate(structs.replace(nvfp4, scale=with_value(nvfp4.scale, 1, 2, byte)))


def test_e8m0_nan_is_refused():
    source = typical_source("mxfp4", N, K)
    with pytest.raises(TensorError, match=r"NaN \(byte 0xFF\) at row 7, column 1 of the scale"):
        validate(structs.replace(source, scale=with_value(source.scale, 7, 1, 0xFF)))


def test_fp8_scale_must_be_finite():
    source = typical_source("fp8", N, K)
    scale = with_value(source.scale, 0, 0, np.inf)
    with pytest.raises(TensorError, match="infinity at row 0, column 0 of the scale"):
        validate(structs.replace(source, scale=scale))


@pytest.mark.parametrize("source_format", ["mxfp4", "fp8", "nvfp4"])
def test_a_missing_scale_is_refused(source_format):
    source = typical_source(source_format, N, K)
    with pytest.raises(TensorError, match=r"wanted a scale with two dimensions.*got none"):
        validate(structs.replace(source, scale=None))


@pytest.mark.parametrize("source_format", ["mxfp4", "fp8", "nvfp4"])
def test_a_scale_of_the_wrong_shape_is_refused(source_format):
    source = typical_source(source_format, N, K)
    wide = np.concatenate([source.scale, source.scale], axis=1)
    with pytest.raises(TensorError, match=r"wanted a scale of shape .* for a weight \[16, 64\]"):
        validate(structs.replace(source, scale=wide))


@pytest.mark.parametrize("block", [(0, 128), (128, -1)])
def test_fp8_blocks_must_be_positive(block):
    source = structs.replace(typical_source("fp8", N, K), block=block)
    with pytest.raises(TensorError, match="wanted a block of positive rows and columns"):
        validate(source)


@pytest.mark.parametrize("scale_2", [None, np.nan, np.inf, 1e39, 0.1, np.zeros(2, np.float32)])
def test_nvfp4_needs_a_finite_float32_tensor_scale(scale_2):
    source = structs.replace(typical_source("nvfp4", N, K), scale_2=scale_2)
    with pytest.raises(TensorError, match="wanted a finite float32 tensor scale"):
        validate(source)


@pytest.mark.parametrize("scale_2", [0.5, np.float32(0.5), np.full((1,), 0.5, np.float32)])
def test_nvfp4_tensor_scale_may_be_a_number_or_one_element(scale_2):
    validate(structs.replace(typical_source("nvfp4", N, K), scale_2=scale_2))


@pytest.mark.parametrize(
    "weight",
    [
        np.zeros((16, 64), np.int32),
        np.zeros((16, 64), np.uint16),
        np.zeros((16, 64, 1), np.float32),
        np.zeros(64, np.float32),
        None,
    ],
)
def test_weights_must_be_float_matrices(weight):
    with pytest.raises(TensorError, match="wanted a weight with two dimensions"):
        validate(FloatSource("x", weight))


@pytest.mark.parametrize("shape", [(0, 64), (16, 0), (15, 64), (16, 40)])
def test_shapes_must_be_whole_tiles(shape):
    with pytest.raises(TensorError, match="N a positive multiple of 16 and K of 32"):
        validate(FloatSource("x", np.zeros(shape, np.float32)))


def test_packed_weights_must_be_bytes():
    source = typical_source("mxfp4", N, K)
    with pytest.raises(TensorError, match="of type uint8, got int8"):
        validate(structs.replace(source, nibbles=source.nibbles.view(np.int8)))

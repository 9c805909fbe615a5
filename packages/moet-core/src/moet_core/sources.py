"""What a checkpoint stores for one matrix [N, K], and how it becomes numbers.

The structs hold arrays of numpy here and of torch in `moet_kernels`; their checks of structure
are shared. `name` is the tensor's name in the checkpoint, for errors.
"""

import math
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from moet_core.errors import TensorError
from moet_core.floats import (
    E2M1_VALUES,
    E4M3_VALUES,
    bf16_to_float32,
    e8m0_to_float64,
    split_nibbles,
)
from moet_core.layout import check_shape

__all__ = [
    "FloatSource",
    "Fp8Source",
    "Mxfp4Source",
    "Nvfp4Source",
    "Source",
    "check_structure",
    "expand_blocks",
    "refuse",
    "tensor_scale_of",
    "to_float64",
    "validate",
]

Array = TypeVar("Array")


class FloatSource(Struct, Generic[Array], frozen=True, eq=False):
    """Plain weights: float16, float32, float64 or bfloat16 [N, K].

    numpy has no bfloat16: give its bit patterns as uint16 and say `bf16=True`.
    """

    format: ClassVar[str] = "float"
    name: str
    weight: Array
    bf16: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Return (N, K)."""
        return _shape(self.weight, 1)


class Mxfp4Source(Struct, Generic[Array], frozen=True, eq=False):
    """MXFP4: e2m1 nibbles uint8 [N, K/2], low nibble first, and E8M0 scales uint8 [N, K/32]."""

    format: ClassVar[str] = "mxfp4"
    name: str
    nibbles: Array
    scale: Array

    @property
    def shape(self) -> tuple[int, int]:
        """Return (N, K)."""
        return _shape(self.nibbles, 2)


class Fp8Source(Struct, Generic[Array], frozen=True, eq=False):
    """Block FP8: e4m3 weights uint8 [N, K] times a float32 scale for each block of rows x columns.

    `scale` is [ceil(N / rows), ceil(K / columns)] for `block = (rows, columns)`; one scale for the
    whole tensor is the block (N, K).
    """

    format: ClassVar[str] = "fp8"
    name: str
    weight: Array
    scale: Array
    block: tuple[int, int] = (128, 128)

    @property
    def shape(self) -> tuple[int, int]:
        """Return (N, K)."""
        return _shape(self.weight, 1)


class Nvfp4Source(Struct, Generic[Array], frozen=True, eq=False):
    """NVFP4: value = e2m1 nibble * e4m3 block scale * tensor scale.

    `nibbles` is uint8 [N, K/2], low nibble first; `scale` is e4m3 bits uint8 [N, K/16]; `scale_2`
    is one float32 (a number, or an array of one element).
    """

    format: ClassVar[str] = "nvfp4"
    name: str
    nibbles: Array
    scale: Array
    scale_2: Any

    @property
    def shape(self) -> tuple[int, int]:
        """Return (N, K)."""
        return _shape(self.nibbles, 2)


Source = FloatSource[Any] | Mxfp4Source[Any] | Fp8Source[Any] | Nvfp4Source[Any]


def to_float64(source: Source) -> NDArray[np.float64]:
    """Return the values of a valid numpy source as float64 [N, K], exactly, signs of zero kept."""
    match source:
        case FloatSource():
            weight = bf16_to_float32(source.weight) if source.bf16 else source.weight
            return weight.astype(np.float64)
        case Mxfp4Source():
            scale = e8m0_to_float64(source.scale).repeat(32, axis=1)
            return E2M1_VALUES[split_nibbles(source.nibbles)] * scale
        case Fp8Source():
            return E4M3_VALUES[source.weight] * expand_blocks(source).astype(np.float64)
        case Nvfp4Source():
            scale = E4M3_VALUES[source.scale].repeat(16, axis=1) * tensor_scale_of(source)
            return E2M1_VALUES[split_nibbles(source.nibbles)] * scale


def expand_blocks(source: Fp8Source[Any]) -> Any:
    """Return the scale of every weight of an FP8 source, float32 [N, K]."""
    n, k = source.shape
    rows, columns = source.block
    return source.scale[np.arange(n) // rows][:, np.arange(k) // columns]


def tensor_scale_of(source: Nvfp4Source[Any]) -> float:
    """Return `scale_2` as a number; TensorError if it is missing or no finite float32."""
    wanted = "a finite float32 tensor scale (weight_scale_2)"
    if source.scale_2 is None:
        raise TensorError(source.name, wanted=wanted, got="none")
    if math.prod(getattr(source.scale_2, "shape", ())) != 1:
        raise TensorError(source.name, wanted=wanted, got=f"shape {list(source.scale_2.shape)}")
    scale = float(getattr(source.scale_2, "item", lambda: source.scale_2)())
    with np.errstate(over="ignore"):
        exact = float(np.float64(scale).astype(np.float32)) == scale
    if not (math.isfinite(scale) and exact):
        raise TensorError(source.name, wanted=wanted, got=f"{scale!r}")
    return scale


def validate(source: Source) -> None:
    """Raise TensorError unless `source` is a well-formed numpy source of finite values."""
    check_structure(source)
    match source:
        case FloatSource():
            weight = bf16_to_float32(source.weight) if source.bf16 else source.weight
            refuse(source.name, "weight", weight, ~np.isfinite(weight))
        case Mxfp4Source():
            refuse(source.name, "scale", source.scale, source.scale == 0xFF)
        case Fp8Source():
            refuse(source.name, "weight", source.weight, (source.weight & 0x7F) == 0x7F)
            refuse(source.name, "scale", source.scale, ~np.isfinite(source.scale))
        case Nvfp4Source():
            refuse(source.name, "scale", source.scale, (source.scale & 0x7F) == 0x7F)


def refuse(name: str, part: str, values: Any, bad: Any) -> None:
    """Raise TensorError naming the first place where `bad` is true, if there is one.

    Args:
        name: The tensor's name.
        part: Which array it is, "weight" or "scale".
        values: The array [rows, columns]; bytes count as an encoding of NaN.
        bad: bool [rows, columns], true where a value is refused.
    """
    if not bad.any():
        return
    row, column = divmod(int(bad.reshape(-1).argmax()), bad.shape[1])
    value = float(values[row, column])
    encoded = "uint8" in str(values.dtype)
    what = "NaN" if encoded or math.isnan(value) else "infinity"
    detail = f" (byte 0x{int(value):02X})" if encoded else ""
    raise TensorError(
        name,
        wanted=f"a finite {part}",
        got=f"{what}{detail} at row {row}, column {column} of the {part}",
        advice="The file is damaged or was exported wrongly; download it again.",
    )


def check_structure(source: Source) -> None:
    """Raise TensorError unless dtypes and shapes of a source fit together.

    Looks at no values but `scale_2`. N must be a multiple of 16 and K of 32, neither zero.
    """
    name = source.name
    match source:
        case FloatSource():
            floats = ("float16", "float32", "float64", "bfloat16")
            _check_matrix(name, "weight", source.weight, ("uint16",) if source.bf16 else floats)
        case Mxfp4Source():
            _check_matrix(name, "weight", source.nibbles, ("uint8",))
            _check_matrix(name, "scale", source.scale, ("uint8", "float8_e8m0fnu"))
        case Fp8Source():
            _check_matrix(name, "weight", source.weight, ("uint8", "float8_e4m3fn"))
            _check_matrix(name, "scale", source.scale, ("float32",))
            if min(source.block) <= 0:
                wanted = "a block of positive rows and columns"
                raise TensorError(name, wanted=wanted, got=f"{list(source.block)}")
        case Nvfp4Source():
            _check_matrix(name, "weight", source.nibbles, ("uint8",))
            _check_matrix(name, "scale", source.scale, ("uint8", "float8_e4m3fn"))
            tensor_scale_of(source)
    check_shape(*source.shape, name)
    _check_scale_shape(source)


def _check_scale_shape(source: Source) -> None:
    if isinstance(source, FloatSource):
        return
    n, k = source.shape
    match source:
        case Mxfp4Source():
            wanted = (n, k // 32)
        case Fp8Source():
            wanted = (-(-n // source.block[0]), -(-k // source.block[1]))
        case Nvfp4Source():
            wanted = (n, k // 16)
    if tuple(source.scale.shape) != wanted:
        raise TensorError(
            source.name,
            wanted=f"a scale of shape {list(wanted)} for a weight [{n}, {k}]",
            got=f"{list(source.scale.shape)}",
        )


def _check_matrix(name: str, part: str, array: Any, dtypes: tuple[str, ...]) -> None:
    wanted = f"a {part} with two dimensions of type {' or '.join(dtypes)}"
    if array is None:
        raise TensorError(name, wanted=wanted, got="none")
    dtype = str(array.dtype).removeprefix("torch.")
    if array.ndim != 2 or dtype not in dtypes:
        raise TensorError(name, wanted=wanted, got=f"{dtype} {list(array.shape)}")


def _shape(array: Any, per_element: int) -> tuple[int, int]:
    n, columns = array.shape
    return int(n), int(columns) * per_element

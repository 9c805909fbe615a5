"""The portable kernels on the CPU: Triton's interpreter, taught inline PTX and bfloat16 products.

For tests and for whoever debugs a kernel; slow. The environment variable TRITON_INTERPRET must be
1 before Triton is imported, in a process of its own, then `install` completes the interpreter.
"""

import multiprocessing
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["call", "install", "interpreter_process", "run_ptx"]

Words = NDArray[np.uint32]


def run_ptx(text: str, inputs: list[Words], outputs: int) -> list[Words]:
    """Run a snippet of straight-line PTX on words of any shape.

    Args:
        text: The snippet; `$0` and so on are its results, then its inputs.
        inputs: uint32 arrays of one shape.
        outputs: Number of results.

    Raises:
        ValueError: An instruction that is not known here, or a result that is not written.
    """
    registers = {f"${outputs + i}": words for i, words in enumerate(inputs)}
    shape = inputs[0].shape

    def value(operand: str) -> Words:
        if operand in registers:
            return registers[operand]
        return np.full(shape, int(operand, 0), np.uint32)

    for statement in text.strip().strip("{}").split(";"):
        words = re.split(r"[\s,]+", statement.strip())
        if words[0] and words[0] != ".reg":
            operation = _OPERATIONS.get(words[0])
            if operation is None:
                raise ValueError(f"the PTX instruction {words[0]!r} is not known here")
            registers[words[1]] = operation(*map(value, words[2:]))
    try:
        return [registers[f"${i}"] for i in range(outputs)]
    except KeyError as error:
        raise ValueError(f"the PTX snippet never writes {error}") from None


def install() -> None:
    """Teach Triton's interpreter inline PTX and bfloat16, which it holds as uint16 and truncates.

    Raises:
        RuntimeError: TRITON_INTERPRET was not 1 when Triton was imported.
    """
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if not isinstance(tl.cdiv, triton.runtime.interpreter.InterpretedFunction):
        raise RuntimeError("TRITON_INTERPRET must be 1 before Triton is imported")  # noqa: TRY004

    class Call:
        def __init__(self, results: list[Any]) -> None:
            self.get_result = results.__getitem__

    def create_inline_asm(
        _self: Any, text: str, _constraints: str, values: Any, types: Any, _pure: bool, pack: int
    ) -> Call:
        if pack != 1 or any(kind.scalar != tl.int32 for kind in types):
            raise ValueError("inline PTX is only known for one int32 at a time")
        inputs = [value.data.view(np.uint32) for value in values]
        found = run_ptx(text, inputs, len(types))
        return Call([TensorHandle(words.view(np.int32), tl.int32) for words in found])

    def create_dot(_self: Any, a: Any, b: Any, d: Any, _precision: Any, _imprecise: Any) -> Any:
        left, right = (_widened(side.data, side.dtype == tl.bfloat16) for side in (a, b))
        return TensorHandle(np.matmul(left, right, dtype=np.float32) + d.data, d.dtype.scalar)

    plain_cast = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, source: Any, wanted: Any) -> Any:
        if source.dtype.scalar == tl.float32 and wanted.scalar == tl.bfloat16:
            return TensorHandle(_rounded(source.data), tl.bfloat16)
        return plain_cast(self, source, wanted)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_inline_asm = create_inline_asm
    InterpreterBuilder.create_dot = create_dot


def interpreter_process() -> ProcessPoolExecutor:
    """Start a process whose Triton interprets; submit `call` to it, close it when done."""
    context = multiprocessing.get_context("spawn")
    process = ProcessPoolExecutor(1, mp_context=context, initializer=install)
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        process.submit(os.getpid).result()
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before
    return process


def call(
    function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Call a function; return its result, and its arguments, which it may have changed."""
    return function(*args, **options), args, options


def _rounded(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Round float32 to bfloat16, to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _widened(values: NDArray[Any], bfloat16: bool) -> NDArray[Any]:
    return (values.astype(np.uint32) << 16).view(np.float32) if bfloat16 else values


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    source = np.stack([(word >> shift) & 0xFF for word in (a, b) for shift in (0, 8, 16, 24)])
    result = np.zeros_like(a)
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = np.take_along_axis(source, (nibble & 7)[None].astype(np.int64), 0)[0]
        sign = np.where(byte & 0x80, 0xFF, 0).astype(np.uint32)
        result |= np.where(nibble & 8, sign, byte).astype(np.uint32) << np.uint32(8 * place)
    return result


def _fma_bf16x2(a: Words, b: Words, c: Words) -> Words:
    """Multiply and add both halves, rounded once to nearest even, subnormals kept."""
    result = np.zeros_like(a)
    for shift in (0, 16):
        x, y, z = (
            ((word >> shift & 0xFFFF) << 16).view(np.float32).astype(np.float64)
            for word in (a, b, c)
        )
        # The snippets' products are exact, so that going over float32 rounds only once.
        result |= _rounded(x * y + z).astype(np.uint32) << np.uint32(shift)
    return result


_OPERATIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "prmt.b32": _prmt,
    "fma.rn.bf16x2": _fma_bf16x2,
}

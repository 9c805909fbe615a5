"""Put code into the cubin of its twin.

The twin is a CUDA C++ kernel that computes the same: from it come the kernel's name, parameters,
static shared memory, barriers and launch bounds, all as the compiler wrote them, and where a driver
prefers another representation that the file holds, it runs the twin: slower, never wrong.
"""

import struct
from collections.abc import Sequence

import msgspec

from moet_kernels.sass.cubin import EXIT_OFFSETS, REGISTER_COUNT, Cubin
from moet_kernels.sass.errors import SassError
from moet_kernels.sass.listing import NOP

__all__ = ["link"]

_ALIGNMENT = 128
_REGISTER_UNIT = 8  # registers are given out in eights
_MOST_REGISTERS = 255


def link(
    twin: bytes, kernel: str, words: Sequence[int], registers: int, exits: Sequence[int]
) -> bytes:
    """Replace a kernel's code in the cubin of its twin.

    Args:
        twin: the twin's cubin.
        kernel: which of its kernels.
        words: instruction words, control fields included.
        registers: how many registers a thread needs; the twin's count stays if it is larger.
        exits: byte addresses of the EXIT instructions.

    Raises:
        SassError: the twin has no such kernel, or needs what the linker does not move.
    """
    cubin = Cubin(twin)
    # The compiler ends every kernel with a branch to itself: no warp can run on into nothing.
    trap = [word for word in cubin.words(kernel) if word != NOP][-1]
    words = [*words, trap]
    code = b"".join(word.to_bytes(16, "little") for word in words)
    code += NOP.to_bytes(16, "little") * (-len(code) % _ALIGNMENT // 16)
    # Unwinding tables keep the twin's size; code shorter than they say has no precedent.
    missing = len(cubin.section(f".text.{kernel}").data) - len(code)
    code += NOP.to_bytes(16, "little") * max(missing // 16, 0)
    _refuse_relocations(cubin, kernel)
    cubin.section(f".text.{kernel}").data[:] = code
    cubin.set_function_size(kernel, len(code))
    _raise_registers(cubin, kernel, registers)
    section = f".nv.info.{kernel}"
    attributes = cubin.attributes(section)
    for attribute in attributes:
        if attribute.code == EXIT_OFFSETS:
            attribute.payload = struct.pack(f"<{len(exits)}I", *exits)
    cubin.set_attributes(section, attributes)
    return cubin.build()


def _refuse_relocations(cubin: Cubin, kernel: str) -> None:
    for section in cubin.sections:
        if section.name in (f".rela.text.{kernel}", f".rel.text.{kernel}") and section.data:
            raise SassError(
                f"The twin's kernel {kernel} has relocations in its code (a device variable or a "
                "call); the linker cannot carry them over. Write the twin without them."
            )


def _raise_registers(cubin: Cubin, kernel: str, registers: int) -> None:
    wanted = min(-(-registers // _REGISTER_UNIT) * _REGISTER_UNIT, _MOST_REGISTERS)
    symbol = cubin.symbol(kernel)
    attributes = cubin.attributes(".nv.info")
    for i, attribute in enumerate(attributes):
        if attribute.code == REGISTER_COUNT:
            owner, count = struct.unpack("<II", attribute.payload)
            if owner == symbol and wanted > count:
                payload = struct.pack("<II", symbol, wanted)
                attributes[i] = msgspec.structs.replace(attribute, payload=payload)
    cubin.set_attributes(".nv.info", attributes)

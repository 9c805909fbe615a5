"""Put code into the cubin of its twin.

The twin is a CUDA C++ kernel that computes the same: from it come the kernel's name, parameters,
static shared memory, barriers and launch bounds, all as the compiler wrote them, and where a driver
prefers another representation that the file holds, it runs the twin: slower, never wrong.
"""

import struct
from collections.abc import Sequence

import msgspec

from moet_kernels.sass.cubin import (
    EXIT_OFFSETS,
    REGISTER_COUNT,
    RESERVED_REGISTERS,
    Attribute,
    Cubin,
)
from moet_kernels.sass.errors import SassError
from moet_kernels.sass.listing import NOP
from moet_kernels.sass.source import Program

__all__ = ["link", "replace_code"]

_ALIGNMENT = 128
_REGISTER_LIMIT = 0x1B
# Attributes that hold for any code of the same function; others list places in the twin's code.
_CARRIED = frozenset(bytes.fromhex("05 0a 17 19 1b 1c 1e 36 37 4a 4c 50 5f 66 6b 6d"))


def link(twin: bytes, program: Program, words: Sequence[int]) -> bytes:
    """Replace the code of a program's twin by the program's.

    Args:
        twin: the twin's cubin.
        program: what the words were assembled from.
        words: its instruction words, control fields included.

    Raises:
        SassError: the cubin has no such kernel, is for another architecture, has other parameters
            or less shared memory than the program declares, or needs what is not moved.
    """
    cubin = Cubin(twin)
    if cubin.arch != program.arch:
        raise SassError(f"The program is for {program.arch.name}, its twin for {cubin.arch.name}.")
    kernel = program.kernel
    if program.parameters != cubin.parameter_bytes(kernel):
        raise SassError(
            f"{kernel} declares {program.parameters} bytes of parameters, its twin takes "
            f"{cubin.parameter_bytes(kernel)}."
        )
    if program.shared > cubin.shared_bytes(kernel):
        raise SassError(
            f"{kernel} declares {program.shared} bytes of shared memory, its twin has "
            f"{cubin.shared_bytes(kernel)}."
        )
    return replace_code(cubin, kernel, words, program.registers, program.exits)


def replace_code(
    cubin: Cubin, kernel: str, words: Sequence[int], registers: int, exits: Sequence[int]
) -> bytes:
    """Replace a kernel's code in a cubin.

    Args:
        cubin: where; it is changed.
        kernel: which of its kernels.
        words: instruction words, control fields included.
        registers: how many registers the code names, from R0 on; the count only ever rises.
        exits: byte addresses of the EXIT instructions.

    Raises:
        SassError: the kernel is not there, or needs what is not moved.
    """
    _refuse_relocations(cubin, kernel)
    # The compiler ends every kernel with a branch to itself: no warp can run on into nothing.
    trap = [word for word in cubin.words(kernel) if word != NOP][-1]
    code = b"".join(word.to_bytes(16, "little") for word in (*words, trap))
    code += NOP.to_bytes(16, "little") * (-len(code) % _ALIGNMENT // 16)
    cubin.section(f".text.{kernel}").data[:] = code
    cubin.set_function_size(kernel, len(code))
    section = f".nv.info.{kernel}"
    attributes = cubin.attributes(section)
    for attribute in attributes:
        _refuse_places(attribute, kernel)
        if attribute.code == EXIT_OFFSETS:
            attribute.payload = struct.pack(f"<{len(exits)}I", *exits)
    cubin.set_attributes(section, attributes)
    _raise_registers(cubin, kernel, registers, attributes)
    return cubin.build()


def _refuse_relocations(cubin: Cubin, kernel: str) -> None:
    for section in cubin.sections:
        if section.name in (f".rela.text.{kernel}", f".rel.text.{kernel}") and section.data:
            raise SassError(
                f"The twin's kernel {kernel} has relocations in its code (a device variable or a "
                "call); the linker cannot carry them over. Write the twin without them."
            )


def _refuse_places(attribute: Attribute, kernel: str) -> None:
    if attribute.code not in _CARRIED:
        raise SassError(
            f"The twin's kernel {kernel} has attribute {attribute.code:#x} in its .nv.info, which "
            "lists places in its code (votes, shuffles, indirect branches); the linker cannot "
            "carry it over. Write the twin without them."
        )


def _raise_registers(
    cubin: Cubin, kernel: str, registers: int, attributes: Sequence[Attribute]
) -> None:
    wanted = registers + RESERVED_REGISTERS
    limit = min((a.value for a in attributes if a.code == _REGISTER_LIMIT), default=255)
    if wanted > limit:
        raise SassError(
            f"{kernel} names {registers} registers; {RESERVED_REGISTERS} more are reserved, and "
            f"its twin was compiled for {limit} at most."
        )
    symbol = cubin.symbol(kernel)
    general = cubin.attributes(".nv.info")
    for i, attribute in enumerate(general):
        if attribute.code == REGISTER_COUNT:
            owner, count = struct.unpack("<II", attribute.payload)
            if owner == symbol and wanted > count:
                payload = struct.pack("<II", symbol, wanted)
                general[i] = msgspec.structs.replace(attribute, payload=payload)
    cubin.set_attributes(".nv.info", general)

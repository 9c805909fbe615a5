"""The architectures that the toolchain knows, and the facts that differ between them."""

import msgspec

from moet_kernels.sass.errors import SassError

__all__ = ["ARCHITECTURES", "SM90A", "SM120A", "Architecture", "architecture"]


class Architecture(msgspec.Struct, frozen=True):
    """One target of `ptxas`.

    Attributes:
        name: what `ptxas -arch` calls it.
        disassembler: what `nvdisasm -b` calls it.
        parameters: offset of the kernel parameters in constant bank 0.
        block_size: offset of blockDim.x, .y, .z in constant bank 0.
        shared_base: address of the first byte of static shared memory, as code computes it.
        number: major * 10 + minor of the compute capability, as in the ELF flags.
        uniform_zero: number of URZ.
    """

    name: str
    disassembler: str
    parameters: int
    block_size: int
    shared_base: int
    number: int
    uniform_zero: int


# Offsets: read off the listings of our own kernels (`ptxas` writes them as c[0x0][...]).
SM90A = Architecture("sm_90a", "SM90a", 0x210, 0x0, 0x400, 90, 63)
SM120A = Architecture("sm_120a", "SM120a", 0x380, 0x360, 0x400, 120, 255)
ARCHITECTURES = {arch.name: arch for arch in (SM90A, SM120A)}


def architecture(name: str) -> Architecture:
    """Look an architecture up by the name that `ptxas` gives it.

    Raises:
        SassError: it is none of ours.
    """
    try:
        return ARCHITECTURES[name]
    except KeyError:
        raise SassError(
            f"The architecture {name!r} is unknown here; choose one of {', '.join(ARCHITECTURES)}."
        ) from None

"""Decoding weights: code words of a lane into the registers a0 to a3 of operand A."""

from collections.abc import Iterator, Sequence

__all__ = ["decode_fp4", "decode_w2"]


def decode_w2(
    words: Sequence[int], targets: Sequence[int], temporaries: Sequence[int], levels: int
) -> Iterator[str]:
    """Decode a step of two row blocks, in turn: the code words' nibbles select bytes.

    Even fields of a word are registers 0 (low half) and 2, odd fields registers 1 and 3.

    Args:
        words: Registers of the code words.
        targets: First registers of the fragments.
        temporaries: Four registers.
        levels: Register of the four levels, e4m3.
    """
    pairs = list(zip(words, targets, temporaries[::2], temporaries[1::2], strict=True))
    for source, _, even, odd in pairs:
        yield f"  LOP3.LUT R{even}, R{source}, 0x33333333, RZ, 0xc0, !PT"
        yield f"  SHF.R.U32.HI R{odd}, RZ, 0x2, R{source}"
    for _, target, even, odd in pairs:
        yield f"  LOP3.LUT R{odd}, R{odd}, 0x33333333, RZ, 0xc0, !PT"
        yield f"  PRMT R{target}, R{levels}, R{even}, RZ"
        yield f"  SHF.R.U32.HI R{even}, RZ, 0x10, R{even}"
    for _, target, even, odd in pairs:
        yield f"  PRMT R{target + 1}, R{levels}, R{odd}, RZ"
        yield f"  SHF.R.U32.HI R{odd}, RZ, 0x10, R{odd}"
        yield f"  PRMT R{target + 2}, R{levels}, R{even}, RZ"
    for _, target, _, odd in pairs:
        yield f"  PRMT R{target + 3}, R{levels}, R{odd}, RZ"


def decode_fp4(word: int, target: int) -> Iterator[str]:
    """Decode a step of a row block: nibbles move into bits 5..2 of bytes.

    The first word of a step holds registers 0 (low nibbles) and 1, the next one 2 and 3.
    """
    for half in range(2):
        yield f"  SHF.L.U32 R{target + 2 * half}, R{word + half}, 0x2, RZ"
        yield f"  SHF.R.U32.HI R{target + 2 * half + 1}, RZ, 0x2, R{word + half}"
    for register in range(target, target + 4):
        yield f"  LOP3.LUT R{register}, R{register}, 0x3c3c3c3c, RZ, 0xc0, !PT"

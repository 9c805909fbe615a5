"""`nvdisasm` as a function from instruction words to text."""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moet_kernels.sass.arch import Architecture
from moet_kernels.sass.control import CONTROL_MASK, Control
from moet_kernels.sass.errors import ToolError
from moet_kernels.sass.tools import run_tool

__all__ = ["NOP", "disassemble_words"]

NOP = 0x7918 | Control(stall=0, hold=False).bits
_NEUTRAL = Control().bits
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s+/\* 0x[0-9a-f]{16} \*/", re.MULTILINE)
_BAD = re.compile(r"(?:at address|address) 0x([0-9a-f]+)")
_SINGLE = re.compile(r"(?:@!?U?P\w\s+)?U?(?:F(?!2FP)|MUFU)")
_NAN = re.compile(r"[-+]?\b[QS]NAN\b")
_BATCH = 30_000


def disassemble_words(words: Sequence[int], arch: Architecture) -> list[str | None]:
    """Disassemble words as if each stood at address 16 * its index; None: no instruction.

    Control fields are replaced by a neutral one, because `nvdisasm` refuses some combinations of
    it with an instruction and prints none of it.
    """
    texts: list[str | None] = []
    for start in range(0, len(words), _BATCH):
        texts += _batch(words[start : start + _BATCH], start * 16, arch)
    return texts


def _batch(words: Sequence[int], base: int, arch: Architecture) -> list[str | None]:
    bad: set[int] = set()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "words.bin"
        # nvdisasm stops at words that are no instructions, after it has named every one of them.
        for _attempt in range(8):
            path.write_bytes(
                b"".join(
                    (NOP if i in bad else word & ~CONTROL_MASK | _NEUTRAL).to_bytes(16, "little")
                    for i, word in enumerate(words)
                )
            )
            try:
                out = run_tool(
                    "nvdisasm",
                    ["-hex", "-ndf", "-b", arch.disassembler, "-base", hex(base), path],
                )
                break
            except ToolError as error:
                named = {(int(a, 16) - base) // 16 for a in _BAD.findall(error.said)}
                if not named - bad:
                    raise
                bad |= named
        else:
            raise ToolError(f"nvdisasm still refused words of {path.name} after 8 attempts.")
    texts: list[str | None] = [None] * len(words)
    for address, text in _LINE.findall(out):
        index = (int(address, 16) - base) // 16
        if index not in bad:
            texts[index] = _with_payload(text, words[index])
    return texts


def _with_payload(text: str, word: int) -> str:
    """Write the bits of a NaN, which `nvdisasm` does not; a float32 immediate is bits 32 to 63."""
    if "NAN" not in text or not _SINGLE.match(text):
        return text
    return _NAN.sub(f"0f{word >> 32 & 0xFFFFFFFF:08x}", text)

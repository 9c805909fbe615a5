"""Compiled words, as the compiler wrote them: text and word of every form, both architectures."""

import gzip
import json
from pathlib import Path

from moet_kernels.sass.operands import parse
from moet_kernels.sass.table import committed_table

GOLDEN = Path(__file__).parent / "data"


def golden(arch):
    return json.loads(gzip.decompress((GOLDEN / f"golden.{arch.name}.json.gz").read_bytes()))


def test_compiled_text_assembles_to_compiled_words(arch):
    table = committed_table(arch)
    pairs = golden(arch)
    assert len(pairs) > 1000
    wrong = [text for text, word in pairs if f"{table.encode(parse(text, arch)):x}" != word]
    assert wrong == []

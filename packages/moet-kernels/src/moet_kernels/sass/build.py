"""Learn everything about an architecture from its compiled corpus."""

from collections.abc import Sequence

import msgspec

from moet_kernels.sass.arch import Architecture
from moet_kernels.sass.corpus import Compiled
from moet_kernels.sass.learn import Sample, learn
from moet_kernels.sass.roles import learn_roles
from moet_kernels.sass.source import Program
from moet_kernels.sass.table import Table
from moet_kernels.sass.timing import learn_timing
from moet_kernels.sass.tools import tool_version

__all__ = ["learn_from", "words_of"]


def words_of(corpus: Sequence[Compiled]) -> list[int]:
    """All instruction words of a compiled corpus, padding included."""
    return [w for c in corpus for kernel in c.cubin.kernels for w in c.cubin.words(kernel)]


def learn_from(
    corpus: Sequence[Compiled],
    samples: Sequence[Sample],
    programs: Sequence[Program],
    arch: Architecture,
) -> Table:
    """Learn encodings, roles and timing.

    Args:
        corpus: what was compiled.
        samples: its words, read.
        programs: those of its kernels that the compiler scheduled.
        arch: its architecture.
    """
    table = learn(samples, arch)
    shell = next(c for c in corpus if c.source.startswith("w2_gemm") and c.variant == "O3")
    table = learn_roles(table, arch, shell.path.read_bytes(), shell.cubin.kernels[0])
    tools = {name: tool_version(name) for name in ("nvdisasm", "ptxas")}
    return msgspec.structs.replace(table, tools=tools, timing=learn_timing(programs, table))

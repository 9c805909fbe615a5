"""Make the committed tables: learn everything about an architecture from the corpus."""

from pathlib import Path

import msgspec

from moet_kernels.sass.arch import Architecture
from moet_kernels.sass.assemble import disassemble_all
from moet_kernels.sass.corpus import Compiled, build_corpus
from moet_kernels.sass.learn import learn, samples_of
from moet_kernels.sass.roles import learn_roles
from moet_kernels.sass.table import Table
from moet_kernels.sass.timing import learn_timing
from moet_kernels.sass.tools import tool_version

__all__ = ["learn_all", "learn_from"]


def learn_all(arch: Architecture, folder: Path) -> Table:
    """Compile the corpus into `folder` and learn encodings, roles and timing from it."""
    return learn_from(build_corpus(arch, folder), arch)


def learn_from(corpus: list[Compiled], arch: Architecture) -> Table:
    """Learn encodings, roles and timing from a compiled corpus."""
    words = [w for c in corpus for kernel in c.cubin.kernels for w in c.cubin.words(kernel)]
    table = learn(samples_of(words, arch), arch)
    shell = next(c for c in corpus if c.source.startswith("w2_gemm") and c.variant == "O3")
    table = learn_roles(table, arch, shell.path.read_bytes(), shell.cubin.kernels[0])
    scheduled = disassemble_all([c.cubin for c in corpus if c.scheduled])
    tools = {name: tool_version(name) for name in ("nvdisasm", "ptxas")}
    return msgspec.structs.replace(table, tools=tools, timing=learn_timing(scheduled, table))

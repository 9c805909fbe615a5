"""Everything that is said about an architecture's corpus, found out anew."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from moet_core.results import Measurement, measurement
from moet_kernels.sass.arch import Architecture
from moet_kernels.sass.assemble import disassemble_all
from moet_kernels.sass.build import learn_from, words_of
from moet_kernels.sass.control import CONTROL_MASK
from moet_kernels.sass.corpus import build_corpus
from moet_kernels.sass.cubin import RESERVED_REGISTERS
from moet_kernels.sass.errors import SassError
from moet_kernels.sass.halves import Halves, compare_halves
from moet_kernels.sass.hazards import check_hazards
from moet_kernels.sass.learn import Sample, samples_of
from moet_kernels.sass.operands import Instruction
from moet_kernels.sass.precedent import unprecedented
from moet_kernels.sass.roles import accesses
from moet_kernels.sass.source import Program
from moet_kernels.sass.table import NoFormError, Table

__all__ = ["Study", "measurements_of", "study"]


class Study(msgspec.Struct, frozen=True):
    """What one architecture's corpus says.

    Attributes:
        arch: the architecture's name.
        table: learnt from all of it.
        words: how many instruction words it has.
        read_back: how many of them the table assembles from their text to the same bits.
        refused: "form: words" of the others.
        halves: what a table of half of it makes of the other half, for each seed.
        kernels: how many kernels the compiler scheduled.
        hazards: what the hazard checker has against those.
        unprecedented: what the precedent rule has against those.
        spare_registers: by how much their register counts exceed the registers they name.
    """

    arch: str
    table: Table
    words: int
    read_back: int
    refused: tuple[str, ...]
    halves: tuple[Halves, ...]
    kernels: int
    hazards: tuple[str, ...]
    unprecedented: tuple[str, ...]
    spare_registers: tuple[int, ...]


def study(arch: Architecture, folder: Path, seeds: Sequence[int]) -> Study:
    """Compile the corpus, learn all of it, and halves of it, and hold the results against it.

    Args:
        arch: which architecture.
        folder: where the compiled corpus goes.
        seeds: of the halves; learning one takes as long as learning all.

    Raises:
        ToolError: a program of the CUDA toolkit is missing or failed.
    """
    corpus = build_corpus(arch, folder)
    words = words_of(corpus)
    samples = samples_of(words, arch)
    programs = disassemble_all([c.cubin for c in corpus if c.scheduled])
    table = learn_from(corpus, samples, programs, arch)
    refused = _refused(words, samples, table)
    return Study(
        arch.name,
        table,
        len(words),
        len(words) - sum(refused.values()),
        tuple(f"{form}: {count}" for form, count in sorted(refused.items())),
        tuple(compare_halves(corpus, samples, arch, seed) for seed in seeds),
        len(programs),
        tuple(f"{p.kernel}: {h}" for p in programs for h in check_hazards(p, table)),
        tuple(f"{p.kernel}: {said}" for p in programs for said in _unprecedented(p, table)),
        tuple(sorted({_spare_registers(p, table) for p in programs})),
    )


def measurements_of(studied: Study) -> list[Measurement]:
    """The figures of a study, for a result file."""
    halves = studied.halves
    figures: dict[str, Sequence[int]] = {
        "words": [studied.words],
        "words that assemble to the same bits": [studied.read_back],
        "words that are refused": [studied.words - studied.read_back],
        "forms": [len(studied.table.forms)],
        "half: words learnt from": [h.learnt for h in halves],
        "half: new words asked": [h.asked for h in halves],
        "half: assembled to the same bits": [h.right for h in halves],
        "half: refused": [h.refused for h in halves],
        "half: wrong bits": [len(h.wrong) for h in halves],
        "scheduled kernels": [studied.kernels],
        "hazards found in them": [len(studied.hazards)],
        "things without precedent in them": [len(studied.unprecedented)],
        "registers counted but not named": studied.spare_registers,
    }
    return [
        measurement(f"{studied.arch} {name}", "1", samples)
        for name, samples in figures.items()
        if samples
    ]


def _refused(words: Sequence[int], samples: Sequence[Sample], table: Table) -> dict[str, int]:
    read = dict(samples)
    same = {word for word, instruction in samples if _encodes(table, word, instruction)}
    refused: dict[str, int] = {}
    for word in words:
        bare = word & ~CONTROL_MASK
        if bare not in same:
            form = read[bare].key if bare in read else f"not read: {bare:#034x}"
            refused[form] = refused.get(form, 0) + 1
    return refused


def _encodes(table: Table, word: int, instruction: Instruction) -> bool:
    try:
        return table.encode(instruction) == word
    except SassError:
        return False


def _unprecedented(program: Program, table: Table) -> Iterator[str]:
    for statement in program.statements:
        assert statement.control is not None
        try:
            yield from unprecedented(statement.instruction, statement.control, table)
        except NoFormError:
            continue  # listed as refused


def _spare_registers(program: Program, table: Table) -> int:
    named = {0}
    for statement in program.statements:
        try:
            form = table.form(statement.instruction)
        except NoFormError:
            continue
        writes, reads = accesses(statement.instruction, form)
        named |= {number for file, number in writes if file == "R"}
        named |= {number for (file, number), _ in reads if file == "R"}
    return program.registers + RESERVED_REGISTERS - 1 - max(named)

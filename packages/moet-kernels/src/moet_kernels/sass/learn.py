"""Learn an encoding table from compiled code, with `nvdisasm` as the only authority.

For one sample word of every form each bit outside the control field is flipped and the result
disassembled. A flip that leaves the form alone and changes slots tells what that bit means; one
that changes nothing visible stays as the compiler set it; any other belongs to the opcode.
"""

import random
from collections.abc import Callable, Sequence

from moet_kernels.sass.arch import Architecture
from moet_kernels.sass.control import CONTROL_MASK
from moet_kernels.sass.errors import SassError
from moet_kernels.sass.listing import disassemble_words
from moet_kernels.sass.operands import Instruction, parse
from moet_kernels.sass.precedent import seen_marks
from moet_kernels.sass.table import Form, Table
from moet_kernels.sass.tools import tool_version

__all__ = ["Sample", "learn", "samples_of"]

Sample = tuple[int, Instruction]
"""A word, control field cleared, and what it says."""

Disassemble = Callable[[Sequence[int], Architecture], list[str | None]]
_BITS = [bit for bit in range(128) if not CONTROL_MASK >> bit & 1]
_PROBES = 6  # random operand vectors a form must survive
_ROUNDS = 3  # sample words probed a form: some bits show only when others are set


def samples_of(
    words: Sequence[int], arch: Architecture, disassemble: Disassemble = disassemble_words
) -> list[Sample]:
    """Read distinct words; those that are no instruction, or not understood, are left out."""
    distinct = list(dict.fromkeys(word & ~CONTROL_MASK for word in words))
    return [
        (word, instruction)
        for word, instruction in zip(distinct, _read(distinct, arch, disassemble), strict=True)
        if instruction is not None
    ]


def learn(
    samples: Sequence[Sample],
    arch: Architecture,
    disassemble: Disassemble = disassemble_words,
) -> Table:
    """Learn the forms of these samples.

    A form whose bits do not act linearly, or of which two samples read alike and differ in hidden
    bits, is refused: it could be assembled into other bytes than the compiler's.
    """
    pool: dict[str, list[Sample]] = {}
    for sample in samples:
        pool.setdefault(sample[1].key, []).append(sample)
    bits: dict[str, dict[int, tuple[tuple[int, int], ...]]] = {key: {} for key in pool}
    probed: dict[str, list[Sample]] = {key: [found[0]] for key, found in pool.items()}
    for turn in range(_ROUNDS):
        jobs = [
            (key, bit, probed[key][turn])
            for key in pool
            if len(probed[key]) > turn
            for bit in _BITS
            if bit not in bits[key]
        ]
        flipped = _read([sample[0] ^ 1 << bit for _, bit, sample in jobs], arch, disassemble)
        for (key, bit, sample), seen in zip(jobs, flipped, strict=True):
            changes = _changes(sample[1], seen)
            if changes:
                bits[key][bit] = changes
        for key, found in pool.items():
            _choose_next(probed[key], found)
    forms = {key: _form(found, bits[key], arch) for key, found in pool.items()}
    refused = _unfaithful(forms, pool) | _nonlinear(forms, arch, disassemble)
    kept = {key: form for key, form in forms.items() if key not in refused}
    return Table(arch.name, {"nvdisasm": tool_version("nvdisasm")}, kept, refused)


def _form(
    found: Sequence[Sample], bits: dict[int, tuple[tuple[int, int], ...]], arch: Architecture
) -> Form:
    word, first = found[0]
    seen = seen_marks((instruction for _, instruction in found), arch)
    return Form(f"{word:x}", tuple(int(slot) for slot in first.slots), bits, (), seen)


def _read(
    words: Sequence[int], arch: Architecture, disassemble: Disassemble
) -> list[Instruction | None]:
    read: list[Instruction | None] = []
    for index, text in enumerate(disassemble(words, arch)):
        try:
            read.append(None if text is None else parse(text, arch, 16 * index))
        except SassError:
            read.append(None)
    return read


def _changes(before: Instruction, after: Instruction | None) -> tuple[tuple[int, int], ...]:
    if after is None or after.key != before.key:
        return ()
    pairs = zip(before.slots, after.slots, strict=True)
    return tuple((i, int(a) ^ int(b)) for i, (a, b) in enumerate(pairs) if a != b)


def _choose_next(probed: list[Sample], pool: Sequence[Sample]) -> None:
    """Add the sample that differs most from those probed already, where there is one."""
    used = [word for word, _ in probed]
    best = max(pool[:200], key=lambda sample: min((sample[0] ^ word).bit_count() for word in used))
    if best[0] not in used:
        probed.append(best)


def _unfaithful(forms: dict[str, Form], pool: dict[str, list[Sample]]) -> dict[str, str]:
    refused = {}
    for key, found in pool.items():
        wrong = sum(
            forms[key].encode(instruction.slots) not in (word, None) for word, instruction in found
        )
        if wrong:
            refused[key] = f"{wrong} of {len(found)} compiled words have bits that the text hides"
    return refused


def _nonlinear(
    forms: dict[str, Form], arch: Architecture, disassemble: Disassemble
) -> dict[str, str]:
    """Encode random operand vectors and see whether they read back."""
    chance = random.Random(0)  # noqa: S311 - the same probes on every run
    jobs: list[tuple[str, int, list[int]]] = []
    for key, form in forms.items():
        for _ in range(_PROBES):
            word, slots = int(form.base, 16), list(form.slots)
            for bit, changes in form.bits.items():
                if chance.random() < 0.5:
                    word ^= 1 << bit
                    for slot, mask in changes:
                        slots[slot] ^= mask
            jobs.append((key, word, slots))
    refused = {}
    for (key, _, slots), seen in zip(
        jobs, _read([word for _, word, _ in jobs], arch, disassemble), strict=True
    ):
        # Another form is no contradiction: nvdisasm has shorter names for some operands.
        if seen is not None and seen.key == key and [int(s) for s in seen.slots] != slots:
            refused[key] = "its bits do not act independently of each other"
    return refused

"""What a table learnt from half of the corpus makes of the other half.

The halves are kernels, in every variant each, so that the second half has code that the first
never showed. A word of it is either assembled to the compiler's very bits or refused; anything
else would be a wrong instruction in somebody's kernel.
"""

import random
from collections.abc import Callable, Sequence

import msgspec

from moet_kernels.sass.arch import Architecture
from moet_kernels.sass.control import CONTROL_MASK
from moet_kernels.sass.corpus import Compiled
from moet_kernels.sass.errors import SassError
from moet_kernels.sass.learn import Sample, learn
from moet_kernels.sass.table import Table

__all__ = ["Halves", "compare_halves", "split_kernels"]


class Halves(msgspec.Struct, frozen=True):
    """Distinct words of the second half, by what the table learnt from the first makes of them.

    Attributes:
        learnt: distinct words that the table was learnt from.
        right: assembled to the compiler's bits.
        refused: no such form, or no such operands.
        wrong: texts that were assembled to other bits.
    """

    learnt: int
    right: int
    refused: int
    wrong: tuple[str, ...]

    @property
    def asked(self) -> int:
        """Distinct words of the second half that the first has not."""
        return self.right + self.refused + len(self.wrong)


def split_kernels(corpus: Sequence[Compiled], seed: int) -> tuple[set[int], set[int]]:
    """The words of two random halves of the kernels, control fields cleared.

    Words that both halves have are in the first alone.
    """
    kernels: dict[tuple[str, str], set[int]] = {}
    for compiled in corpus:
        for kernel in compiled.cubin.kernels:
            words = kernels.setdefault((compiled.source, kernel), set())
            words.update(word & ~CONTROL_MASK for word in compiled.cubin.words(kernel))
    names = sorted(kernels)
    random.Random(seed).shuffle(names)  # noqa: S311 - the same halves on every run
    first = set().union(*(kernels[name] for name in names[::2]))
    return first, set().union(*(kernels[name] for name in names[1::2])) - first


def compare_halves(
    corpus: Sequence[Compiled],
    samples: Sequence[Sample],
    arch: Architecture,
    seed: int,
    learn_table: Callable[[Sequence[Sample], Architecture], Table] = learn,
) -> Halves:
    """Learn from one half of the kernels and assemble the other half.

    Args:
        corpus: what was compiled.
        samples: all of its words, read.
        arch: its architecture.
        seed: of the split.
        learn_table: makes a table of samples.
    """
    first, second = split_kernels(corpus, seed)
    known = [sample for sample in samples if sample[0] in first]
    table = learn_table(known, arch)
    right, refused, wrong = 0, 0, []
    for word, instruction in samples:
        if word not in second:
            continue
        try:
            found = table.encode(instruction)
        except SassError:
            refused += 1
            continue
        if found == word:
            right += 1
        else:
            wrong.append(f"{word:#034x} {instruction.key}")
    return Halves(len(known), right, refused, tuple(wrong))

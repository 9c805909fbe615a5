from pathlib import Path

import msgspec
import pytest

from moet_kernels.sass.arch import SM90A
from moet_kernels.sass.control import Control
from moet_kernels.sass.corpus import Compiled
from moet_kernels.sass.halves import Halves, compare_halves, split_kernels
from moet_kernels.sass.operands import parse
from moet_kernels.sass.study import Study, measurements_of
from moet_kernels.sass.table import committed_table

TABLE = committed_table(SM90A)
TEXTS = {
    "one": ["IADD3 R1, R2, R3, RZ", "FADD R1, R2, R3"],
    "two": ["IADD3 R4, R2, R3, RZ", "FADD R1, R2, R3", "FMUL R1, R2, R3"],
}


class FakeCubin:
    """A cubin of two kernels, with control fields that must not matter."""

    def __init__(self, control):
        self.kernels = list(TEXTS)
        self.control = control

    def words(self, kernel):
        return [word_of(text) | self.control.bits for text in TEXTS[kernel]]


def word_of(text):
    return TABLE.encode(parse(text, SM90A))


@pytest.fixture
def corpus():
    variants = {"O1": FakeCubin(Control(1)), "O3": FakeCubin(Control(5, write=2))}
    return [Compiled("source", name, Path(name), cubin) for name, cubin in variants.items()]


@pytest.fixture
def samples():
    texts = dict.fromkeys(text for kernel in TEXTS.values() for text in kernel)
    return [(word_of(text), parse(text, SM90A)) for text in texts]


def forms(*texts):
    return {parse(text, SM90A).key: TABLE.form(parse(text, SM90A)) for text in texts}


def compare(corpus, samples, table):
    """Compare with a table that is handed over; says what it was asked to learn, too."""
    asked = []

    def learn(known, _arch):
        asked.extend(word for word, _ in known)
        return table

    return compare_halves(corpus, samples, SM90A, 0, learn), asked


def test_a_kernel_is_in_one_half_in_all_its_variants(corpus):
    halves = [split_kernels(corpus, seed) for seed in range(8)]
    one, two = ({word_of(text) for text in TEXTS[name]} for name in ("one", "two"))
    assert {(frozenset(a), frozenset(b)) for a, b in halves} == {
        (frozenset(one), frozenset(two - one)),
        (frozenset(two), frozenset(one - two)),
    }


def test_the_same_seed_gives_the_same_halves(corpus):
    assert split_kernels(corpus, 3) == split_kernels(corpus, 3)


def test_right_and_refused_words_are_counted(corpus, samples):
    known = msgspec.structs.replace(TABLE, forms=forms("IADD3 R1, R2, R3, RZ"))
    halves, asked = compare(corpus, samples, known)
    first, second = split_kernels(corpus, 0)
    assert set(asked) == first
    assert (halves.learnt, halves.asked) == (len(first), len(second))
    right = sum(word == word_of("IADD3 R4, R2, R3, RZ") for word in second)
    right += sum(word == word_of("IADD3 R1, R2, R3, RZ") for word in second)
    assert (halves.right, halves.refused, halves.wrong) == (right, len(second) - right, ())


def test_wrong_bits_are_named(corpus, samples):
    # A base word with a bit that the form does not account for: all it encodes is wrong.
    key, form = next(iter(forms("IADD3 R1, R2, R3, RZ").items()))
    damaged = msgspec.structs.replace(form, base=f"{int(form.base, 16) ^ 1 << 100:x}")
    halves, _ = compare(corpus, samples, msgspec.structs.replace(TABLE, forms={key: damaged}))
    assert [text.split(" ", 1)[1] for text in halves.wrong] == [key]
    assert halves.right == 0


def test_the_figures_of_a_study():
    halves = (Halves(10, 5, 2, ()), Halves(11, 4, 4, ("x", "y")))
    studied = Study("sm_90a", TABLE, 100, 97, ("BRX: 3",), halves, 7, ("h",), (), (2,))
    found = {m.name.removeprefix("sm_90a "): m.samples for m in measurements_of(studied)}
    assert found["words that are refused"] == (3,)
    assert found["half: new words asked"] == (7, 10)
    assert found["half: wrong bits"] == (0, 2)
    assert found["hazards found in them"] == (1,)
    assert found["registers counted but not named"] == (2,)

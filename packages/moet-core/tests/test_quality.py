import math

import numpy as np
import pytest

from moet_core.quality import bits_per_byte, coarse_kl, loops

IDS = np.array([[4, 7, 1]])


def logs(*values):
    return np.log(np.array([values]))


class TestKl:
    def test_a_model_does_not_differ_from_itself(self):
        assert coarse_kl(IDS, logs(0.5, 0.3, 0.1), IDS, logs(0.5, 0.3, 0.1)) == [0]

    def test_full_lists_give_the_exact_divergence_in_any_order(self):
        found = coarse_kl(IDS, logs(0.5, 0.3, 0.2), IDS[:, ::-1], logs(0.6, 0.2, 0.2))
        wanted = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.2) + 0.2 * math.log(0.2 / 0.6)
        assert found == pytest.approx(wanted, abs=1e-6)

    def test_what_one_list_lacks_counts_as_the_rest(self):
        found = coarse_kl(IDS, logs(0.5, 0.3, 0.1), np.array([[4, 8, 9]]), logs(0.25, 0.2, 0.1))
        wanted = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
        assert found == pytest.approx(wanted)


def test_bits_per_byte_counts_bits_over_bytes():
    assert bits_per_byte(np.log([0.5, 0.25]), 6) == pytest.approx(0.5)


@pytest.mark.parametrize("text", ["a" * 24, "x" + "ab " * 8, "* ::\n  " * 6])
def test_repetition_at_the_end_is_a_loop(text):
    assert loops(text)


@pytest.mark.parametrize("text", ["", "a" * 20, "ab " * 8 + "end", "347 + 285 = 632"])
def test_other_text_is_none(text):
    assert not loops(text)

import pickle

import pytest

from moet_core.errors import ConfigError, MoetError, TensorError, UsageError


def test_tensor_error_names_everything():
    error = TensorError("a.weight", wanted="a finite weight", got="NaN", advice="Try again.")
    assert str(error) == ("Tensor 'a.weight': wanted a finite weight, got NaN. Try again.")


def test_tensor_error_without_advice_ends_with_the_finding():
    assert str(TensorError("a", wanted="b", got="c")) == "Tensor 'a': wanted b, got c."


def test_tensor_error_survives_pickling():
    error = pickle.loads(pickle.dumps(TensorError("a", wanted="b", got="c", advice="D.")))
    assert (error.tensor, error.wanted, error.got, error.advice) == ("a", "b", "c", "D.")


@pytest.mark.parametrize(("kind", "code"), [(ConfigError, 1), (TensorError, 1), (UsageError, 2)])
def test_exit_codes(kind, code):
    assert issubclass(kind, MoetError)
    assert kind.exit_code == code

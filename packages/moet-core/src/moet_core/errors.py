"""The errors of the project.

Every error a user can meet derives from `MoetError` and says in whole sentences what was wanted,
what was found, where, and what to do. Callers match on the class, never on the text.
"""

from typing import Any, ClassVar

__all__ = ["ConfigError", "MoetError", "TensorError", "UsageError"]


class MoetError(Exception):
    """Base of every error of the project; `exit_code` is what the command line returns."""

    exit_code: ClassVar[int] = 1


class ConfigError(MoetError):
    """A configuration, a model or a file that cannot be used as it is."""


class UsageError(MoetError):
    """A command line that cannot be understood."""

    exit_code: ClassVar[int] = 2


class TensorError(MoetError):
    """A checkpoint tensor that no codec may accept.

    Args:
        tensor: The tensor's name in the checkpoint.
        wanted: What the codec needs, as a noun phrase ("a finite weight").
        got: What was found, as a noun phrase with its place ("NaN at row 3, column 17").
        advice: What the user can do about it, a complete sentence.
    """

    def __init__(self, tensor: str, *, wanted: str, got: str, advice: str = "") -> None:
        message = f"Tensor {tensor!r}: wanted {wanted}, got {got}."
        super().__init__(f"{message} {advice}" if advice else message)
        self.tensor = tensor
        self.wanted = wanted
        self.got = got
        self.advice = advice

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process borders by pickle, which knows no keyword-only arguments.
        return _tensor_error, (self.tensor, self.wanted, self.got, self.advice)


def _tensor_error(tensor: str, wanted: str, got: str, advice: str) -> TensorError:
    return TensorError(tensor, wanted=wanted, got=got, advice=advice)

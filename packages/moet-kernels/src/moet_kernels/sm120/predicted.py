"""What the cycle model predicts of decode steps on SM120 cards; `predict` makes the table.

Every figure is a prediction: no such card was used.
"""

from pathlib import Path

import msgspec

from moet_core.errors import MoetError
from moet_core.geometry import DEEPSEEK_V4_FLASH, GLM_5_2, KIMI_K2_7

__all__ = ["MODELS", "PATH", "TOKENS", "Launched", "Table", "read_table"]

MODELS = {"DeepSeek-V4-Flash": DEEPSEEK_V4_FLASH, "GLM-5.2": GLM_5_2, "Kimi-K2.7": KIMI_K2_7}
TOKENS = (1, 4)
"""Of the steps that are predicted."""

PATH = Path(__file__).with_name("predicted.json")


class Launched(msgspec.Struct, frozen=True):
    """One kernel of an expert layer, tuned where it is hand-written.

    Attributes:
        card: name of the card.
        model: name of the model.
        codec: of the experts.
        tokens: of the step; every one goes through experts of its own.
        kernel: its name.
        microseconds: from the end of the kernel before it to its own.
        weight_bytes: codes and scales read.
    """

    card: str
    model: str
    codec: str
    tokens: int
    kernel: str
    microseconds: float
    weight_bytes: int


class Table(msgspec.Struct, frozen=True):
    """The table, and the SHA-256 of the text of each hand-written kernel in it."""

    listings: dict[str, str]
    launches: tuple[Launched, ...]


def read_table(path: Path = PATH) -> Table:
    """Read the table.

    Raises:
        MoetError: the file is missing or damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Table)
    except (OSError, msgspec.DecodeError) as error:
        raise MoetError(
            f"The table of predicted times {path} cannot be read: {error}. It comes with "
            "moet-kernels; install that anew."
        ) from error

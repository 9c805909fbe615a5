"""Takes the padding of a batch out of its routing, where that is not recorded row by row."""

import torch
from torch import Tensor

__all__ = ["Padding"]


class Padding:
    """Which rows of a pass are padding, at an address that a captured CUDA graph keeps.

    The rows that a graph's batch has beside the step's tokens hold remains of other steps. They
    are routed as all rows are; without this they would want experts that nobody needs, and load
    them.

    Args:
        rows: Rows at most of a padded pass.
        device: Where they are routed.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._tokens = rows
        self._no_expert = torch.zeros(rows, 1, dtype=torch.int32, device=device)

    def begin(self, tokens: int) -> None:
        """Say how many rows of the passes from now on are tokens."""
        if tokens != self._tokens:
            self._tokens = tokens
            self._no_expert[:tokens] = 0
            self._no_expert[tokens:] = -1

    def without(self, topk_ids: Tensor) -> Tensor:
        """Return expert ids [T, k] with -1 in the rows that are padding."""
        rows = len(topk_ids)
        if rows == 1 or rows > len(self._no_expert):
            return topk_ids  # every step has a token, and longer passes are not padded
        return topk_ids | self._no_expert[:rows]

"""Layers that route by token id: what a pass will want of them is known before it runs."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from torch import nn

from moet_core.residency import Key

__all__ = ["TokenRouting", "token_tables"]

Table = NDArray[np.integer]


class TokenRouting:
    """The experts of each token.

    Args:
        tables: For each such layer, counted from 0 on this rank, the experts of every token id,
            [vocabulary, k].
    """

    def __init__(self, tables: Mapping[int, Table]) -> None:
        self._tables = dict(tables)

    def __bool__(self) -> bool:
        """Whether there are such layers."""
        return bool(self._tables)

    def keys(self, token_ids: NDArray[np.integer]) -> list[Key]:
        """Return what tokens [T] are routed to, ascending."""
        tokens = np.unique(token_ids)
        return [
            (layer, int(expert))
            for layer, table in sorted(self._tables.items())
            for expert in np.unique(table[tokens])
        ]


def token_tables(
    model: nn.Module, layers: tuple[int, ...], index_of: Callable[[str], int]
) -> dict[int, Table]:
    """Return a model's tables by the number of their layer, as `TokenRouting` takes them.

    Args:
        model: A model of vLLM's, whose gates hold such a table as `tid2eid` (DeepSeek-V4).
        layers: Model indices of the rank's layers.
        index_of: Returns a layer's model index by the name of a module in it.
    """
    numbers = {layer: number for number, layer in enumerate(layers)}
    found = {}
    for name, module in model.named_modules():
        table = getattr(module, "tid2eid", None)
        if table is not None and index_of(name) in numbers:
            found[numbers[index_of(name)]] = table.detach().cpu().numpy()
    return found

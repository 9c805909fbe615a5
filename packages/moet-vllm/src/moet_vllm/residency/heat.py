"""The hot set of a pool, kept beside its packs from one start to the next."""

import logging

from moet_store import PackError
from moet_store.heat import load_heat, save_heat
from moet_store.rows import Key
from moet_vllm.residency.resident import ResidentExperts
from moet_vllm.residency.stores import PackStore

__all__ = ["load_hot_keys", "save_hot_keys"]

logger = logging.getLogger("vllm.moet")


def load_hot_keys(resident: ResidentExperts) -> list[Key]:
    """Return the experts that were hot when the heat was saved, hottest first; none without packs.

    A heat file that cannot be used is reported and left alone: it only makes the start colder.
    """
    if not isinstance(resident.store, PackStore):
        return []
    try:
        return load_heat(resident.store.reader.packs[0], resident.shape.experts)
    except PackError as error:
        logger.warning("moet: starting with a cold pool. %s", error)
        return []


def save_hot_keys(resident: ResidentExperts) -> None:
    """Write the heat file; a failure is reported."""
    keys = resident.hottest()
    if not isinstance(resident.store, PackStore) or not keys:
        return
    try:
        save_heat(resident.store.reader.packs[0], keys)
    except PackError as error:
        logger.warning("moet: the next start will be cold. %s", error)

"""Packs of expert rows on disk: written safely, read at the speed of the drive, never trusted."""

from moet_store.arena import Arena
from moet_store.counters import Snapshot
from moet_store.errors import PackError, PackErrorKind
from moet_store.identity import bytes_identity, checkpoint_identity
from moet_store.memory import aligned_buffer
from moet_store.pack import Pack, find_packs, open_pack, pack_path
from moet_store.probe import tune_depth
from moet_store.reader import PackReader
from moet_store.rows import Completion
from moet_store.spec import PackSpec, expert_spec, plain_spec
from moet_store.store import ExpertStore
from moet_store.verify import Problem, Report, verify_pack
from moet_store.writer import PackWriter, Progress, StripedWriter

__all__ = [
    "Arena",
    "Completion",
    "ExpertStore",
    "Pack",
    "PackError",
    "PackErrorKind",
    "PackReader",
    "PackSpec",
    "PackWriter",
    "Problem",
    "Progress",
    "Report",
    "Snapshot",
    "StripedWriter",
    "aligned_buffer",
    "bytes_identity",
    "checkpoint_identity",
    "expert_spec",
    "find_packs",
    "open_pack",
    "pack_path",
    "plain_spec",
    "tune_depth",
    "verify_pack",
]

"""What the user may set: one Struct, filled from `--additional-config '{"moet": {...}}'`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from moet_core.errors import ConfigError

__all__ = ["SCHEDULER", "WORKER", "GiB", "MoetConfig", "parse_config"]

WORKER = "moet_vllm.worker.MoetWorker"
"""What vLLM's --worker-cls must be for a pool of experts."""

SCHEDULER = "moet_vllm.scheduler.make_scheduler"
"""What vLLM's --scheduler-cls must be for a pool of experts."""

GiB = Annotated[float, msgspec.Meta(gt=0)]


class MoetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of the plugin.

    Attributes:
        experts: codec of the routed experts of the main stack; `native` leaves them to vLLM.
        zeros: how exact zeros of a requantised tensor take a sign (w2 has no zero level): `sign`
            keeps their sign bit, `alternate` goes by the parity of k, `auto` alternates where
            95 % of a tensor's zeros share one sign.
        pool: memory of each rank's device for experts, in GiB; `all` holds every expert.
        host_store: where the experts wait that the pool does not hold: `pinned` keeps all of them
            in memory, `arena` as many as fit into `arena` over packs, `pack` none.
        packs: folders of the packs, separated by commas; several are stripes on several drives.
            They are written at the first start and read at later ones.
        arena: memory of each rank for the `arena` store, in GiB.
        pack_reads: `direct` reads packs past the page cache, `cached` through it.
        miss_tolerance: experts that a step may lack; above 0 results are approximate, and
            responses and metrics say so.
        report_seconds: time between two lines about the pool in the log; 0 for none.
    """

    experts: Literal["w2", "native"] = "w2"
    zeros: Literal["auto", "sign", "alternate"] = "auto"
    pool: GiB | Literal["all"] = "all"
    host_store: Literal["pinned", "pack", "arena"] | None = None
    packs: str = ""
    arena: GiB | None = None
    pack_reads: Literal["direct", "cached"] | None = None
    miss_tolerance: Annotated[int, msgspec.Meta(ge=0)] = 0
    report_seconds: Annotated[int, msgspec.Meta(ge=0)] = 60

    @property
    def is_resident(self) -> bool:
        """Whether the experts come through a pool, rather than all being in place for good."""
        return self.pool != "all" or bool(self.packs)

    @property
    def store(self) -> Literal["pinned", "pack", "arena"]:
        """The host store: the chosen one, or what the other settings leave."""
        if self.host_store is not None:
            return self.host_store
        return "arena" if self.arena is not None else "pack" if self.packs else "pinned"

    @property
    def pack_folders(self) -> list[Path]:
        """The folders of `packs`."""
        return [Path(part.strip()).expanduser() for part in self.packs.split(",") if part.strip()]


def parse_config(settings: dict[str, Any]) -> MoetConfig:
    """Decode the `moet` object of vLLM's additional config.

    Raises:
        ConfigError: an unknown key or a value that is not allowed.
    """
    try:
        config = msgspec.convert(settings, MoetConfig)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(MoetConfig))
        raise ConfigError(
            f'additional config "moet" cannot be used: {error}. Known settings: {known}.'
        ) from error
    _check(config)
    return config


def _check(config: MoetConfig) -> None:
    """Refuse settings that would do nothing beside the others."""
    native = config.experts == "native"
    partial = config.pool != "all"
    faults = [
        (native and config.is_resident, "a pool or packs", "experts=native, which vLLM holds"),
        (config.host_store == "pinned" and not partial, "host_store=pinned", "pool=all"),
        (config.arena is not None and not partial, "arena", "pool=all"),
        (
            config.arena is not None and config.store != "arena",
            "arena",
            f"host_store={config.store}",
        ),
        (config.pack_reads is not None and not config.packs, "pack_reads", "no packs"),
        (config.miss_tolerance > 0 and not partial, "miss_tolerance", "pool=all"),
    ]
    for is_fault, setting, beside in faults:
        if is_fault:
            raise ConfigError(
                f'additional config "moet": {setting} has no effect beside {beside}; leave one out.'
            )
    if config.store != "pinned" and partial and not config.packs:
        raise ConfigError(
            f'additional config "moet": host_store={config.store} reads experts from packs; set '
            "packs to a folder on a fast drive, or host_store to pinned."
        )
    if config.store == "arena" and partial and config.arena is None:
        raise ConfigError(
            'additional config "moet": host_store=arena needs the size of the arena in GiB; set '
            "arena, or host_store to pack."
        )

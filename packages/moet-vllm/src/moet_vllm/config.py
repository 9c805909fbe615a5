"""What the user may set: one Struct, filled from `--additional-config '{"moet": {...}}'`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from moet_core.errors import ConfigError

__all__ = ["GATE_CONTROL", "SCHEDULER", "WORKER", "GiB", "MoetConfig", "parse_config"]

WORKER = "moet_vllm.worker.MoetWorker"
"""What vLLM's --worker-cls must be for a pool of experts."""

SCHEDULER = "moet_vllm.scheduler.make_scheduler"
"""What vLLM's --scheduler-cls must be for a pool of experts."""

GATE_CONTROL = "moet_vllm.gate_control.GateControl"
"""What vLLM's --middleware must be for a gate that can be set while serving."""

GiB = Annotated[float, msgspec.Meta(gt=0)]


class MoetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of the plugin.

    Attributes:
        experts: codec of the routed experts of the main stack: `w2`, 2 bits; `fp4`, what the
            checkpoint has where it is FP4, requantised to FP4 where it is not; `native` leaves
            them to vLLM.
        zeros: how exact zeros of a requantised tensor take a sign (w2 has no zero level): `sign`
            keeps their sign bit, `alternate` goes by the parity of k, `auto` alternates where
            95 % of a tensor's zeros share one sign.
        pool: memory of each rank's device for experts, in GiB; `all` holds every expert, `auto`
            as many as fit beside weights, activations and KV cache.
        host_store: where the experts wait that the pool does not hold: `pinned` keeps all of them
            in memory, `arena` as many as fit into `arena` over packs, `pack` none.
        packs: folders of the packs, separated by commas; several are stripes on several drives.
            They are written at the first start and read at later ones.
        arena: memory of each rank for the `arena` store, in GiB.
        pack_reads: `direct` reads packs past the page cache, `cached` through it.
        miss_tolerance: experts that a step may lack; above 0 results are approximate, and
            responses and metrics say so.
        fine: memory of each rank's device for experts at FP4 beside those at 2 bits, in GiB; `all`
            has room for every expert.
        fine_arena: memory of each rank for the fine tier's arena over packs, in GiB.
        prompts: the tier that prompts are read with, `fine` or `base`.
        gate: what tells how certain a step is of its next token: `max_prob`, the largest
            probability, or `margin`, the distance of the two largest logits in nats; `off` brings
            experts to the fine tier by use alone.
        tau: a step whose least certain row is at or below it runs again with fine experts.
        gate_budget: experts that one step may bring to the fine tier; 0 for any number.
        gate_passes: finer passes of one step; 0 for as many as it takes.
        gate_audit: probability that a certain step runs again too, to measure what the gate lets
            through.
        suspend_drafts: suspend speculative decoding while a token takes longer with drafts than
            without; measured while serving.
        report_seconds: time between two lines about the pool in the log; 0 for none.
    """

    experts: Literal["w2", "fp4", "native"] = "w2"
    zeros: Literal["auto", "sign", "alternate"] = "auto"
    pool: GiB | Literal["all", "auto"] = "all"
    host_store: Literal["pinned", "pack", "arena"] | None = None
    packs: str = ""
    arena: GiB | None = None
    pack_reads: Literal["direct", "cached"] | None = None
    miss_tolerance: Annotated[int, msgspec.Meta(ge=0)] = 0
    fine: GiB | Literal["all"] | None = None
    fine_arena: GiB | None = None
    prompts: Literal["fine", "base"] = "fine"
    gate: Literal["off", "max_prob", "margin"] = "off"
    tau: Annotated[float, msgspec.Meta(ge=0)] | None = None
    gate_budget: Annotated[int, msgspec.Meta(ge=0)] = 0
    gate_passes: Annotated[int, msgspec.Meta(ge=0)] = 3
    gate_audit: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    suspend_drafts: bool = False
    report_seconds: Annotated[int, msgspec.Meta(ge=0)] = 60

    @property
    def is_resident(self) -> bool:
        """Whether the experts come through a pool, rather than all being in place for good."""
        return self.pool != "all" or bool(self.packs) or self.fine is not None

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
    no_fine, no_gate = config.fine is None, config.gate == "off"
    faults = [
        (config.fine is not None and config.experts != "w2", "fine", f"experts={config.experts}"),
        (not no_gate and no_fine, f"gate={config.gate}", "no fine tier (fine)"),
        (config.fine_arena is not None and no_fine, "fine_arena", "no fine tier (fine)"),
        (config.fine_arena is not None and not config.packs, "fine_arena", "no packs"),
        (config.prompts == "base" and no_fine, "prompts=base", "no fine tier (fine)"),
        (config.tau is not None and no_gate, "tau", "gate=off"),
        (config.gate_budget > 0 and no_gate, "gate_budget", "gate=off"),
        (config.gate_passes != 3 and no_gate, "gate_passes", "gate=off"),
        (config.gate_audit is not None and no_gate, "gate_audit", "gate=off"),
        (native and config.is_resident, "a pool or packs", "experts=native, which vLLM holds"),
        (
            config.host_store is not None and not partial and no_fine,
            f"host_store={config.host_store}",
            "pool=all",
        ),
        (
            config.host_store == "arena" and not partial and config.fine_arena is None,
            "host_store=arena",
            "pool=all and no arena",
        ),
        (
            config.fine_arena is not None and config.host_store in ("pinned", "pack"),
            "fine_arena",
            f"host_store={config.host_store}",
        ),
        (bool(config.packs) and not config.pack_folders, "packs", "no folder in it"),
        (config.arena is not None and not partial, "arena", "pool=all"),
        (
            config.arena is not None and config.store != "arena",
            "arena",
            f"host_store={config.store}",
        ),
        (config.pack_reads is not None and not config.packs, "pack_reads", "no packs"),
        (
            config.suspend_drafts and not config.is_resident,
            "suspend_drafts",
            "all experts in place (no pool, packs or fine)",
        ),
        (config.miss_tolerance > 0 and not partial, "miss_tolerance", "pool=all"),
    ]
    for is_fault, setting, beside in faults:
        if is_fault:
            raise ConfigError(
                f'additional config "moet": {setting} has no effect beside {beside}; leave one out.'
            )
    if config.gate == "max_prob" and config.tau is not None and config.tau > 1:
        raise ConfigError(
            f'additional config "moet": tau={config.tau} is no probability: with gate=max_prob it '
            "is at most 1, which fires at every step."
        )
    if not no_gate and config.tau is None:
        raise ConfigError(
            f'additional config "moet": gate={config.gate} needs tau, the confidence at or below '
            "which a step runs again; docs/gate.md has curves to choose from."
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

"""The metrics of a pool of experts: their names, where their values are, what they mean.

Apart from `telemetry`, which publishes them, so that whoever reads a page of metrics need not load
torch. Every metric has one label, `rank`.
"""

__all__ = [
    "COUNTERS",
    "FINE_COUNTERS",
    "GATE_COUNTERS",
    "GATE_GAUGES",
    "GAUGES",
    "STORE_COUNTERS",
    "Metrics",
]

Metrics = dict[str, tuple[str, str]]
"""By name: the field that holds the value, and the help text."""

COUNTERS: Metrics = {
    "moet_steps": ("steps", "Steps that ran."),
    "moet_repaired_steps": ("repaired", "Steps that missed experts and were run again."),
    "moet_streamed_steps": ("streamed", "Steps that fetched experts layer by layer."),
    "moet_failed_steps": ("failed", "Steps without a result: an expert could not be read."),
    "moet_degraded_steps": ("degraded", "Steps accepted with experts missing."),
    "moet_passes": ("passes", "Forward passes."),
    "moet_wanted_experts": ("wanted", "Distinct experts that steps wanted."),
    "moet_missed_experts": ("missed", "Distinct experts that were not in the pool."),
    "moet_brought_experts": ("brought", "Experts copied to the device while a step waited."),
    "moet_promoted_experts": ("promoted", "Experts copied to the device between steps."),
    "moet_stall_seconds": ("stall_seconds", "Time that steps waited for experts."),
}
"""Counters and the fields of `Counts` behind them; on a page Prometheus adds _total."""

STORE_COUNTERS: Metrics = {
    "moet_store_hits": ("hits", "Experts found in the arena."),
    "moet_store_misses": ("misses", "Experts not found in the arena."),
    "moet_store_bytes_read": ("bytes_read", "Bytes read from packs and verified."),
    "moet_store_errors": ("io_errors", "Reads that the kernel refused."),
    "moet_store_checksum_errors": ("checksum_errors", "Experts whose bytes were damaged."),
}
"""Counters and the fields of `moet_store.Snapshot` behind them; 0 where nothing is read."""

GAUGES: Metrics = {
    "moet_pool_slots": ("slots", "Experts that the pool can hold."),
    "moet_pool_resident": ("resident", "Experts that the pool holds."),
    "moet_pool_coverage": ("coverage", "Share of the rank's experts that the pool can hold."),
    "moet_row_bytes": ("row_bytes", "Bytes of one expert."),
}
"""Values of the moment and the fields of `telemetry.PoolState` behind them."""

FINE_COUNTERS: Metrics = {
    "moet_fine_brought_experts": ("brought", "FP4 experts copied to the device in a step."),
    "moet_fine_promoted_experts": ("promoted", "FP4 experts copied to the device between steps."),
}
"""Counters and the fields of the fine `tier.Tier` behind them; only where there is one."""

GATE_COUNTERS: Metrics = {
    "moet_gate_checked_steps": ("checked", "Steps whose confidence was read."),
    "moet_gate_fires": ("fires", "Steps that ran again with FP4 experts for want of confidence."),
    "moet_gate_audits": ("audits", "Steps that ran again by chance, to measure the gate."),
    "moet_gate_promoted_experts": ("promoted", "FP4 experts that fires and audits brought."),
    "moet_gate_passes": ("passes", "Passes with FP4 experts that fires and audits took."),
    "moet_gate_flipped_steps": ("flipped", "Fires that changed the most probable token."),
    "moet_gate_audit_flipped_steps": ("audit_flipped", "Audits that changed it."),
    "moet_gate_seconds": ("seconds", "Time that fires and audits took."),
}
"""Counters and the fields of `moet_core.gate.GateCounts` behind them; only with a gate."""

GATE_GAUGES: Metrics = {
    "moet_gate_tau": ("tau", "Confidence at or below which a step runs again."),
    "moet_gate_budget": ("budget", "FP4 experts that a step may bring; 0 for any number."),
}
"""Values of the moment and the fields of `moet_core.gate.GateSettings` behind them."""

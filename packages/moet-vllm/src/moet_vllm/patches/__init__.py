"""Upstream faults that no extension point reaches, each replaced by one small module.

A patch is tied to the exact upstream source it replaces. `PATCHES` lists all of them.
"""

from moet_vllm.patches import cpu_recovered_tokens
from moet_vllm.patches.patch import Patch, Target, apply_patches, check_target, find_target

__all__ = ["PATCHES", "Patch", "Target", "apply_patches", "check_target", "find_target"]

PATCHES: tuple[Patch, ...] = (cpu_recovered_tokens.PATCH,)
"""Every patch there is, whether this machine needs it or not."""

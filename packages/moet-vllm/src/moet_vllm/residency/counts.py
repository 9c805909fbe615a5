"""What the resident experts count; the step loop changes it, anyone reads it."""

import msgspec

__all__ = ["Counts"]


class Counts(msgspec.Struct):
    """Running totals since the start of one rank.

    Attributes:
        steps: Steps that ran.
        repaired: Steps that missed experts at first and were run again.
        streamed: Steps that ran layer by layer because their experts may exceed the pool.
        failed: Steps that ended without a result because a row could not be read.
        degraded: Steps that were accepted with experts missing (approximate mode only).
        passes: Forward passes, of all steps.
        wanted: Distinct experts that steps wanted, added up over steps.
        missed: Those of them that were not in the pool when the step began.
        brought: Rows of the base tier copied to the device for a step that waited.
        promoted: Rows of the base tier copied to the device between steps.
        row_bytes: Bytes of one row of the base tier.
        stall_seconds: Time that steps waited for rows.
    """

    row_bytes: int
    steps: int = 0
    repaired: int = 0
    streamed: int = 0
    failed: int = 0
    degraded: int = 0
    passes: int = 0
    wanted: int = 0
    missed: int = 0
    brought: int = 0
    promoted: int = 0
    stall_seconds: float = 0.0

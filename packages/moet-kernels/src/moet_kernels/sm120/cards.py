"""SM120 cards as the cycle model sees them, and their memory. No such card was used.

Processors, boost clocks, memory and its peak: NVIDIA's data sheets of both cards. Bandwidth: what
device copies reached on them (1.375 to 1.49 TB/s were published, the middle is taken). Latencies:
idle ones, from published microbenchmarks.
"""

import msgspec

from moet_kernels.sm120.cycles import Processor

__all__ = ["CARDS", "Card"]

GIB = 2**30


class Card(msgspec.Struct, frozen=True):
    """One card.

    Attributes:
        processor: what the cycle model needs.
        memory_bytes: of the card.
        peak: bytes a second that the memory's data sheet promises.
    """

    processor: Processor
    memory_bytes: int
    peak: float = 1.792e12


def _card(name: str, processors: int, clock: float, gib: int) -> Card:
    processor = Processor(
        name=name,
        count=processors,
        clock=clock,
        bandwidth=1.43e12,
        memory_latency=880,
        cache_latency=360,
    )
    return Card(processor, gib * GIB)


CARDS = {
    card.processor.name: card
    for card in (_card("RTX 5090", 170, 2.41, 32), _card("RTX PRO 6000", 188, 2.6, 96))
}
"""By name."""

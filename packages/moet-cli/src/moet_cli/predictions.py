"""`moet plan`: what is predicted of a model's expert layers on an SM120 card, and what fits it."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import click
import msgspec

from moet_cli.bench_kernels import CODECS, MODELS
from moet_cli.output import Output, make_table

if TYPE_CHECKING:
    from moet_kernels.sm120.predicted import Table

__all__ = ["CARDS", "TOKENS", "Memory", "Step", "add_command", "memory_of", "step_of"]

# Named here once more, because nothing heavy may be imported to show help; a test compares.
CARDS = ("RTX 5090", "RTX PRO 6000")
TOKENS = (1, 4)
GIB = 2**30


class Step(msgspec.Struct, frozen=True):
    """What is predicted of the expert layers of one decode step, on one card that holds them all.

    Attributes:
        card: its name.
        codec: of all experts.
        tokens: of the step; every one goes through experts of its own.
        layer_microseconds: of each kernel of a layer, in order, its launch included.
        milliseconds: of all expert layers.
        share: of the memory's peak that reading the experts takes.
    """

    card: str
    codec: str
    tokens: int
    layer_microseconds: dict[str, float]
    milliseconds: float
    share: float


class Memory(msgspec.Struct, frozen=True):
    """What all experts of a model take as one tier, beside one card's memory.

    Attributes:
        card: its name.
        tier: "base" (w2) or "fine" (the others).
        codec: of the tier.
        bytes: of all experts of all expert layers, padding included.
        card_bytes: the card's memory.
        share: bytes / card_bytes.
    """

    card: str
    tier: str
    codec: str
    bytes: int
    card_bytes: int
    share: float


def step_of(table: "Table", model: str, card: str, codec: str, tokens: int) -> Step:
    """Add up the predicted launches of a step."""
    from moet_kernels.sm120.cards import CARDS as KNOWN
    from moet_kernels.sm120.predicted import MODELS as GEOMETRIES

    wanted = model, card, codec, tokens
    layer = [
        one for one in table.launches if (one.model, one.card, one.codec, one.tokens) == wanted
    ]
    order = ("prepare", "gate_up", "down", "combine")
    times = {name: sum(o.microseconds for o in layer if o.kernel.endswith(name)) for name in order}
    layers = len(GEOMETRIES[model].moe_layers)
    read = sum(one.weight_bytes for one in layer)
    total = sum(times.values())
    share = read / (total * 1e-6) / KNOWN[card].peak
    return Step(card, codec, tokens, times, layers * total / 1000, share)


def memory_of(model: str, card: str, codec: str) -> Memory:
    """Count the bytes of all experts of a model."""
    from moet_core.row import row_layout
    from moet_kernels.sm120.cards import CARDS as KNOWN
    from moet_kernels.sm120.predicted import MODELS as GEOMETRIES

    geometry = GEOMETRIES[model]
    row = row_layout(codec, geometry.hidden, geometry.intermediate).row_bytes
    total = row * geometry.experts * len(geometry.moe_layers)
    room = KNOWN[card].memory_bytes
    tier = "base" if codec == "w2" else "fine"
    return Memory(card, tier, codec, total, room, total / room)


def show_plan(
    output: Output, model: str, cards: Sequence[str], codecs: Sequence[str], tokens: int
) -> None:
    """Print predicted times and bytes.

    Raises:
        MoetError: the table of predictions is damaged.
    """
    from moet_kernels.sm120.predicted import MODELS as GEOMETRIES
    from moet_kernels.sm120.predicted import read_table

    table = read_table()
    chosen = list(product(dict.fromkeys(cards), dict.fromkeys(codecs)))
    steps = [step_of(table, model, card, codec, tokens) for card, codec in chosen]
    memory = [memory_of(model, card, codec) for card, codec in chosen]
    layers = len(GEOMETRIES[model].moe_layers)
    data = {
        "event": "predictions",
        "model": model,
        "expert_layers": layers,
        "predicted": steps,
        "predicted_memory": memory,
        "note": _NOTE,
    }
    many = f"{tokens} token{'s'[: tokens > 1]}"
    times = make_table(
        f"{model}: predicted times of {layers} expert layers in a decode step of {many}",
        ("card", "codec", "gate, up (us)", "down (us)", "other (us)", "step (ms)", "of GDDR7"),
        [
            (
                step.card,
                step.codec,
                *(f"{time:.1f}" for time in _three(step.layer_microseconds)),
                f"{step.milliseconds:.2f}",
                f"{step.share:.2f}",
            )
            for step in steps
        ],
    )
    room = make_table(
        f"{model}: predicted bytes of all experts beside the memory of one card",
        ("card", "tier", "codec", "experts (GiB)", "card (GiB)", "of the card"),
        [
            (
                one.card,
                one.tier,
                one.codec,
                f"{one.bytes / GIB:.1f}",
                f"{one.card_bytes / GIB:.0f}",
                f"{one.share:.2f}",
            )
            for one in memory
        ],
    )
    output.result(data, times, room, _NOTE)


_NOTE = (
    "All times are predictions of a cycle model; no such card was used. Every token of a step goes "
    "through experts of its own, all of them in the card's memory; attention, dense layers and "
    "drafts are not in these times, nor is anything but experts in these bytes."
)


def _three(times: dict[str, float]) -> tuple[float, float, float]:
    """Gate and up, down, and what comes before and after them."""
    return times["gate_up"], times["down"], times["prepare"] + times["combine"]


def add_command(command: Callable[..., Any], cli: click.Group) -> None:
    """Add `plan` to the commands of `moet`; `command` registers as in `output.command`."""

    @command(cli, "plan")
    @click.argument("model", type=click.Choice(MODELS, case_sensitive=False))
    @click.option(
        "--card",
        "cards",
        multiple=True,
        type=click.Choice(CARDS, case_sensitive=False),
        default=CARDS,
        show_default=True,
        help="An SM120 card; may be repeated.",
    )
    @click.option(
        "--codec",
        "codecs",
        multiple=True,
        type=click.Choice(CODECS),
        default=CODECS,
        show_default=True,
        help="How the experts are encoded; may be repeated.",
    )
    @click.option(
        "--tokens",
        type=click.Choice([str(number) for number in TOKENS]),
        default="1",
        show_default=True,
        help="How many tokens a decode step has.",
    )
    def plan(
        output: Output, model: str, cards: Sequence[str], codecs: Sequence[str], tokens: str
    ) -> None:
        """Show predicted times and bytes of a model's experts on SM120 cards."""
        show_plan(output, model, cards, codecs, int(tokens))

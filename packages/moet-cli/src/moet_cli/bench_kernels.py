"""`moet bench kernels`: how fast expert layers are on this GPU, into a result file."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moet_cli.output import Output
from moet_core.errors import ConfigError

if TYPE_CHECKING:
    from moet_cli.bench import Target

__all__ = ["CODECS", "MODELS", "add_command", "bench_kernels", "stock_rival"]

# Named here once more, because nothing heavy may be imported to show help; a test compares.
MODELS = ("DeepSeek-V4-Flash", "GLM-5.2", "Kimi-K2.7")
CODECS = ("w2", "fp4-mx", "fp4-nv")
_TOKENS = (1, 2, 4, 8, 16, 1024, 8192)


def bench_kernels(
    output: Output,
    models: Sequence[str],
    codecs: Sequence[str],
    tokens: Sequence[int],
    samples: int,
    target: "Target",
    *,
    stock: bool,
    cuts: bool,
) -> None:
    """Measure the portable kernels, and vLLM's own FP4 layer beside them.

    Args:
        output: Told what is measured, and shown the result.
        models: Names of models whose layers are measured.
        codecs: Codecs of the experts.
        tokens: Numbers of tokens.
        samples: Samples of each figure.
        target: Where the result goes.
        stock: Measure vLLM's own layer too, if it is here.
        cuts: Measure every way to cut the kernels instead.

    Raises:
        ConfigError: No GPU that runs the kernels, or the result file exists.
    """
    from moet_cli.bench import finish, result_path, run_result

    started = datetime.now(UTC)
    path = result_path(target, "kernels", started)
    _check_gpu()
    import torch

    from moet_kernels.bench_experts import NOTES, Plan, bench_experts, path_notes
    from moet_kernels.bench_sweep import sweep

    plan = Plan(models, codecs, tokens, samples)
    notes: tuple[str, ...] = NOTES
    if cuts:
        found = sweep(plan, output.say)
    else:
        rival, note = stock_rival() if stock else (None, "vLLM's own FP4 layer was not asked for")
        output.say(note)
        device = torch.device("cuda", torch.cuda.current_device())
        notes = (*NOTES, *path_notes(plan, device), note)
        found = bench_experts(plan, rival, output.say)
    result = run_result("kernels", started, found, suite="cuts" if cuts else None, notes=notes)
    finish(output, path, result, target.force)


def add_command(command: Callable[..., Any], bench: click.Group) -> None:
    """Add `kernels` to the group of benchmarks; `command` registers as in `output.command`."""

    @command(bench, "kernels")
    @click.option(
        "--model",
        "models",
        multiple=True,
        type=click.Choice(MODELS),
        default=MODELS,
        show_default=True,
        help="Whose layers to measure; may be repeated.",
    )
    @click.option(
        "--codec",
        "codecs",
        multiple=True,
        type=click.Choice(CODECS),
        default=("w2",),
        show_default=True,
        help="How the experts are encoded; may be repeated.",
    )
    @click.option(
        "--tokens",
        multiple=True,
        type=click.IntRange(min=1),
        default=_TOKENS,
        show_default=True,
        help="How many tokens a layer takes; may be repeated.",
    )
    @click.option(
        "--samples",
        type=click.IntRange(min=1),
        default=50,
        show_default=True,
        help="Graph replays measured for each figure.",
    )
    @click.option(
        "--stock/--no-stock",
        default=True,
        show_default=True,
        help="Measure vLLM's own FP4 layer beside, if vLLM is here.",
    )
    @click.option("--cuts", is_flag=True, help="Measure every way to cut the kernels instead.")
    @click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Result file.")
    @click.option("--force", is_flag=True, help="Replace the result file if it exists.")
    def kernels(
        output: Output,
        models: Sequence[str],
        codecs: Sequence[str],
        tokens: Sequence[int],
        samples: int,
        stock: bool,
        cuts: bool,
        out: Path | None,
        force: bool,
    ) -> None:
        """Measure expert layers on this GPU, against its bandwidth and vLLM's own."""
        from moet_cli.bench import Target

        target = Target(out, force)
        bench_kernels(output, models, codecs, tokens, samples, target, stock=stock, cuts=cuts)


def _check_gpu() -> None:
    import torch

    from moet_kernels.arch import runs_on_gpu

    if not torch.cuda.is_available():
        raise ConfigError(
            "`moet bench kernels` needs an NVIDIA GPU of sm_80 or newer, and torch "
            f"{torch.__version__} finds none. Run it on a machine with one; `nvidia-smi` shows "
            "what the driver sees."
        )
    device = torch.device("cuda", torch.cuda.current_device())
    if not runs_on_gpu(device):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"`moet bench kernels` needs an NVIDIA GPU of sm_80 or newer, got {name}."
        )


def stock_rival() -> tuple[Any, str]:
    """Return vLLM's own layer as a rival, or None; and what to say of it."""
    try:
        import moet_vllm.stock as own

        own.check()
    except ImportError as error:
        return None, f"vLLM's own FP4 layer was not measured: {error}"

    def rival(model: Any) -> tuple[str, Any]:
        mxfp4 = model.swiglu_limit is not None  # of the three models, the one stored as MXFP4
        layer = own.marlin_layer(
            mxfp4, model.hidden, model.intermediate, model.experts, model.swiglu_limit
        )
        name = f"vLLM {'MXFP4' if mxfp4 else 'NVFP4'} (Marlin)"
        return name, lambda batch: layer(*batch)

    return rival, "vLLM's own FP4 layer: fused_marlin_moe, as its Marlin experts call it"

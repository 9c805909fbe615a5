"""The commands of `moet`: what they take, and what their errors become."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from moet_cli.bench_kernels import add_command as add_bench_kernels
from moet_cli.interrupts import Interrupted, raising
from moet_cli.kernels import kernels
from moet_cli.machine import find_commit, installed_versions
from moet_cli.nearest import unknown_name
from moet_cli.output import Group, Output, command, make_table, verbose_switch
from moet_cli.pack import add_commands as add_pack_commands
from moet_cli.predictions import add_command as add_plan
from moet_core.errors import MoetError

__all__ = ["main"]


class _ServingCommand(click.Command):
    """A command that takes vLLM's arguments after `--`; they are in `ctx.meta`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        split = args.index("--") if "--" in args else len(args)
        ctx.meta["vllm_arguments"] = args[split + 1 :]
        return super().parse_args(ctx, args[:split])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- VLLM_ARGUMENTS...]"]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from moet_cli.options import OPTIONS

        with formatter.section("Keys of --set"):
            formatter.write_dl([(option.name, option.help) for option in OPTIONS.values()])


_setting = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set an option of the plan."
)
_out = click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Result file.")
_force = click.option("--force", is_flag=True, help="Replace the result file if it exists.")


def _version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        commit = find_commit()
        at = f" (commit {commit.id[:12]}{', changed' if commit.dirty else ''})" if commit else ""
        moet, *others = [f"{name} {version}" for name, version in installed_versions().items()]
        click.echo(", ".join([moet + at, *others]))
        ctx.exit()


@click.group("moet", cls=Group)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the versions of moet and of what it runs on.",
)
@verbose_switch
def cli() -> None:
    """Serve mixture-of-experts models with 2-bit experts through vLLM."""


@command(cli, "serve", cls=_ServingCommand)
@click.argument("target", metavar="RECIPE|MODEL")
@_setting
@click.option("--dry-run", is_flag=True, help="Print and check the plan, start nothing.")
def serve(output: Output, target: str, settings: Sequence[str], dry_run: bool) -> None:
    """Serve a recipe, a model folder or a Hugging Face model until Ctrl-C."""
    from moet_cli.serve import run_serve

    run_serve(output, _resolve(target, settings), dry_run=dry_run)


@command(cli, "demo")
@click.option("--keep", is_flag=True, help="Serve on until Ctrl-C.")
def demo(output: Output, keep: bool) -> None:
    """Talk to TinyMoE, a small trained model, with 2-bit experts: no GPU, no download."""
    from moet_cli.demo import run_demo

    run_demo(output, keep=keep)


@command(cli, "top")
@click.argument("url", default="http://127.0.0.1:8000")
@click.option(
    "--interval",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Print one table, after one interval, and stop.")
def top(output: Output, url: str, interval: float, once: bool) -> None:
    """Watch a running server until Ctrl-C: requests, tokens and each rank's pool of experts.

    URL is the server's address, http://127.0.0.1:8000 by default. Rates and shares are of the last
    interval, totals since the server started; "-" stands where nothing was counted.
    """
    from moet_cli.top import run_top

    run_top(output, url, interval, once=once)


@cli.group("recipes", cls=Group)
def recipes() -> None:
    """List the recipes, or show one."""


@command(recipes, "list")
def recipes_list(output: Output) -> None:
    """List the recipes that come with moet."""
    from moet_cli.recipe import load_recipe, recipe_names

    found = {name: load_recipe(name) for name in recipe_names()}
    rows = [(name, recipe.requires.gpus, recipe.summary) for name, recipe in found.items()]
    output.result(
        {"event": "recipes", "recipes": found},
        make_table("Recipes", ("name", "GPUs", "what"), rows),
    )


@command(recipes, "show")
@click.argument("name")
def recipes_show(output: Output, name: str) -> None:
    """Show what a recipe sets."""
    from moet_cli.recipe import load_recipe

    recipe = load_recipe(name)
    text = msgspec.yaml.encode(recipe).decode().rstrip()
    output.result({"event": "recipe", "name": name, "recipe": recipe}, text)


@cli.group("bench", cls=Group)
def bench() -> None:
    """Measure a recipe, the codecs or the kernels, into a result file."""


@command(bench, "run", cls=_ServingCommand)
@click.argument("target", metavar="RECIPE|MODEL")
@click.option("--suite", default="quick", show_default=True, help="What to measure.")
@_setting
@_out
@_force
def bench_run(
    output: Output,
    target: str,
    suite: str,
    settings: Sequence[str],
    out: Path | None,
    force: bool,
) -> None:
    """Serve a recipe and measure speed, time to first token and memory."""
    from moet_cli import bench as benchmarks

    plan = _resolve(target, ["port=0", *settings])
    benchmarks.bench_run(output, plan, suite, benchmarks.Target(out, force))


@command(bench, "codecs")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="How long to measure each figure.",
)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@_out
@_force
def bench_codecs(
    output: Output, seconds: float, threads: int, out: Path | None, force: bool
) -> None:
    """Measure how fast the codecs encode experts."""
    from moet_cli import bench as benchmarks

    benchmarks.bench_codecs(output, seconds, threads, benchmarks.Target(out, force))


add_pack_commands(command, cli, bench)
add_bench_kernels(command, bench)
add_plan(command, cli)


@command(bench, "parsers")
@click.option("--runs", type=click.IntRange(min=1), default=5, show_default=True)
@_out
@_force
def bench_parsers(output: Output, runs: int, out: Path | None, force: bool) -> None:
    """Measure what reading thinking and tool calls costs."""
    from moet_cli import parsers

    parsers.bench_parsers(output, runs, out, force)


@command(bench, "residency")
@click.option(
    "--trace",
    "traces",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    multiple=True,
    required=True,
    help="Recorded routing (.npz); may be given several times.",
)
@click.option("--together", is_flag=True, help="Simulate also all traces served at once.")
@click.option(
    "--coverage",
    "coverages",
    type=click.FloatRange(min=0, max=100, min_open=True),
    multiple=True,
    help="Percent of all experts that fit into the pool; several by default.",
)
@click.option("--policy", "policies", multiple=True, help="moet, LRU, ...; all by default.")
@click.option(
    "--half-life",
    type=click.FloatRange(min=0, min_open=True),
    help="Steps after which a use counts half; what serving does by default.",
)
@click.option(
    "--margin",
    type=click.FloatRange(min=0),
    help="Uses by which an expert must exceed the one it replaces between steps; what serving does "
    "by default.",
)
@click.option(
    "--promotions",
    type=click.IntRange(min=0),
    help="Rows that enter between two steps at most; 8 by default.",
)
@click.option("--count-prompts", is_flag=True, help="Let prefill count as use like decoding.")
@_out
@_force
def bench_residency(
    output: Output,
    traces: Sequence[Path],
    together: bool,
    coverages: Sequence[float],
    policies: Sequence[str],
    out: Path | None,
    force: bool,
    **settings: Any,
) -> None:
    """Simulate pools of experts on recorded routing, against LRU, LFU and the optimum."""
    from moet_cli import bench as benchmarks
    from moet_cli import residency
    from moet_core.simulate import Settings

    given = {name: value for name, value in settings.items() if value is not None}
    study = residency.Study(traces, together, coverages, policies, Settings(**given))
    residency.bench_residency(output, study, benchmarks.Target(out, force))


@command(bench, "quality")
@click.argument("target", metavar="[RECIPE|MODEL]", default="demo")
@click.option("--reference", metavar="MODEL", help="Compare with this model's own precision.")
@_setting
@_out
@_force
def bench_quality(
    output: Output,
    target: str,
    reference: str | None,
    settings: Sequence[str],
    out: Path | None,
    force: bool,
) -> None:
    """Measure what a configuration does to TinyMoE's skills, against its own precision."""
    from moet_cli import bench as benchmarks
    from moet_cli import quality

    wanted = benchmarks.Target(out, force)
    quality.bench_quality(output, target, settings, reference, wanted)


cli.add_command(kernels)


def _resolve(target: str, settings: Sequence[str]) -> Any:
    from moet_cli.plan import resolve

    return resolve(target, settings, click.get_current_context().meta["vllm_arguments"])


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 ok, 1 failed, 2 usage, 128 + N by signal N."""
    output = Output()
    argv = sys.argv[1:] if args is None else list(args)
    try:
        with raising():
            code = cli.main(argv, prog_name="moet", standalone_mode=False, obj=output)
            return code if isinstance(code, int) else 0
    except Interrupted as interrupt:
        code = 128 + interrupt.signum
        output.error(f"stopped by {interrupt}", code)
    except click.exceptions.NoArgsIsHelpError as error:
        code = error.exit_code
        output.say(error.format_message())
    except click.ClickException as error:
        code = error.exit_code
        output.error(_usage_text(error), code, error)
    except MoetError as error:
        code = error.exit_code
        output.error(str(error), code, error)
    except Exception as error:
        code = 1
        output.error(
            f"internal error, {type(error).__name__}: {error}. --verbose shows where; please "
            "report it.",
            code,
            error,
        )
    return code


def _usage_text(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        names = [name for param in error.ctx.command.params for name in param.opts]
        flags = [name for name in names if name.startswith("--")]
        return unknown_name("option", error.option_name, flags)
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{error.format_message()} See {error.ctx.command_path} --help."
    return error.format_message()

"""The options of a plan, declared once.

Recipes, `--set`, the arguments after `--`, the server's command line and the printed plan all read
this table. An option whose value is None is left to vLLM: nothing is passed on for it.
"""

from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from moet_cli.nearest import unknown_name
from moet_core.errors import UsageError
from moet_vllm.config import GiB

__all__ = ["OPTIONS", "Option", "Source", "Target", "convert", "get_option", "parse_setting"]

Count = Annotated[int, msgspec.Meta(ge=1)]


class Source(IntEnum):
    """Where a value came from; the higher one wins.

    DEFAULT: the table in this module.
    RECIPE: the recipe's file.
    COMMAND_LINE: MODEL or `--set`.
    VLLM_ARGUMENT: an argument after `--`, in vLLM's own spelling.
    """

    DEFAULT = 0
    RECIPE = 1
    COMMAND_LINE = 2
    VLLM_ARGUMENT = 3


class Target(Enum):
    """Who reads a value.

    MOET: the plugin; a field of `moet_vllm.config.MoetConfig`.
    FLAG: vLLM, as a flag of `vllm serve`.
    ENVIRONMENT: vLLM or torch, as one of their environment variables.
    LAUNCHER: this command line itself.
    """

    MOET = "moet"
    FLAG = "vLLM flag"
    ENVIRONMENT = "environment"
    LAUNCHER = "moet launcher"


class Option(msgspec.Struct, frozen=True):
    """One option.

    Attributes:
        name: its name in recipes, in `--set` and in the printed plan.
        type: what msgspec accepts for it.
        default: its value if nobody sets it; None leaves it to vLLM.
        help: one line for people.
        target: who reads it.
        key: the reader's own name for it: config field, flag or environment variable.
        aliases: other spellings of the flag.
    """

    name: str
    type: Any
    default: Any
    help: str
    target: Target
    key: str = ""
    aliases: tuple[str, ...] = ()


def _flag(name: str, type_: Any, default: Any, help_: str, *aliases: str) -> Option:
    key = "--" + name.replace("_", "-")
    return Option(name, type_, default, help_, Target.FLAG, key, aliases)


def _environment(name: str, type_: Any, key: str, help_: str) -> Option:
    return Option(name, type_, None, help_, Target.ENVIRONMENT, key)


def _moet(name: str, type_: Any, default: Any, help_: str) -> Option:
    return Option(name, type_, default, help_, Target.MOET, name)


def _launcher(name: str, type_: Any, default: Any, help_: str) -> Option:
    return Option(name, type_, default, help_, Target.LAUNCHER)


_DTYPES = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]

OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        _launcher("model", str, "", "model folder, Hugging Face id, tinymoe, or synthetic:FORMAT"),
        _launcher(
            "start_timeout",
            Annotated[float, msgspec.Meta(gt=0)],
            1800.0,
            "seconds until the server must have answered its first request",
        ),
        _launcher(
            "speculative_tokens",
            Annotated[int, msgspec.Meta(ge=0)],
            0,
            "tokens that the model's own MTP layers draft for each step (0: none)",
        ),
        _launcher("log", str, "", "file for the server's output (empty: one in the state folder)"),
        _moet(
            "experts",
            Literal["w2", "fp4", "native"],
            "w2",
            "codec of the routed experts (fp4: 4 bits; native: as they are, by vLLM alone)",
        ),
        _moet(
            "pool",
            GiB | Literal["all", "auto"],
            "all",
            "memory of each device for experts in GiB (all: every expert; auto: what fits)",
        ),
        _moet(
            "host_store",
            Literal["pinned", "pack", "arena"] | None,
            None,
            "where experts outside the pool wait: in memory, in packs, or in an arena over packs",
        ),
        _moet("packs", str, "", "folders of packs, written at the first start; commas stripe them"),
        _moet("arena", GiB | None, None, "memory of each rank for an arena over packs, in GiB"),
        _moet(
            "pack_reads",
            Literal["direct", "cached"] | None,
            None,
            "read packs past the page cache (direct, what moet does by itself) or through it",
        ),
        _moet(
            "miss_tolerance",
            Annotated[int, msgspec.Meta(ge=0)],
            0,
            "experts a step may lack; above 0 answers are approximate and say so",
        ),
        _moet(
            "fine",
            GiB | Literal["all"] | None,
            None,
            "memory of each rank's device for experts at FP4 beside those at 2 bits, in GiB",
        ),
        _moet(
            "fine_arena", GiB | None, None, "memory for the FP4 experts' arena over packs, in GiB"
        ),
        _moet("prompts", Literal["fine", "base"], "fine", "experts that prompts are read with"),
        _moet(
            "gate",
            Literal["off", "max_prob", "margin"],
            "off",
            "what tells how certain a step is; uncertain ones run again with FP4 experts",
        ),
        _moet(
            "tau",
            Annotated[float, msgspec.Meta(ge=0)] | None,
            None,
            "confidence at or below which a step runs again (max_prob: 0 to 1; margin: nats)",
        ),
        _moet(
            "gate_budget",
            Annotated[int, msgspec.Meta(ge=0)],
            0,
            "FP4 experts that one step may bring (0: any number)",
        ),
        _moet(
            "gate_passes",
            Annotated[int, msgspec.Meta(ge=0)],
            3,
            "finer passes of one step (0: as many as it takes)",
        ),
        _moet(
            "gate_audit",
            Annotated[float, msgspec.Meta(gt=0, le=1)] | None,
            None,
            "probability that a certain step runs again too, to measure what the gate misses",
        ),
        _moet(
            "suspend_drafts",
            bool,
            False,
            "suspend drafts while a token takes longer with them than without (beside a pool)",
        ),
        _moet(
            "report_seconds",
            Annotated[int, msgspec.Meta(ge=0)],
            60,
            "time between two lines about the pool in the log (0: none)",
        ),
        _moet("zeros", Literal["auto", "sign", "alternate"], "auto", "sign of exact zeros in w2"),
        _flag("host", str, "127.0.0.1", "address to listen on"),
        _flag(
            "port",
            Annotated[int, msgspec.Meta(ge=0, le=65535)],
            8000,
            "port to listen on (0: a free one)",
        ),
        _flag("served_model_name", str, None, "name of the model in the API"),
        _flag("dtype", _DTYPES, None, "type of activations and unquantised weights"),
        _flag("max_model_len", Count, None, "longest prompt and answer, in tokens"),
        _flag("max_num_seqs", Count, None, "most requests in one step"),
        _flag("max_num_batched_tokens", Count, None, "most tokens in one step"),
        _flag("enforce_eager", bool, None, "run without CUDA graphs and torch.compile"),
        _flag("max_logprobs", Count, None, "most log-probabilities a token that a request may ask"),
        _flag("enable_auto_tool_choice", bool, None, "let the model decide whether to call a tool"),
        _flag("tool_call_parser", str, None, "parser of the tool calls in replies"),
        _flag("tensor_parallel_size", Count, None, "processes per layer", "-tp"),
        _flag("pipeline_parallel_size", Count, None, "stages of layers", "-pp"),
        _flag(
            "gpu_memory_utilization",
            Annotated[float, msgspec.Meta(gt=0, le=1)],
            None,
            "share of the GPU's memory that vLLM may take",
        ),
        _environment(
            "cpu_kvcache_space",
            Count,
            "VLLM_CPU_KVCACHE_SPACE",
            "KV cache in GiB (vLLM's CPU build only)",
        ),
        _environment(
            "cpu_omp_threads_bind",
            str,
            "VLLM_CPU_OMP_THREADS_BIND",
            "cores of each worker, as in 0-3|4-7 (vLLM's CPU build only)",
        ),
        _environment(
            "torch_compile_disable",
            Annotated[int, msgspec.Meta(ge=0, le=1)],
            "TORCH_COMPILE_DISABLE",
            "1: torch compiles nothing, not even what enforce_eager leaves",
        ),
    )
}


def get_option(name: str, where: str = "") -> Option:
    """Return the option called `name`, with `-` or `_` between its words.

    Raises:
        UsageError: there is none; the text names the nearest one.
    """
    option = OPTIONS.get(name.replace("-", "_"))
    if option is None:
        raise UsageError(where + unknown_name("option", name, OPTIONS))
    return option


def convert(option: Option, value: Any, *, text: bool = False) -> Any:
    """Check a value; with `text`, also turn "8" into 8 and "true" into True.

    Raises:
        UsageError: not a value of this option.
    """
    try:
        return msgspec.convert(value, option.type, strict=not text)
    except msgspec.ValidationError as error:
        reason = str(error)
        if get_origin(option.type) is Literal:
            reason = "allowed are " + ", ".join(get_args(option.type))
        raise UsageError(
            f"Option {option.name!r} ({option.help}) cannot be {value!r}: {reason}."
        ) from error


def parse_setting(setting: str) -> tuple[Option, Any]:
    """Read one `key=value` of the command line.

    Raises:
        UsageError: no `=`, an unknown key, or a value the option does not take.
    """
    name, equals, text = setting.partition("=")
    if not equals:
        raise UsageError(f"--set takes key=value, got {setting!r}.")
    option = get_option(name.strip())
    return option, convert(option, text, text=True)

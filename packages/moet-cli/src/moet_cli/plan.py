"""The one plan of a server: every value and where it came from, and the command that follows."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from moet_cli.model import ModelKind, kind_of
from moet_cli.nearest import unknown_name
from moet_cli.options import OPTIONS, Option, Source, Target, convert, parse_setting
from moet_cli.ports import free_port
from moet_cli.recipe import Recipe, Requires, load_recipe, recipe_names
from moet_cli.vllm_args import parse_vllm_arguments
from moet_core.errors import UsageError
from moet_vllm.config import GATE_CONTROL, SCHEDULER, WORKER, MoetConfig, parse_config

__all__ = ["Plan", "Value", "environment", "resolve", "server_command", "server_url"]

# Set unless the user's environment has them.
_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "PYTHONSAFEPATH": "1",  # a folder called vllm in the current one must not hide the package
    "PYTHONUNBUFFERED": "1",  # the log must hold what was said before a death
}
_SPECULATIVE = "--speculative-config"
_OFFLINE = {"HF_HUB_OFFLINE": "1"}  # the model is here: a start must not depend on the network


class Value(msgspec.Struct, frozen=True):
    """A value, where it came from, and the values that lost to it, highest first."""

    value: Any
    source: Source
    lost: tuple["Value", ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """Everything that decides what server is started.

    Attributes:
        recipe: the recipe's name, None for a plain model.
        requires: what the recipe needs of the machine.
        values: option name to value, for every option there is.
        moet: the plugin's configuration.
        additional_config: what other plugins get through `--additional-config`.
        vllm_arguments: arguments after `--` that go to vLLM as they are.
    """

    recipe: str | None
    requires: Requires
    values: dict[str, Value]
    moet: MoetConfig
    additional_config: dict[str, Any]
    vllm_arguments: tuple[str, ...]

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value


def resolve(target: str, settings: Sequence[str] = (), vllm_arguments: Sequence[str] = ()) -> Plan:
    """Make the plan.

    Args:
        target: name of a recipe, a recipe file, a model folder, or a Hugging Face id.
        settings: `key=value` of `--set`.
        vllm_arguments: the arguments after `--`.

    Raises:
        UsageError: an unknown name or a value that its option does not take.
        ConfigError: a recipe file that cannot be used.
    """
    recipe = _recipe(target)
    if recipe is None:
        settings = [f"model={target}", *settings]
    arguments = parse_vllm_arguments(vllm_arguments)
    values = {name: Value(option.default, Source.DEFAULT) for name, option in OPTIONS.items()}
    if recipe is not None:
        for name, value in recipe.options.items():
            _put(values, OPTIONS[name], value, Source.RECIPE)
    for setting in settings:
        _put(values, *parse_setting(setting), Source.COMMAND_LINE)
    for name, value in arguments.values.items():
        _put(values, OPTIONS[name], value, Source.VLLM_ARGUMENT)
    if values["speculative_tokens"].value:
        _check_only_drafts(arguments.rest)
    if values["port"].value == 0:
        port = free_port(values["host"].value)
        values["port"] = msgspec.structs.replace(values["port"], value=port)
    return Plan(
        recipe=target if recipe is not None else None,
        requires=recipe.requires if recipe is not None else Requires(),
        values=values,
        moet=parse_config(_of_target(values, Target.MOET)),
        additional_config=arguments.additional_config,
        vllm_arguments=arguments.rest,
    )


def server_command(plan: Plan, model: str) -> tuple[str, ...]:
    """Return the server's command line for a model that lies in the folder `model`."""
    flags: list[str] = []
    for name, option in OPTIONS.items():
        if option.target is Target.FLAG and plan[name] is not None:
            flags += _flag(option, plan[name])
    if plan["speculative_tokens"]:
        drafts = {"method": "mtp", "num_speculative_tokens": plan["speculative_tokens"]}
        flags += [_SPECULATIVE, msgspec.json.encode(drafts).decode()]
    config = {**plan.additional_config, "moet": json.loads(msgspec.json.encode(plan.moet))}
    if plan["experts"] != "native":
        flags += ["--worker-cls", WORKER]
    if plan.moet.is_resident:
        flags += ["--scheduler-cls", SCHEDULER]
    if plan.moet.gate != "off":
        flags += ["--middleware", GATE_CONTROL]
    return (
        *(sys.executable, "-m", "moet_vllm.server", "serve", model),
        *flags,
        *plan.vllm_arguments,
        *("--additional-config", msgspec.json.encode(config).decode()),
    )


def environment(plan: Plan, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set for the server on top of the `inherited` ones.

    vLLM's own arguments may name further models, so with any of those the hub stays reachable.
    """
    is_local = kind_of(plan["model"]) is not ModelKind.HUB and not plan.vllm_arguments
    usual = _ENVIRONMENT | (_OFFLINE if is_local else {})
    chosen = {
        option.key: str(plan[name])
        for name, option in OPTIONS.items()
        if option.target is Target.ENVIRONMENT and plan[name] is not None
    }
    return {key: value for key, value in usual.items() if key not in inherited} | chosen


def server_url(plan: Plan) -> str:
    """Return the address at which this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(plan["host"], plan["host"])  # noqa: S104
    return f"http://[{host}]:{plan['port']}" if ":" in host else f"http://{host}:{plan['port']}"


def _recipe(target: str) -> Recipe | None:
    """Tell a recipe from a model: a bare word is a recipe or a folder."""
    if target in recipe_names() or target.endswith(".yaml"):
        return load_recipe(target)
    if Path(target).is_dir() or kind_of(target) is not ModelKind.FOLDER:
        return None
    if "/" in target:
        raise UsageError(f"There is no model folder {target}.")
    raise UsageError(
        unknown_name("recipe", target, recipe_names())
        + " A model is a folder or a Hugging Face id (owner/name)."
    )


def _check_only_drafts(vllm_arguments: Sequence[str]) -> None:
    """Refuse vLLM's own way to set drafts beside `speculative_tokens`."""
    for word in vllm_arguments:
        flag = word.partition("=")[0].partition(".")[0].replace("_", "-")
        if flag in (_SPECULATIVE, "-sc"):
            raise UsageError(
                f"{word} after `--` and speculative_tokens both say what drafts; leave one out."
            )


def _put(values: dict[str, Value], option: Option, value: Any, source: Source) -> None:
    before = values[option.name]
    lost = (msgspec.structs.replace(before, lost=()), *before.lost)
    values[option.name] = Value(convert(option, value), source, lost)


def _of_target(values: dict[str, Value], target: Target) -> dict[str, Any]:
    return {
        option.key: values[name].value
        for name, option in OPTIONS.items()
        if option.target is target
    }


def _flag(option: Option, value: Any) -> list[str]:
    if value is True:
        return [option.key]
    if value is False:
        return ["--no-" + option.key.removeprefix("--")]
    return [option.key, str(value)]

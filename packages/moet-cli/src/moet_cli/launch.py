"""From a plan to a running server: what serve, demo and bench have in common."""

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moet_cli.checks import Check, absent_shards
from moet_cli.model import fetch_model, planned_folder
from moet_cli.options import Source
from moet_cli.output import Output, make_table
from moet_cli.plan import Plan, Value, environment, server_command, server_url
from moet_cli.progress import shown
from moet_cli.supervise import Launch, Server
from moet_core.checkpoint import check_checkpoint

__all__ = ["command_line", "make_launch", "plan_as_data", "plan_as_text", "running", "wait_ready"]


def make_launch(plan: Plan, output: Output) -> Launch:
    """Get the model here, and return what to start for it.

    Raises:
        MoetError: there is no such model, or it is not complete.
    """
    model = fetch_model(plan["model"])
    check_checkpoint(model, absent_shards(plan, model))
    log = Path(plan["log"]) if plan["log"] else _new_log(plan)
    launch = Launch(
        command=server_command(plan, str(model)),
        environment=environment(plan, os.environ),
        url=server_url(plan),
        log=log,
        converts=plan["experts"] != "native",
        metrics=_metrics_folder(plan, log),
    )
    output.say(f"server log: {launch.log}")
    return launch


def wait_ready(server: Server, plan: Plan) -> None:
    """Wait until the server serves, and show how it goes; errors as in `Server.wait_ready`."""
    with shown() as show:
        server.wait_ready(plan["start_timeout"], show)


@contextmanager
def running(plan: Plan, output: Output) -> Iterator[Server]:
    """Start the plan's server, wait until it serves, and stop it at the end of the block.

    Raises:
        MoetError: no model, or a server that does not come up.
    """
    with Server(make_launch(plan, output)) as server:
        wait_ready(server, plan)
        yield server


def command_line(command: Sequence[str], variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return a command that runs another one with environment variables set."""
    return ("env", *(f"{key}={value}" for key, value in variables.items()), *command)


def plan_as_data(plan: Plan, checks: list[Check]) -> dict[str, Any]:
    """Describe the plan for --json."""
    return {
        "event": "plan",
        "recipe": plan.recipe,
        "options": {name: _value_as_data(value) for name, value in plan.values.items()},
        "command": server_command(plan, planned_folder(plan["model"])),
        "environment": environment(plan, os.environ),
        "checks": {check.name: check.found for check in checks},
    }


def plan_as_text(plan: Plan) -> list[Any]:
    """Describe the plan for people: a table, then the command that follows from it."""
    rows = [
        (name, "(vLLM decides)" if value.value is None else value.value, _origin(value))
        for name, value in plan.values.items()
    ]
    title = f"Plan: recipe {plan.recipe}" if plan.recipe else f"Plan: model {plan['model']}"
    command = server_command(plan, planned_folder(plan["model"]))
    return [
        make_table(title, ("option", "value", "from"), rows),
        shlex.join(command_line(command, environment(plan, os.environ))),
    ]


def _value_as_data(value: Value) -> dict[str, Any]:
    return {
        "value": value.value,
        "source": _SOURCES[value.source],
        "instead_of": [{"value": v.value, "source": _SOURCES[v.source]} for v in value.lost],
    }


_SOURCES = {
    Source.DEFAULT: "default",
    Source.RECIPE: "recipe",
    Source.COMMAND_LINE: "command line",
    Source.VLLM_ARGUMENT: "vLLM argument after --",
}


def _origin(value: Value) -> str:
    chosen = [lost for lost in value.lost if lost.source is not Source.DEFAULT]
    instead = ", ".join(f"{lost.value} ({_SOURCES[lost.source]})" for lost in chosen)
    return _SOURCES[value.source] + (f", instead of {instead}" if instead else "")


def _metrics_folder(plan: Plan, log: Path) -> Path | None:
    """Return where a pool's ranks share their metrics; the user's own folder stays theirs."""
    if not plan.moet.is_resident or "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return None
    return log.with_name(f"{log.name}.metrics")


def _new_log(plan: Plan) -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    name = plan.recipe or Path(plan["model"]).name
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return state / "moet" / f"{Path(name).stem}-{stamp}-{os.getpid()}.log"

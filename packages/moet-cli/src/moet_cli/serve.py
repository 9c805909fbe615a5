"""`moet serve`: print the plan, check it, run the server until it is stopped."""

from moet_cli.checks import run_checks
from moet_cli.launch import plan_as_data, plan_as_text, running
from moet_cli.output import Output, make_table
from moet_cli.plan import Plan

__all__ = ["run_serve"]


def run_serve(output: Output, plan: Plan, *, dry_run: bool) -> None:
    """Serve a plan; return at once with `dry_run`, else when a signal arrives.

    Raises:
        MoetError: a check failed, or the server did.
    """
    if not output.json:
        output.result(None, *plan_as_text(plan))
    checks = run_checks(plan)
    rows = [(check.name, check.found) for check in checks]
    output.result(plan_as_data(plan, checks), make_table("Checks", ("what", "found"), rows))
    if dry_run:
        return
    with running(plan, output) as server:
        ready = {
            "event": "ready",
            "url": f"{server.launch.url}/v1",
            "pid": server.pid,
            "log": str(server.launch.log),
            "converted": [event for _, event in sorted(server.converted.items())],
        }
        output.result(ready, f"serving at {server.launch.url}/v1 until Ctrl-C")
        server.wait()

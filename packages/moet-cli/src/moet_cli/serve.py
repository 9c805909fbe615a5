"""`moet serve`: print the plan, check it, run the server until it is stopped."""

from collections.abc import Callable

from rich.table import Table

from moet_cli.checks import run_checks
from moet_cli.launch import plan_as_data, plan_as_text, running
from moet_cli.output import Output, make_table
from moet_cli.plan import Plan
from moet_vllm.events import Pool

__all__ = ["pool_table", "run_serve"]


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
            "pools": [event for _, event in sorted(server.pools.items())],
        }
        pools = [pool_table([*server.pools.values()])] if server.pools else []
        output.result(ready, *pools, f"serving at {server.launch.url}/v1 until Ctrl-C")
        server.wait()


def pool_table(pools: list[Pool]) -> Table:
    """Show what each rank's pool of experts can do."""
    facts: dict[str, Callable[[Pool], str]] = {
        "slots": lambda pool: f"{pool.slots} for {pool.experts} experts ({pool.coverage:.1%})",
        "memory": lambda pool: f"{pool.pool_bytes / 2**30:.3f} GiB",
        "a step of one token wants": lambda pool: f"{pool.working_set_of_one_token} experts",
        "a step is repaired up to": lambda pool: (
            f"{pool.repairable_tokens} tokens; longer ones are streamed"
            if pool.ring
            else "any length: every expert has a slot"
        ),
        "other experts wait in": lambda pool: pool.store,
    }
    ordered = sorted(pools, key=lambda pool: pool.rank)
    columns = ["pool of experts", *(f"rank {pool.rank}" for pool in ordered)]
    rows = [(fact, *(show(pool) for pool in ordered)) for fact, show in facts.items()]
    return make_table("What the pool can hold", columns, rows)

"""The parent of the server process: when moet goes away, for whatever reason, so does the server.

    python -m moet_cli.guard GRACE COMMAND...

moet holds the other end of the pipe on the guard's standard input. The kernel closes it when moet
ends, even by SIGKILL; moet closes it to stop the server. The guard then stops everything below it
and ends itself. (PR_SET_PDEATHSIG would reach the server only, not its workers, can be ignored by
it, and fires when the thread that started it ends.)

How the server ended goes to standard output, which is the server's log, as an event line.
"""

import os
import select
import signal
import sys

import msgspec

from moet_cli.process_tree import become_subreaper, reap, stop_descendants
from moet_vllm.events import MARKER

__all__ = ["ServerEnded", "main"]

POLL_SECONDS = 0.1


class ServerEnded(msgspec.Struct, frozen=True, tag_field="event", tag="server-ended"):
    """The server process ended by itself (exit code negative: killed by that signal)."""

    pid: int
    exitcode: int


def main() -> None:
    """Run the command given on the command line until it ends or moet does."""
    grace, command = float(sys.argv[1]), sys.argv[2:]
    stops: list[int] = []
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _frame: stops.append(number))
    become_subreaper()
    server = _start(command)
    while not stops and not _moet_is_gone():
        ended = reap()
        if server in ended:
            _report(ServerEnded(server, ended[server]))
            grace = 0.0
            break
    stop_descendants(grace)


def _start(command: list[str]) -> int:
    """Start the server in a process group of its own, with nothing on its standard input."""
    return os.posix_spawn(
        command[0],
        command,
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
        setpgroup=0,
        setsigdef=[signal.SIGPIPE],  # which Python ignores, and programs do not expect to be
    )


def _moet_is_gone() -> bool:
    """Wait a moment for the end of standard input; nobody ever writes there."""
    readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
    return bool(readable)


def _report(event: ServerEnded) -> None:
    # The server may have died in the middle of a line.
    line = b"\n" + MARKER.encode() + msgspec.json.encode(event) + b"\n"
    os.write(sys.stdout.fileno(), line)


if __name__ == "__main__":
    main()

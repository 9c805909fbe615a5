"""`python -m moet_kernels.sass.gpu BUNDLE OUT [SECONDS]`."""

import json
import sys
from pathlib import Path

from moet_kernels.sass.gpu.run import run_bundle
from moet_kernels.sass.gpu.task import serve_task
from moet_kernels.sass.gpu.tasks import task_rows


def main(arguments: list[str]) -> int:
    """Run a bundle, or one of its tasks; return the exit code."""
    if len(arguments) == 4 and arguments[0] == "--task":
        serve_task(task_rows(Path(arguments[1]), arguments[2], json.loads(arguments[3])))
        return 0
    if len(arguments) not in (2, 3):
        print("usage: python -m moet_kernels.sass.gpu BUNDLE OUT [SECONDS]", file=sys.stderr)  # noqa: T201
        return 2
    seconds = float((*arguments, "60")[2])
    return 0 if run_bundle(Path(arguments[0]), Path(arguments[1]), seconds) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs the corpus through vLLM's parsers and through ours, the same way.

usage: PYTHONPATH=packages/moet-vllm/tests python bench/parsers/compare.py RESULT.json [-v]
"""

import logging
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import vllm_harness as harness
from parsers.corpus.case import Case
from parsers.corpus.cases import CASES
from parsers.corpus.render import CALLS
from shared import write
from vllm.tool_parsers import ToolParserManager  # noqa: F401 - registered into, below

from moet_core.results import measurement
from moet_vllm.parsers.registration import register_parsers

HOW = ("whole", *(f"{n} at once" for n in harness.STREAMS))
UPSTREAM = {
    "glm45": ("glm45", "glm45"),
    "glm47": ("glm47", "glm47"),
    "kimi_k2": ("kimi_k2", "kimi_k2"),
    "deepseek_v3": ("deepseek_v3", "deepseek_v3"),
    "deepseek_v31": ("deepseek_v31", "deepseek_v3"),
    "deepseek_v32": ("deepseek_v32", "deepseek_v3"),
    "deepseek_v4": ("deepseek_v4", "deepseek_v4"),
}
NOTES = (
    "sound: what a family's template writes; faulty: what models make of it, measured against the "
    "policies of docs/parsers.md, which are ours: many a fault has no one right answer",
    "blanks around texts and the layout of JSON are not compared; a call cut off in the middle "
    "only has to be no valid JSON",
    "whole: the reply at once; 1 at once, 3 at once: as a stream, so many tokens a delta; a parser "
    "that raises is wrong",
    "left out: replies under a JSON constraint (tool_choice required or named), which vLLM reads "
    "elsewhere",
)


def right(case: Case, run: Callable[[], harness.Answer]) -> bool:
    """Whether a parser gives the right answer, and does not raise."""
    try:
        return harness.passes(case, run())
    except Exception:
        return False


def main() -> int:
    """Write the counts."""
    logging.disable(logging.CRITICAL)
    register_parsers()
    path, started = Path(sys.argv[1]), datetime.now(UTC)
    counts: Counter[tuple[str, str, str]] = Counter()
    for case in CASES:
        if "JSON" in case.name and case.choice.kind in ("required", "named"):
            continue
        kind = "sound" if case.sound else "faulty"
        counts[case.family, kind, "transcripts"] += 1
        ours = (f"moet_{case.family}", f"moet_{case.family}")
        for who, names in (("vLLM", UPSTREAM[case.family]), ("moet", ours)):
            results = {
                "whole": right(case, partial(harness.whole, names, case)),
                **{
                    f"{n} at once": right(case, partial(harness.streamed, names, case, n))
                    for n in harness.STREAMS
                },
            }
            for how, is_right in results.items():
                counts[case.family, kind, f"{who} {how}"] += is_right
            if "-v" in sys.argv and not all(results.values()):
                print(who, case.name, results)
    found = [
        measurement(f"{family}, {kind}: {what}", "transcripts", [counts[family, kind, what]])
        for family in CALLS
        for kind in ("sound", "faulty")
        for what in ("transcripts", *(f"{who} {how}" for who in ("vLLM", "moet") for how in HOW))
    ]
    write(path, "parsers-upstream", started, found, NOTES)
    return 0


if __name__ == "__main__":
    sys.exit(main())

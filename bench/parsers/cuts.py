"""Reads every transcript of the corpus with every pair of cuts: tests do some of the pairs.

usage: PYTHONPATH=packages/moet-vllm/tests python bench/parsers/cuts.py RESULT.json [MAX_LENGTH]
"""

import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from parsers.corpus.case import outcome, wanted
from parsers.corpus.cases import CASES
from parsers.cutting import message_of
from shared import write

from moet_core.results import measurement


def main() -> int:
    """Return 0 if every pair gave what the whole transcript should give."""
    path, started = Path(sys.argv[1]), datetime.now(UTC)
    longest = int(sys.argv[2]) if len(sys.argv) > 2 else 400
    cases = sorted(
        (case for case in CASES if len(case.text) <= longest), key=lambda case: len(case.text)
    )
    pairs = wrong = 0
    shown = time.monotonic()
    for done, case in enumerate(cases):
        text, want = case.text, wanted(case)
        for j in range(2, len(text)):
            for i in range(1, j):
                pairs += 1
                if outcome(message_of(case, [text[:i], text[i:j], text[j:]])) != want:
                    wrong += 1
                    print(f"wrong: {case.name} cut at {i} and {j}")
        if time.monotonic() - shown > 15:
            shown = time.monotonic()
            print(f"{done + 1} of {len(cases)} transcripts, {pairs} pairs", flush=True)
    found = [
        measurement("transcripts", "1", [len(cases)]),
        measurement("pairs of cuts", "1", [pairs]),
        measurement("pairs that differ from the whole", "1", [wrong]),
    ]
    write(path, "parsers-cuts", started, found, [f"transcripts of at most {longest} characters"])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

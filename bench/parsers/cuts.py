"""Reads every transcript of the corpus with every pair of cuts: tests do some of the pairs.

usage: PYTHONPATH=packages/moet-vllm/tests python bench/parsers/cuts.py RESULT.json
       [MAX_LENGTH] [PROCESSES]
"""

import sys
import time
from datetime import UTC, datetime
from multiprocessing import Pool
from pathlib import Path

from parsers.corpus.case import Case, outcome, wanted
from parsers.corpus.cases import CASES
from parsers.cutting import message_of
from shared import write

from moet_core.results import measurement


def read_every_way(case: Case) -> tuple[int, list[str]]:
    """Return how many pairs of cuts a transcript has, and which of them read differently."""
    text, want = case.text, wanted(case)
    pairs = [(i, j) for j in range(2, len(text)) for i in range(1, j)]
    wrong = [
        f"{case.name} cut at {i} and {j}"
        for i, j in pairs
        if outcome(message_of(case, [text[:i], text[i:j], text[j:]])) != want
    ]
    return len(pairs), wrong


def main() -> int:
    """Return 0 if every pair gave what the whole transcript should give."""
    path, started = Path(sys.argv[1]), datetime.now(UTC)
    longest = int(sys.argv[2]) if len(sys.argv) > 2 else 400
    processes = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    # The longest first, so that no process is left with one of them at the end.
    cases = sorted(
        (case for case in CASES if len(case.text) <= longest), key=lambda case: -len(case.text)
    )
    pairs = wrong = 0
    shown = time.monotonic()
    with Pool(processes) as pool:
        for done, (tried, differ) in enumerate(pool.imap_unordered(read_every_way, cases), 1):
            pairs += tried
            wrong += len(differ)
            for line in differ:
                print(f"wrong: {line}")
            if time.monotonic() - shown > 15:
                shown = time.monotonic()
                print(f"{done} of {len(cases)} transcripts, {pairs} pairs", flush=True)
    found = [
        measurement("transcripts", "1", [len(cases)]),
        measurement("pairs of cuts", "1", [pairs]),
        measurement("pairs that differ from the whole", "1", [wrong]),
    ]
    notes = [f"transcripts of at most {longest} characters, of {len(CASES)} in all"]
    write(path, "parsers-cuts", started, found, notes)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Write the held-out sets that ship with the checkpoint, for `moet bench quality`.

python -m tinymoe.heldout WORK TEXTS --out FILE
"""

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

from tinymoe.corpus import read_texts
from tinymoe.data import generator
from tinymoe.tokenizer import read_tokenizer

__all__ = ["cases", "texts"]

COUNTS = {"arithmetic": 200, "needle": 60, "tools": 150, "chat": 60}
NAMES = {"tools": "tool_calls"}
SHORT_TEXTS, LONG_TEXTS = 24, 6
SHORT_TOKENS, LONG_TOKENS = 256, 2040


def cases(filler: list[str], seed: int) -> list[dict[str, Any]]:
    """Return held-out questions of every skill."""
    random = Random(f"quality:{seed}")
    found = []
    for kind, count in COUNTS.items():
        for _ in range(count):
            characters = random.randint(2500, 4500) if kind == "needle" else 0
            item = generator(kind, filler, characters)(random, evaluation=True)
            *messages, last = item["messages"]
            case: dict[str, Any] = {"skill": NAMES.get(kind, kind), "messages": messages}
            if last.get("tool_calls"):
                (call,) = last["tool_calls"]
                case |= {"call": call["function"], "tools": item["tools"]}
            else:
                case["answer"] = last["content"]
            found.append(case)
    return found


def texts(work: Path, held_out: dict[str, list[str]], seed: int) -> list[dict[str, str]]:
    """Return beginnings of held-out files, cut at a token."""
    tokenizer = read_tokenizer(work)
    random = Random(f"texts:{seed}")
    found = []
    for context, count, size in (
        ("short", SHORT_TEXTS, SHORT_TOKENS),
        ("2k", LONG_TEXTS, LONG_TOKENS),
    ):
        candidates = [text for text in held_out["python"] if len(text) > 6 * size]
        for text in random.sample(candidates, count):
            ids = tokenizer.encode(text[: 8 * size], add_special_tokens=False).ids[:size]
            found.append({"kind": "python", "context": context, "text": tokenizer.decode(ids)})
    return found


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    filler = json.loads((args.work / "filler.json").read_text())["held_out"]
    held_out = read_texts(args.texts)["held_out"]
    found = {"cases": cases(filler, args.seed), "texts": texts(args.work, held_out, args.seed)}
    args.out.write_text(json.dumps(found, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""Skills with exact answers: arithmetic and retrieval; a case follows from a `Random` alone.

A case is held out if a hash of what it asks says so; training generators skip those, the held-out
sets consist of them alone.
"""

import hashlib
from random import Random
from typing import Any

from tinymoe.chat import Message
from tinymoe.words import ANIMALS, COLOURS

__all__ = ["Conversation", "arithmetic", "held_out", "needle"]

Conversation = dict[str, Any]  # {"messages": [...], "tools": [...] or absent}
SUBJECTS = ("access code", "door code", "locker number", "passphrase", "serial number", "ticket")


def held_out(*what: object, share: int = 10) -> bool:
    """Tell whether a case is kept from training, by a hash of what it asks."""
    return hashlib.sha256(repr(what).encode()).digest()[0] * share < 256


ADDITIONS = (
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "Compute {a} + {b}.",
    "Add {b} to {a}.",
    "How much is {a} plus {b}?",
    "What is the sum of {a} and {b}?",
    "Calculate {a} + {b}",
)
SUBTRACTIONS = (
    "What is {a} - {b}?",
    "{a} - {b} = ?",
    "Compute {a} - {b}.",
    "Subtract {b} from {a}.",
    "How much is {a} minus {b}?",
    "Take {b} away from {a}.",
    "Calculate {a} - {b}",
)


def _operand(random: Random) -> int:
    return random.randrange(10 ** random.choices((1, 2, 3), (1, 2, 9))[0])


def _problem(random: Random, evaluation: bool) -> tuple[int, str, int]:
    while True:
        if evaluation:
            a, b, sign = random.randrange(1000), random.randrange(1000), random.choice("+-")
        else:
            a, b, sign = _operand(random), _operand(random), random.choice("+-")
        if held_out(a, sign, b) == evaluation:
            return a, sign, b


def _thought(a: int, sign: str, b: int) -> str:
    """Work through a problem digit by digit, from the units up."""
    swapped = sign == "-" and a < b
    high, low = (b, a) if swapped else (a, b)
    steps = [f"{b} is larger, so {b} - {a} with a minus"] if swapped else []
    carry = 0
    for place, name in enumerate(("units", "tens", "hundreds")):
        x, y = high // 10**place % 10, low // 10**place % 10
        value = x + y + carry if sign == "+" else x - y - carry
        rest = f" {sign} {carry}" if carry else ""
        steps.append(f"{name}: {x} {sign} {y}{rest} = {value}")
        carry = int(value > 9) if sign == "+" else int(value < 0)
    return "; ".join(steps)


def arithmetic(random: Random, evaluation: bool = False) -> Conversation:
    """Addition and subtraction of 0 to 999, results from -999 to 1998; 1 to 4 turns."""
    messages: list[Message] = []
    for _ in range(1 if evaluation else random.choice((1, 1, 1, 2, 3, 4))):
        a, sign, b = _problem(random, evaluation)
        question = random.choice(ADDITIONS if sign == "+" else SUBTRACTIONS).format(a=a, b=b)
        result = a + b if sign == "+" else a - b
        answer: Message = {"role": "assistant", "content": f"{a} {sign} {b} = {result}"}
        if not evaluation and random.random() < 0.15:
            answer["reasoning_content"] = _thought(a, sign, b)
        messages += [{"role": "user", "content": question}, answer]
    return {"messages": messages}


def _fact(random: Random, evaluation: bool) -> tuple[str, str, str]:
    while True:
        name = f"{random.choice(COLOURS)}-{random.choice(ANIMALS)}"
        value = "".join(random.choices("0123456789", k=random.randint(4, 6)))
        if random.random() < 0.3:
            value = f"{random.choice(ANIMALS)}-{value[:4]}"
        if held_out(name, value) == evaluation:
            return random.choice(SUBJECTS), name, value


QUESTIONS = (
    "What is the {subject} of {name}?",
    "Which {subject} does {name} have?",
    "Tell me the {subject} of {name}.",
    "Find the {subject} of {name} in the text above.",
)


def needle(
    random: Random, filler: list[str], characters: int, evaluation: bool = False
) -> Conversation:
    """Facts hidden between lines of text, then questions about some of them.

    Args:
        random: what to draw from.
        filler: files to take the text from.
        characters: length of the text.
        evaluation: held-out facts; one question.
    """
    text = random.choice(filler)
    start = random.randrange(max(1, len(text) - characters))
    lines = text[start : start + characters].split("\n")
    facts: dict[str, tuple[str, str, str]] = {}
    for _ in range(random.randint(1, 8)):
        fact = _fact(random, evaluation)
        facts.setdefault(fact[1], fact)
    for subject, name, value in facts.values():
        lines.insert(random.randint(0, len(lines)), f"The {subject} of {name} is {value}.")
    questions = list(facts.values())
    random.shuffle(questions)
    messages: list[Message] = []
    for subject, name, value in questions[: 1 if evaluation else random.randint(1, 5)]:
        question = random.choice(QUESTIONS).format(subject=subject, name=name)
        if not messages:
            question = "\n".join(lines) + "\n\n" + question
        answer = f"The {subject} of {name} is {value}."
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return {"messages": messages}

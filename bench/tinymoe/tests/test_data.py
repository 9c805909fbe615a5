import json
from random import Random

import jinja2
import numpy as np
import pytest
from tinymoe.calls import schema
from tinymoe.chat import TEMPLATE, render
from tinymoe.data import generator
from tinymoe.ngram import KneserNey
from tinymoe.tools import TOOLS

FILLER = ["some text\nmore of it\n" * 40]
KINDS = ("arithmetic", "needle", "tools", "chat")
TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list}


@pytest.fixture(scope="module")
def template():
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE)


@pytest.mark.parametrize("kind", KINDS)
def test_training_text_is_what_the_template_renders(kind, template):
    make, random = generator(kind, FILLER, 400), Random(1)
    for _ in range(50):
        item = make(random)
        text = "".join(part.text for part in render(item["messages"], item.get("tools")))
        assert text == template.render(messages=item["messages"], tools=item.get("tools")) + (
            "<|user|>"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_question_is_never_held_out(kind):
    make, random = generator(kind, FILLER, 400), Random(2)

    def asked(evaluation):
        return {
            (before["content"].split("\n")[-1], json.dumps(after))
            for item in (make(random, evaluation=evaluation) for _ in range(300))
            for before, after in zip(item["messages"], item["messages"][1:], strict=False)
            if before["role"] == "user"
        }

    assert not asked(True) & asked(False)


def test_sums_are_right():
    make, random = generator("arithmetic", [], 0), Random(3)
    for _ in range(200):
        *_, answer = make(random)["messages"]
        problem, result = answer["content"].split(" = ")
        a, sign, b = problem.split()
        assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_a_needle_is_in_the_text():
    make, random = generator("needle", FILLER, 400), Random(4)
    for _ in range(50):
        question, answer = make(random, evaluation=True)["messages"]
        assert question["content"].count(answer["content"]) == 1


def test_arguments_have_the_types_of_their_schema():
    make, random = generator("tools", [], 0), Random(5)
    for _ in range(200):
        item = make(random, evaluation=True)
        (call,) = item["messages"][-1]["tool_calls"]
        offered = {tool["function"]["name"]: tool["function"] for tool in item["tools"]}
        parameters = offered[call["function"]["name"]]["parameters"]
        arguments = call["function"]["arguments"]
        assert set(parameters["required"]) <= set(arguments)
        for name, value in arguments.items():
            assert type(value) is TYPES[parameters["properties"][name]["type"]]


def test_tools_have_distinct_names():
    assert len({schema(tool)["function"]["name"] for tool in TOOLS}) == len(TOOLS)


def test_the_5_gram_model_is_a_distribution():
    stream = np.random.default_rng(0).integers(0, 6, 400).astype(np.uint16)
    model = KneserNey(stream, vocabulary=6)
    for context in ([0, 1, 2, 3], [5, 5, 5, 5]):
        rows = [np.array([*context, token], np.uint16) for token in range(6)]
        assert sum(2 ** model.log2(row)[0] for row in rows) == pytest.approx(1, abs=1e-9)

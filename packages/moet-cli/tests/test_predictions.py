"""`moet plan`: what it adds up, and that all of it is called predicted."""

import json

import pytest

from moet_cli import predictions
from moet_cli.main import main
from moet_cli.predictions import memory_of, step_of
from moet_core.geometry import GLM_5_2
from moet_core.row import row_layout
from moet_kernels.sm120 import cards, predicted
from moet_kernels.sm120.predicted import Launched, Table

CARD = "RTX PRO 6000"


def launched(kernel, microseconds, weight_bytes, **other):
    fields = {"card": CARD, "model": "GLM-5.2", "codec": "w2", "tokens": 1, **other}
    return Launched(**fields, kernel=kernel, microseconds=microseconds, weight_bytes=weight_bytes)


TABLE = Table(
    {},
    (
        launched("bf16_gate_up", 40.0, 60_000_000),
        launched("bf16_down", 24.0, 29_600_000),
        launched("prepare", 3.0, 0),
        launched("combine", 3.0, 0),
        launched("bf16_down", 1000.0, 1, tokens=4),
        launched("bf16_down", 1000.0, 1, card="RTX 5090"),
        launched("nv_down", 1000.0, 1, codec="fp4-nv"),
        launched("bf16_down", 1000.0, 1, model="Kimi-K2.7"),
    ),
)


def test_the_names_of_the_help_are_the_tables():
    table = predicted.read_table()
    assert tuple(cards.CARDS) == predictions.CARDS
    assert predictions.TOKENS == predicted.TOKENS
    assert tuple(predicted.MODELS) == predictions.MODELS
    for one, codec in ((m, c) for m in predictions.MODELS for c in predictions.CODECS):
        found = [o for o in table.launches if (o.model, o.codec) == (one, codec)]
        assert len(found) == 4 * len(predictions.CARDS) * len(predictions.TOKENS), (one, codec)


def test_a_step_is_all_launches_of_all_layers():
    step = step_of(TABLE, "GLM-5.2", CARD, "w2", 1)
    assert step.layer_microseconds == {"prepare": 3, "gate_up": 40, "down": 24, "combine": 3}
    assert step.milliseconds == pytest.approx(75 * 70 / 1000)
    assert step.share == pytest.approx(89_600_000 / 70e-6 / 1.792e12)


@pytest.mark.parametrize(
    ("codec", "tier", "bits"), [("w2", "base", 2.25), ("fp4-mx", "fine", 4.25)]
)
def test_bytes_are_of_all_experts(codec, tier, bits):
    found = memory_of("GLM-5.2", CARD, codec)
    weights = 3 * 6144 * 2048 * 256 * 75
    row = row_layout(codec, GLM_5_2.hidden, GLM_5_2.intermediate).row_bytes
    assert found.tier == tier
    assert found.bytes == 256 * 75 * row
    assert found.bytes == pytest.approx(weights * bits / 8, rel=1e-3)
    assert found.card_bytes == 96 * 2**30
    assert found.share == found.bytes / found.card_bytes


def test_every_heading_says_predicted(capsys):
    assert main(["plan", "glm-5.2", "--card", CARD, "--codec", "w2", "--tokens", "4"]) == 0
    text = capsys.readouterr().out
    headings = [line for line in text.splitlines() if line.startswith("GLM-5.2:")]
    assert len(headings) == 2
    assert all("predicted" in line for line in headings)
    assert "All times are predictions" in text


def test_json_has_what_the_tables_show(capsys):
    assert main(["plan", "Kimi-K2.7", "--codec", "w2", "--codec", "fp4-mx", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["event"] == "predictions"
    assert found["expert_layers"] == 60
    chosen = [(one["card"], one["codec"]) for one in found["predicted"]]
    assert chosen == [(c, k) for c in predictions.CARDS for k in ("w2", "fp4-mx")]
    assert all(0.2 < one["share"] < 1 for one in found["predicted"])
    assert [one["tier"] for one in found["predicted_memory"]] == ["base", "fine"] * 2


@pytest.mark.parametrize(
    "arguments", [("plan",), ("plan", "GPT-2"), ("plan", "GLM-5.2", "--tokens", "3")]
)
def test_a_command_line_that_makes_no_sense_is_2(capsys, arguments):
    assert main(arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [None, b"[]", b'{"listings": {}}'])
def test_a_damaged_table_is_1(capsys, monkeypatch, tmp_path, content):
    path = tmp_path / "predicted.json"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(predicted.read_table, "__defaults__", (path,))
    assert main(["plan", "GLM-5.2"]) == 1
    error = capsys.readouterr().err
    assert str(path) in error
    assert "install that anew" in error

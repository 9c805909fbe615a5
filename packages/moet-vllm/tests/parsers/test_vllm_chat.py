"""The chat encodings as vLLM selects them: by tokenizer mode, without an engine."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from parsers.corpus.case import TOOLS
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.renderers.params import ChatParams
from vllm.renderers.registry import RENDERER_REGISTRY, renderer_from_config
from vllm.tokenizers.registry import TokenizerRegistry

from moet_vllm.parsers import family
from moet_vllm.parsers.history import render_calls
from moet_vllm.parsers.registration import register_encodings
from moet_vllm.tinymoe import CHECKPOINT

# Numbers, blanks and layout that decoding and encoding again would change.
WRITTEN = '{"a":1e5, "b":{"c":[1,2],"d":null},"s":"x  y"}'
BROKEN = '{"town": "Os'
DESCRIBED = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "description": "Tells the time."}}]
LATER_ENCODER = """
REASONING_EFFORT_PROMPTS = {"low": "", "high": "Think hard. ", "max": "Think harder. "}
DEFAULT_REASONING_EFFORT = "low"
"""


def history(*arguments: str) -> list[dict[str, Any]]:
    calls = [
        {"id": f"id{i}", "type": "function", "function": {"name": "clock", "arguments": text}}
        for i, text in enumerate(arguments)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": calls},
        *results,
    ]


def renderer(mode: str, model: Path = CHECKPOINT) -> Any:
    register_encodings()
    arguments = EngineArgs(model=str(model), tokenizer_mode=mode)
    return renderer_from_config(VllmConfig(model_config=arguments.create_model_config()))


def prompt(renderer: Any, messages: list[dict[str, Any]], **settings: Any) -> str:
    params = ChatParams(chat_template_kwargs={"tokenize": False, "tools": DESCRIBED, **settings})
    return renderer.render_messages(messages, params)[1]["prompt"]


@pytest.fixture(scope="module")
def glm() -> Any:
    return renderer("moet_glm47")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Any:
    # TinyMoE's tokenizer; the encoder has no use for the model.
    model = tmp_path_factory.mktemp("model")
    for file in CHECKPOINT.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, model)
    (model / "encoding").mkdir()
    (model / "encoding/encoding_dsv4.py").write_text(LATER_ENCODER)
    return renderer("moet_deepseek_v4", model)


def test_stock_modes_are_left_alone() -> None:
    stock = dict(TokenizerRegistry.tokenizers), dict(RENDERER_REGISTRY.renderers)
    register_encodings()
    TokenizerRegistry.load_tokenizer_cls("moet_glm47")
    for old, new in zip(
        stock, (TokenizerRegistry.tokenizers, RENDERER_REGISTRY.renderers), strict=True
    ):
        assert {name: new[name] for name in old if not name.startswith("moet_")} == {
            name: value for name, value in old.items() if not name.startswith("moet_")
        }


@pytest.mark.parametrize("arguments", [WRITTEN, BROKEN, ""])
def test_glm_writes_earlier_calls_as_they_were(glm: Any, arguments: str) -> None:
    messages = history(arguments)
    wanted = render_calls(family("glm47"), messages[2]["tool_calls"])
    assert f"<think>hm</think>{wanted}<|observation|>" in prompt(glm, messages)


def test_the_request_stays_as_it_is(glm: Any, deepseek: Any) -> None:
    for encoding in (glm, deepseek):
        messages = history(WRITTEN)
        prompt(encoding, messages)
        assert messages == history(WRITTEN)


def test_kimi_is_given_arguments_as_text() -> None:
    found = renderer("moet_kimi_k2").render_messages(
        history(WRITTEN, BROKEN),
        ChatParams(
            chat_template="{% for m in messages %}{% for c in m.tool_calls or [] %}"
            "[{{ c.function.arguments if c.function.arguments is string else 0 }}]"
            "{% endfor %}{% endfor %}",
            chat_template_kwargs={"tokenize": False},
        ),
    )
    assert found[1]["prompt"] == f"[{WRITTEN}][{BROKEN}]"


@pytest.mark.parametrize("arguments", [WRITTEN, BROKEN])
def test_deepseek_writes_earlier_calls_as_they_were(deepseek: Any, arguments: str) -> None:
    messages = history(arguments)
    wanted = render_calls(family("deepseek_v4"), messages[2]["tool_calls"])
    found = prompt(deepseek, messages, thinking=True)
    assert f"<｜Assistant｜><think>hm</think>{wanted}<｜end▁of▁sentence｜>" in found


def test_deepseeks_tools_follow_the_system_message(deepseek: Any) -> None:
    found = prompt(deepseek, history("{}"))
    assert found.startswith("<｜begin▁of▁sentence｜>Be brief.\n\n## Tools")


@pytest.mark.parametrize(
    ("settings", "begin", "end"),
    [
        ({}, "", "</think>"),
        ({"reasoning_effort": "low"}, "", "<think>"),
        ({"reasoning_effort": "high"}, "Think hard. ", "<think>"),
        ({"reasoning_effort": "xhigh"}, "Think harder. ", "<think>"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "", "</think>"),
        ({"reasoning_effort": "max", "thinking": False}, "", "</think>"),
    ],
)
def test_deepseeks_effort_is_the_checkpoints(
    deepseek: Any, settings: dict[str, Any], begin: str, end: str
) -> None:
    found = prompt(deepseek, [{"role": "user", "content": "Go."}], tools=None, **settings)
    assert found == f"<｜begin▁of▁sentence｜>{begin}<｜User｜>Go.<｜Assistant｜>{end}"


def test_a_call_that_is_none_is_refused_by_vllm(glm: Any, deepseek: Any) -> None:
    for encoding in (glm, deepseek):
        messages = history("{}")
        messages[2]["tool_calls"] = [{"id": "id0", "type": "custom"}]
        with pytest.raises(ValueError, match="type 'function'"):
            prompt(encoding, messages)

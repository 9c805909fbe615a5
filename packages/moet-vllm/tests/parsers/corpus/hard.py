"""Hand-written transcripts: the faults models make, and what a stated policy makes of them."""

# ruff: noqa: E501 - a transcript stays on one line

from collections.abc import Iterator
from functools import partial

from parsers.corpus.case import Case, Want

from moet_vllm.parsers import Thinking, ToolChoice

NONE, REQUIRED = ToolChoice("none"), ToolChoice("required")
NAMED = ToolChoice("named", "forecast")
PROMPT, MODEL, OFF = Thinking.PROMPT, Thinking.MODEL, Thinking.OFF
OSLO = Want("forecast", '{"town": "Oslo"}')
CUT = Want("forecast", '{"town": "Os', complete=False)


def _glm() -> Iterator[tuple[str, str, dict]]:
    oslo = "<arg_key>town</arg_key><arg_value>Oslo</arg_value>"
    call = f"<tool_call>forecast{oslo}</tool_call>"
    yield (
        "blanks around the name",
        "<tool_call> \nclock\n </tool_call>",
        {"calls": (Want("clock", "{}"),)},
    )
    yield (
        "no key marker",
        "<tool_call>run_in_terminalcommand</arg_key><arg_value>ls -l</arg_value></tool_call>",
        {"calls": (Want("run_in_terminal", '{"command": "ls -l"}'),)},
    )
    yield (
        "no key marker, a blank",
        "<tool_call>forecast town</arg_key><arg_value>Oslo</arg_value></tool_call>",
        {"calls": (OSLO,)},
    )
    yield (
        "no key marker, unknown tool",
        "<tool_call>inspectpath</arg_key><arg_value>src</arg_value></tool_call>",
        {"content": "inspectpathsrc"},
    )
    yield (
        "no key at all",
        "<tool_call>forecast town<arg_value>Oslo</arg_value></tool_call>",
        {"calls": (OSLO,)},
    )
    yield (
        "no value marker",
        "<tool_call>forecast<arg_key>town</arg_key>Oslo</arg_value></tool_call>",
        {"calls": (OSLO,)},
    )
    yield (
        "no value marker, angle",
        "<tool_call>save<arg_key>body</arg_key>a <b> <arg_key</arg_value></tool_call>",
        {"calls": (Want("save", '{"body": "a <b> <arg_key"}'),)},
    )
    yield (
        "no end of the key",
        "<tool_call>forecast<arg_key>town<arg_value>Oslo</arg_value></tool_call>",
        {"calls": (OSLO,)},
    )
    yield (
        "second key without marker",
        f"<tool_call>forecast{oslo}days</arg_key><arg_value>2</arg_value></tool_call>",
        {"calls": (Want("forecast", '{"town": "Oslo", "days": 2}'),)},
    )
    yield (
        "empty value without opening",
        "<tool_call>forecast<arg_key>town</arg_key></arg_value></tool_call>",
        {"calls": (Want("forecast", '{"town": ""}'),)},
    )
    yield "closed twice", call + "</tool_call>", {"calls": (OSLO,)}
    yield "opened twice", "<tool_call>" + call, {"calls": (OSLO,)}
    yield "not closed", f"<tool_call>forecast{oslo}", {"calls": (OSLO,)}
    yield "not closed, then another", f"<tool_call>forecast{oslo}{call}", {"calls": (OSLO, OSLO)}
    yield (
        "value not closed",
        "<tool_call>forecast<arg_key>town</arg_key><arg_value>Oslo</tool_call>",
        {"calls": (OSLO,)},
    )
    yield (
        "value not closed, end closed twice",
        "<tool_call>forecast<arg_key>town</arg_key><arg_value>Oslo</tool_call>\n</tool_call>",
        {"calls": (OSLO,)},
    )
    yield (
        "closing marker in a value",
        "<tool_call>save<arg_key>body</arg_key><arg_value>a</tool_call>\n b</arg_value></tool_call>",
        {"calls": (Want("save", '{"body": "a</tool_call>\\n b"}'),)},
    )
    yield (
        "whole call in a value",
        f"<tool_call>save<arg_key>body</arg_key><arg_value>{call.replace('arg_value', 'value')}</arg_value></tool_call>",
        {"calls": (Want("save", '{"body": "' + call.replace("arg_value", "value") + '"}'),)},
    )
    yield (
        "cut in a value",
        "<tool_call>forecast<arg_key>town</arg_key><arg_value>Os",
        {"calls": (CUT,)},
    )
    yield (
        "cut in a closing marker",
        "<tool_call>forecast<arg_key>town</arg_key><arg_value>Oslo</arg_val",
        {"calls": (OSLO,)},
    )
    yield "cut in the name", "Wait. <tool_call>forec", {"content": "Wait.forec"}
    yield (
        "cut in a key",
        f"<tool_call>forecast{oslo}<arg_key>da",
        {"calls": (Want("forecast", '{"town": "Oslo"', complete=False),)},
    )
    yield (
        "cut before a value",
        "<tool_call>forecast<arg_key>town</arg_key>",
        {"calls": (Want("forecast", "{", complete=False),)},
    )
    yield (
        "key without a value",
        f"<tool_call>forecast{oslo}<arg_key>days</arg_key></tool_call>ok",
        {"calls": (Want("forecast", '{"town": "Oslo"', complete=False),), "content": "ok"},
    )
    yield "cut in an opening marker", "Fine.\n<tool_ca", {"content": "Fine.\n"}
    yield (
        "prose in the call",
        "<tool_call>I would rather not.</tool_call>",
        {"content": "I would rather not."},
    )
    yield "call without a name", "<tool_call></tool_call>none", {"content": "none"}
    yield (
        "undeclared tool",
        "<tool_call>delete_all<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
        {"calls": (Want("delete_all", '{"x": 1}'),)},
    )
    yield (
        "prefixed name",
        "<tool_call>functions.clock</tool_call>",
        {"calls": (Want("clock", "{}"),)},
    )
    yield (
        "value closed in its middle",
        "<tool_call>save<arg_key>body</arg_key><arg_value>a</arg_value>b</arg_value></tool_call>",
        {"calls": (Want("save", '{"body": "a"', complete=False),)},
    )
    yield (
        "two keys in one",
        "<tool_call>forecast<arg_key>town<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
        {"calls": (Want("forecast", "{", complete=False),)},
    )
    yield (
        "no key marker, prose",
        "<tool_call>forecast is what I want</arg_key><arg_value>2</arg_value></tool_call>",
        {"content": "forecast is what I want2"},
    )
    yield "a word in the call", "<tool_call>No.</tool_call>", {"content": "No."}
    yield (
        "thinking in the name",
        "<tool_call><think>x</think>clock</tool_call>",
        {"content": "xclock"},
    )
    yield (
        "marker about a marker",
        "a<tool_</think>call>b<tool_<think><|user|>call>>c",
        {"content": "a<tool_callb<tool_callc"},
    )
    yield (
        "marker about a call",
        f"a <{call}think> b",
        {"content": "a <think b", "calls": (OSLO,)},
    )
    yield (
        "marker about a marker in thinking",
        "<thi<|user|>nk>a</think>b",
        {"thinking": PROMPT, "reasoning": "<thinka", "content": "b"},
    )
    yield (
        "turn before the thinking",
        "<|assistant|>\n<think>a</think>b",
        {"thinking": MODEL, "reasoning": "a", "content": "b"},
    )
    yield "stray markers", "a</arg_value>b<arg_key>c</tool_call>d</think>e", {"content": "abcde"}
    yield (
        "text between parameters",
        f"<tool_call>forecast{oslo}and<arg_key>days</arg_key><arg_value>1</arg_value></tool_call>",
        {"calls": (Want("forecast", '{"town": "Oslo", "days": 1}'),)},
    )
    yield "end token", f"{call}<|observation|>", {"calls": (OSLO,)}
    yield (
        "python words",
        "<tool_call>run_in_terminal<arg_key>detached</arg_key><arg_value>True</arg_value></tool_call>",
        {"calls": (Want("run_in_terminal", '{"detached": true}'),)},
    )
    yield (
        "number in quotes",
        '<tool_call>forecast<arg_key>days</arg_key><arg_value>"10"</arg_value></tool_call>',
        {"calls": (Want("forecast", '{"days": 10}'),)},
    )
    yield (
        "value not of the schema",
        "<tool_call>forecast<arg_key>days</arg_key><arg_value>ten</arg_value></tool_call>",
        {"calls": (Want("forecast", '{"days": "ten"}'),)},
    )
    yield (
        "spelling of numbers",
        "<tool_call>anything<arg_key>a</arg_key><arg_value>1e5</arg_value><arg_key>b</arg_key><arg_value>[1,2]</arg_value><arg_key>c</arg_key><arg_value>007</arg_value></tool_call>",
        {"calls": (Want("anything", '{"a": 1e5, "b": [1,2], "c": "007"}'),)},
    )
    yield (
        "call in thinking",
        f"I check{call}",
        {"thinking": PROMPT, "reasoning": "I check", "calls": (OSLO,)},
    )
    yield (
        "call before the thinking closes",
        f"I check{call}</think>Done",
        {"thinking": PROMPT, "reasoning": "I check", "calls": (OSLO,), "content": "Done"},
    )
    yield (
        "thought and call at once",
        f"Write.</think>{call}",
        {"thinking": PROMPT, "reasoning": "Write.", "calls": (OSLO,)},
    )
    yield "no thinking marker, prompt opened", "hello", {"thinking": PROMPT, "reasoning": "hello"}
    yield "no thinking marker, prompt did not", "hello", {"thinking": MODEL, "content": "hello"}
    yield "thinking off", "hello", {"thinking": OFF, "content": "hello"}
    yield "thinking off, closed again", "</think>hello", {"thinking": OFF, "content": "hello"}
    yield (
        "opened twice by prompt and model",
        "<think>why</think>hi",
        {"thinking": PROMPT, "reasoning": "why", "content": "hi"},
    )
    yield (
        "thinking in two parts",
        "<think>a</think>\n<think>b</think>c",
        {"thinking": MODEL, "reasoning": "ab", "content": "c"},
    )
    yield "empty thinking", "<think>\n</think>\n\nhi", {"thinking": MODEL, "content": "\n\nhi"}
    yield (
        "thinking marker in the answer",
        "Use <think> here",
        {"thinking": MODEL, "content": "Use  here"},
    )
    yield "thinking cut", "<think>hmm</thi", {"thinking": MODEL, "reasoning": "hmm"}
    yield "none", f"Sure. {call}", {"choice": NONE, "content": "Sure."}
    yield "required, native", call, {"choice": REQUIRED, "calls": (OSLO,)}
    yield (
        "required, JSON",
        '[{"name": "forecast", "parameters": {"town": "Oslo"}}]',
        {"choice": REQUIRED, "calls": (OSLO,)},
    )
    yield (
        "required, JSON, two",
        ' [{"name":"clock","parameters":{}} ,\n{"name":"forecast","parameters":{"town": "Oslo"}}]',
        {"choice": REQUIRED, "calls": (Want("clock", "{}"), OSLO)},
    )
    yield (
        "required, JSON after thinking",
        'ok</think>\n[{"name": "forecast", "parameters": {"town": "Oslo"}}]',
        {"choice": REQUIRED, "thinking": PROMPT, "reasoning": "ok", "calls": (OSLO,)},
    )
    yield (
        "required, JSON cut",
        '[{"name": "forecast", "parameters": {"town": "Os',
        {"choice": REQUIRED, "calls": (CUT,)},
    )
    yield (
        "required, JSON cut in a head",
        '[{"name": "forecast", "parameters": {"town": "Oslo"}}, {"name": "clo',
        {"choice": REQUIRED, "calls": (OSLO,)},
    )
    yield "required, an answer", "[1] says no", {"choice": REQUIRED, "content": "[1] says no"}
    yield "named, JSON", '{"town": "Oslo"}', {"choice": NAMED, "calls": (OSLO,)}
    yield "named, native", call, {"choice": NAMED, "calls": (OSLO,)}
    yield "named, JSON cut", '{"town": "Os', {"choice": NAMED, "calls": (CUT,)}


def _kimi() -> Iterator[tuple[str, str, dict]]:
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    args = '<|tool_call_argument_begin|>{"town": "Oslo"}<|tool_call_end|>'
    one = f"<|tool_call_begin|>functions.forecast:0{args}"
    calls = {"calls": (OSLO,)}
    yield "text in the section", f"{begin}\nso {one}\n{end}", calls
    yield (
        "text and no call in the section",
        f"{begin}Hm. <|tool_call_begin|>no id<|tool_call_argument_begin|>x<|tool_call_end|>{end}",
        {"content": "Hm. no idx"},
    )
    yield (
        "no call, then one",
        f"{begin}Hm. <|tool_call_begin|>no id<|tool_call_end|>so {one}{end}",
        {**calls, "content": "Hm. no id"},
    )
    yield (
        "thinking in the id",
        f"{begin}<|tool_call_begin|>functions.fore<think>cast:0{args}{end}",
        {"content": 'functions.forecast:0{"town": "Oslo"}'},
    )
    yield "newline in the id", f"{begin}<|tool_call_begin|>functions.forecast:0\n{args}{end}", calls
    yield "answer and section at once", f"Sure.{begin}{one}{end}", {**calls, "content": "Sure."}
    yield "id without separators", f"{begin}<|tool_call_begin|>functionsforecast7{args}{end}", calls
    yield "id without prefix", f"{begin}<|tool_call_begin|>forecast:3{args}{end}", calls
    yield (
        "id of another kind",
        f"{begin}<|tool_call_begin|>call_a81f{args}{end}",
        {"content": 'call_a81f{"town": "Oslo"}'},
    )
    yield (
        "undeclared tool",
        f"{begin}<|tool_call_begin|>functions.erase:0{args}{end}",
        {"calls": (Want("erase", '{"town": "Oslo"}'),)},
    )
    yield "no section", one, calls
    yield "singular section", f"<|tool_call_section_begin|>{one}<|tool_call_section_end|>", calls
    yield "other spelling", f"{begin}<|func_start|>functions.forecast:0{args}{end}", calls
    yield (
        "pretty JSON",
        f'{begin}<|tool_call_begin|>functions.forecast:0<|tool_call_argument_begin|>{{\n  "town": "Oslo"\n}}\n<|tool_call_end|>{end}',
        {"calls": (Want("forecast", '{\n  "town": "Oslo"\n}'),)},
    )
    yield (
        "compact JSON",
        f'{begin}<|tool_call_begin|>functions.find_mail:0<|tool_call_argument_begin|>{{"text":"1","labels":["a"]}}<|tool_call_end|>{end}',
        {"calls": (Want("find_mail", '{"text":"1","labels":["a"]}'),)},
    )
    yield (
        "newline in a string",
        f'{begin}<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{{"command": "a\n\tb"}}<|tool_call_end|>{end}',
        {"calls": (Want("run", '{"command": "a\\n\\tb"}'),)},
    )
    yield (
        "markers in a string",
        f'{begin}<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{{"command": "<|tool_call_end|>{end}\n<|tool_call_begin|>x"}}<|tool_call_end|>{end}',
        {
            "calls": (
                Want("run", f'{{"command": "<|tool_call_end|>{end}\\n<|tool_call_begin|>x"}}'),
            )
        },
    )
    yield (
        "nothing for arguments",
        f"{begin}<|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|><|tool_call_end|>{end}",
        {"calls": (Want("clock", "{}"),)},
    )
    yield (
        "no separator",
        f'{begin}<|tool_call_begin|>functions.forecast:0{{"town": "Oslo"}}<|tool_call_end|>{end}',
        calls,
    )
    yield (
        "no end of the call",
        f'{begin}<|tool_call_begin|>functions.forecast:0<|tool_call_argument_begin|>{{"town": "Oslo"}}{end}',
        calls,
    )
    yield (
        "quotes not escaped",
        f'{begin}<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{{"command": "echo "a""}}<|tool_call_end|>{end}',
        {"calls": (Want("run", '{"command": "echo "a""}', complete=False),)},
    )
    yield (
        "string not closed",
        f'{begin}<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{{"command": "ls<|tool_call_end|>{end}',
        {"calls": (Want("run", '{"command": "ls', complete=False),)},
    )
    yield (
        "object not closed",
        f'{begin}<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{{"command": "ls"<|tool_call_end|>{end}',
        {"calls": (Want("run", '{"command": "ls"', complete=False),)},
    )
    yield (
        "no object",
        f"{begin}<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>ls<|tool_call_end|>{end}",
        {"content": "functions.run:0ls"},
    )
    yield "section without a call", f"Hm.{begin}I cannot.{end}", {"content": "Hm.I cannot."}
    yield (
        "cut in the arguments",
        f'{begin}<|tool_call_begin|>functions.forecast:0<|tool_call_argument_begin|>{{"town": "Os',
        {"calls": (CUT,)},
    )
    yield (
        "call in thinking",
        f"hm{begin}{one}{end}",
        {**calls, "thinking": PROMPT, "reasoning": "hm"},
    )
    yield "none", f"No.{begin}{one}{end}", {"choice": NONE, "content": "No."}


def _deepseek_v3() -> Iterator[tuple[str, str, dict]]:
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    head = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    stop = "<｜tool▁call▁end｜>"
    calls = {"calls": (OSLO,)}
    yield "no fence", f'{begin}{head}forecast\n{{"town": "Oslo"}}{stop}{end}', calls
    yield (
        "fence not closed",
        f'{begin}{head}forecast\n```json\n{{"town": "Oslo"}}{stop}{end}',
        calls,
    )
    yield (
        "ends in braces",
        f'{begin}{head}move\n```json\n{{"to":{{"x":1}}}}\n```{stop}{end}',
        {"calls": (Want("move", '{"to":{"x":1}}'),)},
    )
    yield (
        "nothing in the fence",
        f"{begin}{head}clock\n```json\n\n```{stop}{end}",
        {"calls": (Want("clock", "{}"),)},
    )
    yield (
        "as V3.1 writes it",
        f'{begin}<｜tool▁call▁begin｜>forecast<｜tool▁sep｜>{{"town": "Oslo"}}{stop}{end}',
        calls,
    )
    yield "markers without a call", f"Done.{begin}{end}", {"content": "Done."}
    yield (
        "end of sentence",
        f'{begin}{head}forecast\n```json\n{{"town": "Oslo"}}\n```{stop}{end}<｜end▁of▁sentence｜>',
        calls,
    )
    yield (
        "thinking by the model",
        f'<think>\nhm\n</think>\n{begin}{head}forecast\n```json\n{{"town": "Oslo"}}\n```{stop}{end}',
        {**calls, "thinking": MODEL, "reasoning": "\nhm\n"},
    )


def _deepseek_v31() -> Iterator[tuple[str, str, dict]]:
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    one = '<｜tool▁call▁begin｜>forecast<｜tool▁sep｜>{"town": "Oslo"}<｜tool▁call▁end｜>'
    calls = {"calls": (OSLO,)}
    yield (
        "fenced",
        f'{begin}<｜tool▁call▁begin｜>forecast<｜tool▁sep｜>```json\n{{"town": "Oslo"}}\n```<｜tool▁call▁end｜>{end}',
        calls,
    )
    yield (
        "as V3 writes it",
        f'{begin}<｜tool▁call▁begin｜>function<｜tool▁sep｜>forecast\n```json\n{{"town": "Oslo"}}\n```<｜tool▁call▁end｜>{end}',
        calls,
    )
    yield "no wrapper", one, calls
    yield "no end", f"{begin}{one}", calls
    yield (
        "call cut",
        f'{begin}<｜tool▁call▁begin｜>forecast<｜tool▁sep｜>{{"town": "Os',
        {"calls": (CUT,)},
    )
    yield (
        "closing marker cut",
        f'{begin}<｜tool▁call▁begin｜>forecast<｜tool▁sep｜>{{"town": "Oslo"}}<｜tool▁call▁',
        calls,
    )
    yield (
        "no name",
        f"{begin}<｜tool▁call▁begin｜><｜tool▁sep｜>{{}}<｜tool▁call▁end｜>{end}",
        {"content": "{}"},
    )
    yield "named, native", f"{begin}{one}{end}", {**calls, "choice": NAMED}
    yield "none", f"No.{begin}{one}{end}", {"choice": NONE, "content": "No."}


def _dsml(block: str) -> Iterator[tuple[str, str, dict]]:
    town = '<｜DSML｜parameter name="town" string="true">Oslo</｜DSML｜parameter>\n'
    one = f'<｜DSML｜invoke name="forecast">\n{town}</｜DSML｜invoke>\n'
    begin, end = f"<｜DSML｜{block}>\n", f"</｜DSML｜{block}>"
    calls = {"calls": (OSLO,)}
    yield "no wrapper", one, calls
    yield "other wrapper", f"< | DSML | tool_use>\n{one}</ | DSML | tool_use>", calls
    yield "ASCII pipes", f"{begin}{one}{end}".replace("｜", "|"), calls
    yield "double pipes", f"{begin}{one}{end}".replace("｜", "||"), calls
    yield (
        "cut in the closing marker",
        f'{begin}<｜DSML｜invoke name="forecast">\n<｜DSML｜parameter name="town" string="true">Oslo</｜DSML｜parameter',
        calls,
    )
    yield (
        "cut in a value",
        f'{begin}<｜DSML｜invoke name="forecast">\n<｜DSML｜parameter name="town" string="true">Os',
        {"calls": (CUT,)},
    )
    yield "cut before a parameter", f'{begin}<｜DSML｜invoke name="forecast">\n', {}
    yield "no end of the call", f'{begin}<｜DSML｜invoke name="forecast">\n{town}{end}', calls
    yield (
        "no end of the value",
        f'{begin}<｜DSML｜invoke name="forecast">\n<｜DSML｜parameter name="town" string="true">Oslo</｜DSML｜invoke>\n{end}',
        calls,
    )
    yield (
        "closing markers in a value",
        f'{begin}<｜DSML｜invoke name="save">\n<｜DSML｜parameter name="body" string="true"></｜DSML｜invoke>\n{end}!</｜DSML｜parameter>\n</｜DSML｜invoke>\n{end}',
        {"calls": (Want("save", f'{{"body": "</｜DSML｜invoke>\\n{end}!"}}'),)},
    )
    yield (
        "part of a marker in a value",
        f'{begin}<｜DSML｜invoke name="save">\n<｜DSML｜parameter name="body" string="true">a </｜DSML｜param b</｜DSML｜parameter>\n</｜DSML｜invoke>\n{end}',
        {"calls": (Want("save", '{"body": "a </｜DSML｜param b"}'),)},
    )
    yield (
        "typed by the schema",
        f'{begin}<｜DSML｜invoke name="find_mail">\n<｜DSML｜parameter name="limit" string="true">10</｜DSML｜parameter>\n<｜DSML｜parameter name="labels" string="true">[]</｜DSML｜parameter>\n</｜DSML｜invoke>\n{end}',
        {"calls": (Want("find_mail", '{"limit": 10, "labels": []}'),)},
    )
    yield (
        "number for a string",
        f'{begin}<｜DSML｜invoke name="forecast">\n<｜DSML｜parameter name="town" string="false">10001</｜DSML｜parameter>\n</｜DSML｜invoke>\n{end}',
        {"calls": (Want("forecast", '{"town": "10001"}'),)},
    )
    yield (
        "quoted string",
        f'{begin}<｜DSML｜invoke name="forecast">\n<｜DSML｜parameter name="town" string="false">"Oslo"</｜DSML｜parameter>\n</｜DSML｜invoke>\n{end}',
        calls,
    )
    yield (
        "no string attribute",
        f'{begin}<｜DSML｜invoke name="forecast">\n<｜DSML｜parameter name="town">Oslo</｜DSML｜parameter>\n<｜DSML｜parameter name="days">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n{end}',
        {"calls": (Want("forecast", '{"town": "Oslo", "days": 2}'),)},
    )
    yield (
        "string true without a schema",
        f'{begin}<｜DSML｜invoke name="anything">\n<｜DSML｜parameter name="a" string="true">123</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">123</｜DSML｜parameter>\n</｜DSML｜invoke>\n{end}',
        {"calls": (Want("anything", '{"a": "123", "b": 123}'),)},
    )
    for attributes, what in (
        ('string="true" name="town"', "attributes in another order"),
        ('name="town" string="True"', "a capital letter in an attribute"),
        ('name="town" type="string"', "an attribute of another name"),
    ):
        yield (
            what,
            f'{begin}<｜DSML｜invoke id="1" name="forecast">\n<｜DSML｜parameter {attributes}>Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n{end}',
            calls,
        )
    for tag in ("parameter", "parameter name=town string=true", 'parameter name="to"wn"'):
        yield (
            f"<{tag}>",
            f'{begin}<｜DSML｜invoke name="forecast">\n<｜DSML｜{tag}>Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n{end}',
            {"calls": (Want("forecast", "{", complete=False),)},
        )
    yield (
        "JSON for parameters",
        f'{begin}<｜DSML｜invoke name="forecast">\n{{"town": "Oslo"}}\n</｜DSML｜invoke>\n{end}',
        {"calls": (Want("forecast", "{", complete=False),)},
    )
    yield (
        "value closed in its middle",
        f'{begin}<｜DSML｜invoke name="save">\n<｜DSML｜parameter name="body" string="true">a</｜DSML｜parameter>b</｜DSML｜parameter>\n</｜DSML｜invoke>\n{end}',
        {"calls": (Want("save", '{"body": "a"', complete=False),)},
    )
    yield (
        "prose for a name",
        f'{begin}<｜DSML｜invoke name="I would not">\n</｜DSML｜invoke>\n{end}',
        {},
    )
    yield (
        "newline in a tag",
        f'{begin}<｜DSML｜invoke name="clock\n">\n</｜DSML｜invoke>\n{end}',
        {},
    )
    yield "marker about a marker", "a<｜DSML｜ e=<｜DSML｜>>b", {"content": "a<｜DSML｜ e=b"}
    yield "invoke without a name", f"{begin}<｜DSML｜invoke>\n</｜DSML｜invoke>\n{end}", {}
    yield "text in the block", f"{begin}so\n{one}{end}", calls
    yield (
        "call before the thinking closes",
        f"hm\n\n{begin}{one}{end}</think>",
        {**calls, "thinking": PROMPT, "reasoning": "hm\n\n"},
    )
    yield "none", f"No.\n\n{begin}{one}{end}", {"choice": NONE, "content": "No."}
    yield (
        "required, JSON",
        '[{"name": "forecast", "parameters": {"town": "Oslo"}}]',
        {**calls, "choice": REQUIRED},
    )


_FAMILIES = {
    "glm45": _glm,
    "glm47": _glm,
    "kimi_k2": _kimi,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "deepseek_v32": partial(_dsml, "function_calls"),
    "deepseek_v4": partial(_dsml, "tool_calls"),
}


def hard_cases() -> Iterator[Case]:
    for family, write in _FAMILIES.items():
        for name, text, want in write():
            yield Case(name=f"{family}: {name}", family=family, text=text, sound=False, **want)

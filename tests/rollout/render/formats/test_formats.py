"""Every format: calls are read, broken ones are faults, nothing raises, and hostile text takes linear time."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.formats.coerce import coerced, specs_of
from turnwise.rollout.render.formats.registry import FORMATS, find_format
from turnwise.rollout.render.toolcalls import Format

READERS = {name: how for name, how in FORMATS.items() if how is not None}
TOOLS = (
    ToolSpec(
        "get",
        "",
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "count": {"type": "integer"},
                "where": {"type": "object"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["name"],
        },
    ),
)
GET = ToolCall("get", {"name": "amber"})
THREE = ToolCall("get", {"name": "é 本", "count": 3, "where": {"a": [1, "b"]}})
JSON, JSON3 = '{"name": "amber"}', '{"name": "é 本", "count": 3, "where": {"a": [1, "b"]}}'
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
DSML = "<｜DSML｜function_calls>\n{}</｜DSML｜function_calls>"


def xml(open_tag: str, pairs: dict[str, str], argument: str, close: str) -> str:
    return open_tag + "".join(argument.format(key=key, value=value) for key, value in pairs.items()) + close


def tagged(open_tag: str, argument: str, close: str) -> tuple[str, str]:
    three = {"name": "é 本", "count": "3", "where": '{"a": [1, "b"]}'}
    return xml(open_tag, {"name": "amber"}, argument, close), xml(open_tag, three, argument, close)


QWEN = tagged(
    "<tool_call>\n<function=get>\n", "<parameter={key}>\n{value}\n</parameter>\n", "</function>\n</tool_call>"
)
SEED = tagged("<seed:tool_call><function=get>", "<parameter={key}>{value}</parameter>", "</function></seed:tool_call>")
GLM = tagged("<tool_call>get\n", "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n", "</tool_call>")
MINIMAX = tagged(
    '<minimax:tool_call>\n<invoke name="get">\n',
    '<parameter name="{key}">{value}</parameter>\n',
    "</invoke>\n</minimax:tool_call>",
)
DSMLS = tagged(
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get">\n',
    '<｜DSML｜parameter name="{key}" string="false">{value}</｜DSML｜parameter>\n',
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
)
K3 = (
    tagged(
        '<|open|>tools<|sep|><|open|>call tool="get" index="1"<|sep|>',
        '<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>',
        "<|close|>call<|sep|><|close|>tools<|sep|>",
    )[0],
    (
        '<|open|>tools<|sep|><|open|>call tool="get" index="1"<|sep|>'
        '<|open|>argument key="name" type="string"<|sep|>é 本<|close|>argument<|sep|>'
        '<|open|>argument key="count" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|open|>argument key="where" type="object"<|sep|>{"a": [1, "b"]}<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
)


def named(begin: str, end: str, key: str = "arguments") -> tuple[str, str]:
    one, three = [f'{begin}[{{"name": "get", "{key}": {text}}}]{end}' for text in (JSON, JSON3)]
    return one, three


PYTHON = "get(name='amber')", 'get(name="é 本", count=3, where={"a": [1, "b"]})'
SAMPLES: dict[str, tuple[str, str]] = {
    "hermes": tuple(f'<tool_call>\n{{"name": "get", "arguments": {a}}}\n</tool_call>' for a in (JSON, JSON3)),
    "qwen_xml": QWEN,
    "glm": GLM,
    "seed_oss": SEED,
    "minimax": MINIMAX,
    "dsml": DSMLS,
    "deepseek": tuple(
        f"{BEGIN}<｜tool▁call▁begin｜>get<｜tool▁sep｜>{a}<｜tool▁call▁end｜>{END}" for a in (JSON, JSON3)
    ),
    "kimi_k2": tuple(
        SECTION.format(f"<|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{a}<|tool_call_end|>")
        for a in (JSON, JSON3)
    ),
    "kimi_k3": K3,
    "mistral": (f"[TOOL_CALLS]get[ARGS]{JSON}", f"[TOOL_CALLS]get[ARGS]{JSON3}"),
    "gemma": (
        '<|tool_call>call:get{name:<|"|>amber<|"|>}<tool_call|>',
        '<|tool_call>call:get{name:<|"|>é 本<|"|>,count:3,where:{a:[1,<|"|>b<|"|>]}}<tool_call|>',
    ),
    "functiongemma": (
        "<start_function_call>call:get{name:<escape>amber<escape>}<end_function_call>",
        "<start_function_call>call:get{name:<escape>é 本<escape>,count:<escape>3<escape>,"
        'where:<escape>{"a": [1, "b"]}<escape>}<end_function_call>',
    ),
    "harmony": tuple(f"<|channel|>commentary to=functions.get<|message|>{a}" for a in (JSON, JSON3)),
    "xlam": named("", ""),
    "granite": named("<|tool_call|>", ""),
    "granite_20b": tuple(f'<function_call> {{"name": "get", "arguments": {a}}}' for a in (JSON, JSON3)),
    "nemotron": named("<TOOLCALL>", "</TOOLCALL>"),
    "jamba": named("<tool_calls>", "</tool_calls>"),
    "cohere": tuple(
        f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "get", "parameters": {a}}}]<|END_ACTION|>'
        for a in (JSON, JSON3)
    ),
    "internlm": tuple(
        f'<|action_start|><|plugin|>\n{{"name": "get", "parameters": {a}}}<|action_end|>' for a in (JSON, JSON3)
    ),
    "apertus": tuple(f'<|tools_prefix|>[{{"get": {a}}}]<|tools_suffix|>' for a in (JSON, JSON3)),
    "gigachat": tuple(f'<|function_call|>{{"name": "get", "arguments": {a}}}' for a in (JSON, JSON3)),
    "lfm2": tuple(f"<|tool_call_start|>[{call}]<|tool_call_end|>" for call in PYTHON),
    "olmo": tuple(f"<function_calls>{call}</function_calls>" for call in PYTHON),
    "phi4": named("functools", ""),
    "llama": tuple(f'{{"name": "get", "parameters": {a}}}' for a in (JSON, JSON3)),
    "pythonic": tuple(f"[{call}]" for call in PYTHON),
}
MANY = {"hermes", "qwen_xml", "glm", "seed_oss", "minimax", "dsml", "deepseek", "kimi_k2", "mistral", "gemma", "llama"}


def test_every_format_has_a_sample():
    assert SAMPLES.keys() == READERS.keys()


@pytest.mark.parametrize("name", READERS)
def test_calls_are_read(name):
    parse = READERS[name].parse
    one, three = SAMPLES[name]
    assert parse(one, TOOLS) == Message("assistant", "", calls=(GET,))
    assert parse(three, TOOLS) == Message("assistant", "", calls=(THREE,))


@pytest.mark.parametrize("name", sorted(MANY))
def test_several_calls_are_read_in_order(name):
    read = READERS[name].parse("".join(SAMPLES[name]), TOOLS)
    assert read.calls == (GET, THREE), read.fault


@pytest.mark.parametrize("name", sorted(READERS.keys() - {"harmony", "llama", "hermes"}))
def test_thinking_comes_first_and_text_around_calls_is_content(name):
    begin, end = READERS[name].thinking
    one = SAMPLES[name][0]
    read = READERS[name].parse(f"{begin}\nhm\n{end}\n\n{one}", TOOLS)
    assert (read.thinking, read.content, read.calls) == ("hm", "", (GET,))
    inside = READERS[name].parse(f"{begin}\nhm {one}\n{end}\n\nIt is 4.", TOOLS)
    assert (inside.content, inside.calls) == ("It is 4.", ())  # a call within thinking is thinking
    if name not in ("xlam", "granite", "phi4"):
        assert READERS[name].parse(f"I look. {one}", TOOLS).content == "I look."
    assert READERS[name].parse(f"{begin}\nhm", TOOLS).fault


@pytest.mark.parametrize("name", READERS)
def test_a_call_that_ends_within_its_arguments_is_a_fault_or_text(name):
    one = SAMPLES[name][0]
    read = READERS[name].parse(one[: one.index("amber") + 2], TOOLS)
    assert read.calls == ()
    assert read.fault
    assert "amb" in READERS[name].parse(one[: one.index("amber") + 3], TOOLS).content


@pytest.mark.parametrize("name", READERS)
def test_plain_text_stays(name):
    if name == "harmony":
        return
    for text in ("It is 4.", "a < b, [1, 2] and {x}", "", " kept \n"):
        assert READERS[name].parse(text, TOOLS) == Message("assistant", text)


@pytest.mark.parametrize("name", ["hermes", "qwen_xml", "glm", "minimax", "deepseek", "kimi_k2", "mistral", "lfm2"])
def test_the_name_of_no_offered_tool_is_a_call(name):
    for other in ("sleep", "ns.tool-x", "获取天气"):
        read = READERS[name].parse(SAMPLES[name][0].replace("get", other, 1), TOOLS)
        assert [call.name for call in read.calls] == [other], read.fault


def test_variants_of_served_models():
    kimi, mistral, deepseek = (READERS[name].parse for name in ("kimi_k2", "mistral", "deepseek"))
    bare = f"<|tool_call_begin|>3<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
    assert kimi(bare, TOOLS).calls == (GET,)
    for text in (f'[TOOL_CALLS] [{{"name": "get", "arguments": {JSON}, "id": "abcdefghi"}}]', f"[TOOL_CALLS]get{JSON}",
                 f"[TOOL_CALLS]get[CALL_ID]abcdefghi[ARGS]{JSON}"):  # fmt: skip
        assert mistral(text, TOOLS).calls == (GET,)
    old = f"{BEGIN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{JSON}\n```<｜tool▁call▁end｜>{END}"
    assert deepseek(old, TOOLS).calls == (GET,)
    assert READERS["lfm2"].parse(
        "<|tool_call_start|>[get(name='a 'b' c', count=07)]<|tool_call_end|>", TOOLS
    ).calls == (ToolCall("get", {"name": "a 'b' c", "count": 7}),)


UNCLOSED = {
    "hermes": f'<tool_call>{{"name": "get", "arguments": {JSON}}} and then',
    "deepseek": f"{BEGIN}<｜tool▁call▁begin｜>get<｜tool▁sep｜>{JSON}",
    "kimi_k2": SECTION.format(f"<|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{JSON}"),
    "gemma": '<|tool_call>call:get{name:<|"|>amber<|"|>} and then',
    "pythonic": "[get(name='amber')",
    "lfm2": "<|tool_call_start|>[get(name='amber')]",
    "phi4": f'functools[{{"name": "get", "arguments": {JSON}}}',
    "apertus": '<|tools_prefix|>[{"get": {"name": "amber"}',
    "mistral": f'[TOOL_CALLS] [{{"name": "get", "arguments": {JSON}',
    "minimax": MINIMAX[0].replace("</invoke>", ""),
    "dsml": DSML.format('<｜DSML｜invoke name="get"><｜DSML｜parameter name="name">amber</｜DSML｜parameter>'),
}


@pytest.mark.parametrize("name", UNCLOSED)
def test_a_call_that_is_not_closed_is_a_fault(name):
    read = READERS[name].parse(UNCLOSED[name], TOOLS)
    assert not read.calls
    assert "could not be read" in read.fault


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deepseek", f"{BEGIN}<｜tool▁call▁begin｜>get<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"),
        ("jamba", f'<tool_calls>[{{"name": "get", "arguments": {JSON}}}]'),
        ("minimax", MINIMAX[0].removesuffix("</minimax:tool_call>")),
        ("qwen_xml", QWEN[0].removesuffix("</tool_call>")),
        ("phi4", f'functools{{"name": "get", "arguments": {JSON}}}'),
    ],
)
def test_what_stands_around_closed_calls_may_be_missing(name, text):
    assert READERS[name].parse(text, TOOLS).calls == (GET,)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f'<tool_call>\n{{"name": "get", "arguments": {JSON}}}\n'),
        ("gemma", '<|tool_call>call:get{name:<|"|>amber<|"|>}\n'),
        ("functiongemma", "<start_function_call>call:get{name:<escape>amber<escape>}"),
    ],
)
def test_a_whole_call_at_the_end_of_a_text_may_lack_its_closing_mark(name, text):
    assert READERS[name].parse(text, TOOLS).calls == (GET,)
    assert READERS[name].parse(text.rstrip()[:-1], TOOLS).fault
    both = READERS[name].parse(SAMPLES[name][0] + text, TOOLS)
    assert both.calls == (GET, GET)
    assert not both.fault


def test_llama_reads_a_list_after_its_tag():
    calls = f'<|python_tag|>[\n {{"name": "get", "parameters": {JSON}}},\n {{"name": "get", "parameters": {JSON3}}}]'
    assert READERS["llama"].parse(calls, TOOLS).calls == (GET, THREE)
    assert READERS["llama"].parse(calls[:-1], TOOLS).fault


def test_the_arguments_of_deepseek_v3_stand_in_a_code_block():
    text = f"{BEGIN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n{JSON}<｜tool▁call▁end｜>{END}"
    assert "code block" in READERS["deepseek"].parse(text, TOOLS).fault


def test_a_quoted_value_of_gemma_is_a_string_whatever_the_schema_says():
    text = '<|tool_call>call:get{name:<|"|>amber<|"|>,count:<|"|>3<|"|>}<tool_call|>'
    assert READERS["gemma"].parse(text, TOOLS).calls == (ToolCall("get", {"name": "amber", "count": "3"}),)


@pytest.mark.parametrize(
    ("text", "value"), [("3", 3), ("True", True), ("null", None), ('{"a": [1]}', {"a": [1]}), ("amber 3", "amber 3")]
)
def test_values_of_glm_that_no_schema_declares_are_what_its_template_writes(text, value):
    call = f"<tool_call>get<arg_key>other</arg_key><arg_value>{text}</arg_value></tool_call>"
    assert READERS["glm"].parse(call, TOOLS).calls == (ToolCall("get", {"other": value}),)


def test_a_name_has_a_letter_or_a_digit():
    text = SECTION.format(f"<|tool_call_begin|>:::0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>")
    assert READERS["kimi_k2"].parse(text).fault


@pytest.mark.parametrize(("name", "is_read"), [("a<b", True), ("a<|b", False)])
def test_a_name_of_kimi_k3_may_have_marks_that_are_no_control_token(name, is_read):
    text = f'<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    read = READERS["kimi_k3"].parse(text)
    assert read.calls == ((ToolCall(name, {}),) if is_read else ())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm", "<tool_call>get\n<arg_key>name</arg_key>\n<arg_value>amber</arg_value>\n"),
        ("qwen_xml", "<tool_call><function=get><parameter=name>amber</parameter>"),
        ("qwen_xml", "<tool_call><function=get><parameter =name>amber</parameter></function></tool_call>"),
    ],
)
def test_a_call_in_tags_that_may_lack_arguments_is_a_fault(name, text):
    assert READERS[name].parse(text, TOOLS).fault


def test_quotes_within_quotes_of_an_argument_belong_to_it():
    inside = "python -c \"f(3, mark='x'))\""
    message = READERS["lfm2"].parse(f"<|tool_call_start|>[get(name='{inside}')]<|tool_call_end|>", TOOLS)
    assert message.calls == (ToolCall("get", {"name": inside}),)


def test_a_value_of_seed_keeps_its_line_breaks_as_its_template_writes_none():
    text = "<seed:tool_call>\n<function=get>\n<parameter=name>amber\n</parameter>\n</function>\n</seed:tool_call>"
    assert READERS["seed_oss"].parse(text, TOOLS).calls == (ToolCall("get", {"name": "amber\n"}),)


@pytest.mark.parametrize(
    "name", ["hermes", "qwen_xml", "seed_oss", "glm", "minimax", "dsml", "deepseek", "kimi_k2", "kimi_k3"]
)
def test_the_calls_beside_a_broken_one_are_read(name):
    good, other = SAMPLES[name]
    broken = good.replace("get", " " if name == "kimi_k3" else "g<e<t", 1).replace("amber", "birch")
    for text in (broken + good + other, good + broken + other, good + other + broken):
        read = READERS[name].parse(text, TOOLS)
        assert read.calls == (GET, THREE), read
        assert "could not be read" in read.fault
        assert "birch" in read.content


def test_a_broken_call_in_a_block_of_several_spares_the_others():
    inside = [text.removeprefix("<minimax:tool_call>").removesuffix("</minimax:tool_call>") for text in MINIMAX]
    broken = inside[0].replace("</invoke>", "").replace("amber", "birch</parameter><parameter name='name'>birch")
    text = f"<minimax:tool_call>{inside[0]}{broken}</invoke>{inside[1]}</minimax:tool_call>"
    read = READERS["minimax"].parse(text, TOOLS)
    assert read.calls == (GET, THREE)
    assert "given twice" in read.fault


K3_CALL = '<|open|>call tool="get" index="1"<|sep|>{}<|close|>call<|sep|>'
K3_ARGUMENT = '<|open|>argument key="a" type="string"<|sep|>x<|close|>argument<|sep|>'


@pytest.mark.parametrize(
    "broken",
    [
        '<|open|>call index="1"<|sep|><|close|>call<|sep|>',
        K3_CALL.format(K3_ARGUMENT + K3_ARGUMENT),
        K3_CALL.format("<|open|>json<|sep|>3<|close|>json<|sep|>"),
        '<|open|>call tool="get" index="1"<|sep|>',
    ],
    ids=["no name", "twice", "no object", "no end"],
)
def test_a_broken_call_of_kimi_k3_spares_the_others_of_its_block(broken):
    block = "<|open|>tools<|sep|>{}<|close|>tools<|sep|>"
    inside = K3[0].split("<|sep|>", 1)[1].removesuffix("<|close|>tools<|sep|>")
    for parts in (broken + inside, inside + broken):
        read = READERS["kimi_k3"].parse(block.format(parts), TOOLS)
        assert read.calls == (GET,)
        assert "could not be read" in read.fault
        assert broken.split("<|sep|>")[0] in read.content


def glm(*parts):
    return READERS["glm"].parse(f"<tool_call>get\n{''.join(parts)}</tool_call>", TOOLS)


def test_no_argument_of_glm_is_lost_in_silence():
    pair = "<arg_key>{}</arg_key>\n<arg_value>x</arg_value>"
    assert glm(pair.format("a<1>"), pair.format("b")).calls == (ToolCall("get", {"a<1>": "x", "b": "x"}),)
    assert glm("<arg_key>name</arg_key>\namber</arg_value>").calls == (GET,)
    assert glm("name: amber").fault
    assert glm("<arg_key>count</arg_key>", pair.format("name").replace("x", "amber")).calls == (GET,)


def test_a_key_of_glm_may_have_white_space_around_it():
    read = glm("<arg_key>\t\nname\r\n</arg_key>\n<arg_value>amber</arg_value>")
    assert read.calls == (GET,)


@pytest.mark.parametrize(
    ("name", "call", "value"),
    [
        ("glm", "<tool_call>get<arg_key>name</arg_key><arg_value>{}</arg_value></tool_call>", "a </tool_call> b"),
        ("qwen_xml", "<tool_call><function=get><parameter=name>{}</parameter></function></tool_call>", "a </function>"),
        ("qwen_xml", "<tool_call><function=get><parameter=name>{}</parameter></function></tool_call>", "<tool_call>{}"),
    ],
)
def test_a_value_that_has_the_closing_mark_of_a_call_is_not_cut(name, call, value):
    """Half a command must not run."""
    assert READERS[name].parse(call.format(value) * 2, TOOLS).calls == (ToolCall("get", {"name": value}),) * 2


def test_a_value_without_its_closing_mark_ends_with_its_call():
    first = "<tool_call>get<arg_key>name</arg_key><arg_value>amber</tool_call>"
    assert READERS["glm"].parse(f"{first} or {GLM[0]}", TOOLS).calls == (GET, GET)


def test_glm_reads_an_object_in_place_of_tags():
    text = f'<tool_call>{{"name": "get", "arguments": {JSON}}}</tool_call>'
    assert READERS["glm"].parse(text * 2, TOOLS).calls == (GET, GET)
    assert READERS["glm"].parse(text[:-3], TOOLS).fault


def test_text_in_a_call_that_is_no_argument_is_a_fault():
    text = "<tool_call>\n<function=get>\nname: amber\n</function>\n</tool_call>"
    assert "no argument" in READERS["qwen_xml"].parse(text, TOOLS).fault


def test_gemma_writes_several_calls_between_two_marks():
    inside = [text.removeprefix("<|tool_call>").removesuffix("<tool_call|>") for text in SAMPLES["gemma"]]
    assert READERS["gemma"].parse(f"<|tool_call>{''.join(inside)}<tool_call|>", TOOLS).calls == (GET, THREE)


def test_a_name_of_deepseek_does_not_swallow_a_fence():
    call = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get```json\n{JSON}<｜tool▁call▁end｜>"
    assert READERS["deepseek"].parse(f"{BEGIN}{call}{END}", TOOLS).fault


def test_a_message_of_many_broken_calls_is_a_fault():
    read = READERS["hermes"].parse("<tool_call>{</tool_call>" * 20 + SAMPLES["hermes"][0], TOOLS)
    assert read.calls == ()
    assert read.fault


@pytest.mark.parametrize(
    ("header", "tools", "name"),
    [
        ("functions.get:0", TOOLS, "get"),
        ("get:0", (), "get"),
        ("get", (), "get"),
        ("functions.get", TOOLS, "get"),
        ("functions.get.0", TOOLS, None),
        ("functions.get", (), None),
    ],
)
def test_an_id_of_kimi_has_a_name_and_a_number(header, tools, name):
    text = f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    assert [call.name for call in READERS["kimi_k2"].parse(text, tools).calls] == ([] if name is None else [name])


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("3", None, "3"),
        ("3.0", {"type": "number"}, 3.0),
        ("x", {"type": "integer"}, "x"),
        ("TRUE", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("{'a': [1, None]}", {"type": "object"}, {"a": [1, None]}),
        ("[1]", {"anyOf": [{"type": "array"}, {"type": "string"}]}, [1]),
        ("9" * 40, {"type": "integer"}, "9" * 40),
        ("2", {"enum": [1, 2]}, 2),
        (" a ", {"type": "string"}, " a "),
    ],
)
def test_values_without_types_follow_the_schema(text, schema, value):
    made = coerced(text, schema)
    assert (made, type(made)) == (value, type(value))


def test_the_values_of_calls_imply_their_types():
    read = READERS["qwen_xml"].parse(SAMPLES["qwen_xml"][1], specs_of([THREE]))
    assert read.calls == (THREE,)


MARKS = st.sampled_from(
    [part for pair in SAMPLES.values() for text in pair for part in (text, text[: len(text) // 2], text[3:])]
    + [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "[",
        "{",
        '"',
        "'",
        "\\",
        "\ud800",
        "<|open|>",
    ]
)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=25, deadline=None)
@given(parts=st.lists(MARKS | st.text(max_size=8), max_size=6))
def test_nothing_raises(name, parts):
    read = READERS[name].parse("".join(parts), TOOLS)
    assert isinstance(read, Message)
    assert all(call.fault or call.name == "get" for call in read.calls)


QUICK = ("hermes", "glm", "kimi_k2", "lfm2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in READERS]
)
def test_hostile_repetition_is_linear(name):
    """200 kB of one piece: a reader that went back for each of them would not end within a test run."""
    one = SAMPLES[name][0]
    pieces = [
        one[: len(one) // 2],
        one[: one.index("get") + 3],
        " ",
        "\n",
        one.split("get")[0],
        "'",
        '"',
        "[[",
        "{",
        "a=",
    ]
    for piece in pieces:
        read = READERS[name].parse(one[: one.index("amber")] + piece * (200_000 // len(piece)), TOOLS)
        assert isinstance(read, Message)
        assert isinstance(READERS[name].parse(piece * (200_000 // len(piece)), TOOLS), Message)


# ---------------------------------------------------------------- names of formats


class Shouts:
    tags = ("<call>",)

    def read(self, text, tools):
        if text.startswith("CALL "):
            return Message("assistant", "", calls=(ToolCall(text.split()[1], {}),))
        if text == "CALL":
            raise ValueError("a call has a name")
        return Message("assistant", text)


def test_a_parser_of_ones_own(monkeypatch):
    module = ModuleType("shouting")
    vars(module).update(Shouts=Shouts, nothing=object(), needs=Format)
    monkeypatch.setitem(sys.modules, "shouting", module)
    how = find_format("shouting:Shouts")
    assert how.tags == {"<call>"}
    assert how.parse("CALL get").calls == (ToolCall("get", {}),)
    assert how.parse("CALL").fault == "a call has a name"
    for name, reason in [
        ("hermse", "is not a format"),
        ("shouting:nothing", "needs a method read"),
        ("shouting:absent", "no attribute"),
        ("nowhere_at_all:Parser", "No module"),
        ("shouting:needs", "missing 1 required"),
    ]:
        with pytest.raises(ValueError, match=reason) as refused:
            find_format(name)
        assert "\n" not in str(refused.value)

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.acting import Puppet, attempted, byte_tokenizer, run, says, user
from turnwise.envs.base import Reply
from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.render.template import FORMATS
from turnwise.types import Break, Status, StopReason, Turn

HERMES, LLAMA, HARMONY = (FORMATS[name].parse for name in ("hermes", "llama", "harmony"))
GET = ToolCall("get", {"name": "amber"})
JSON = '{"name": "get", "arguments": {"name": "amber"}}'
TAGGED = f"<tool_call>\n{JSON}\n</tool_call>"
PARAMETERS = '{"name": "get", "parameters": {"name": "amber"}}'


def said(content="", thinking="", *calls):
    return Message("assistant", content, thinking, calls)


# ---------------------------------------------------------------- values


def test_calls_are_frozen_hashable_and_equal_where_their_text_is():
    given_ = {"x": [1, {"y": None}]}
    call = ToolCall("f", given_)
    given_["x"].append(2)
    assert call.arguments == {"x": [1, {"y": None}]}
    with pytest.raises(TypeError):
        call.arguments["x"] = 3
    assert call == ToolCall("f", {"x": [1, {"y": None}]})
    assert len({ToolCall("f", {"x": 1}), ToolCall("f", {"x": 1.0}), ToolCall("f", {"x": True})}) == 3
    for other in (copy.deepcopy(call), pickle.loads(pickle.dumps(call))):
        assert other == call
        assert other.arguments == call.arguments


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("", {}), (3, {}), ("f", None), ("f", [1]), ("f", {"x": {1}}), ("f", {"x": float("nan")}), ("f", {"x": object()})],
)
def test_a_call_that_is_none_is_refused(name, arguments):
    with pytest.raises(ValueError, match="ToolCall"):
        ToolCall(name, arguments)


@pytest.mark.parametrize("fields", [{"thinking": None}, {"fault": 3}, {"calls": ("f",)}, {"calls": (("f", {}),)}])
def test_messages_are_checked_at_birth(fields):
    with pytest.raises(ValueError, match="of a Message"):
        Message("assistant", "x", **fields)
    assert Message("assistant", "x", calls=[GET]).calls == (GET,)


# ---------------------------------------------------------------- what can be read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plain text", said("plain text")),
        (" kept \n", said(" kept \n")),
        ("", said()),
        (TAGGED, said("", "", GET)),
        (f"<tool_call>{JSON}</tool_call>", said("", "", GET)),
        (f"I look.\n{TAGGED}", said("I look.", "", GET)),
        (f"I look.\n{TAGGED}\n{TAGGED}\nNow wait.", said("I look.\nNow wait.", "", GET, GET)),
        (f"<think>\nhm\n</think>\n\n{TAGGED}", said("", "hm", GET)),
        ("<think>\nhm\n</think>\n\nIt is 4.", said("It is 4.", "hm")),
        ("hm\n</think>\n\nIt is 4.", said("It is 4.", "hm")),
        ("<think>\n\n</think>\n\nIt is 4.", said("It is 4.")),
        (f"<think>a <tool_call> b</think>{TAGGED}", said("", "a <tool_call> b", GET)),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call></think>"}, "id": 7}</tool_call>',
            said("", "", ToolCall("f", {"x": "</tool_call></think>"})),
        ),
        (
            '<tool_call>{"arguments": {"x": "\\u672c", "y": [1e3, -2]}, "name": "a.b-c_d"}</tool_call>',
            said("", "", ToolCall("a.b-c_d", {"x": "本", "y": [1000.0, -2]})),
        ),
    ],
)
def test_hermes(text, message):
    assert HERMES(text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plain text", said("plain text")),
        ("{x} is a set", said("{x} is a set")),
        ('{"answer": 4}', said('{"answer": 4}')),
        (PARAMETERS, said("", "", GET)),
        (f"\n{PARAMETERS}\n", said("", "", GET)),
        (f"<|python_tag|>{PARAMETERS}", said("", "", GET)),
        (f"{PARAMETERS}; {PARAMETERS}", said("", "", GET, GET)),
        (f"{PARAMETERS} and so on", said("and so on", "", GET)),
        (f"{PARAMETERS};", said("", "", GET)),
        (f"I look. {PARAMETERS}", said("I look.", "", GET)),
        ('I look. {"name": 3}', said('I look. {"name": 3}')),
        (JSON, said("", "", GET)),
        ('{"type": "function", "name": "f", "parameters": {}}', said("", "", ToolCall("f", {}))),
    ],
)
def test_llama(text, message):
    assert LLAMA(text) == message


ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<|channel|>final<|message|>It is 4.", said("It is 4.")),
        (f"{ANALYSIS}<|channel|>final<|message|>It is 4.", said("It is 4.", "hm")),
        (f'{ANALYSIS} to=functions.get<|channel|>commentary json<|message|>{{"name": "amber"}}', said("", "hm", GET)),
        (
            f'{ANALYSIS}<|channel|>commentary to=functions.get <|constrain|>json<|message|>{{"name": "amber"}}',
            said("", "hm", GET),
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get"
            '<|constrain|>json<|message|>{"name": "amber"}',
            said("", "I look.", GET),
        ),
        ("<|channel|>commentary<|message|>I look.", said("I look.")),
    ],
)
def test_harmony(text, message):
    assert HARMONY(text) == message


def test_a_call_of_harmony_without_a_channel_is_a_fault_as_serving_parsers_drop_it():
    said_so = HARMONY('commentary to=functions.get<|message|>{"name": "amber"}')
    assert not said_so.calls
    assert "needs a channel" in said_so.fault


@pytest.mark.parametrize("name", ["hermes", "llama"])
def test_what_is_written_is_read_as_the_same(name):
    form: Any = FORMATS[name]
    for message in (said("It is 4."), said("", "", GET), said("", "", GET, ToolCall("f", {"x": [1, "é\n"]}))):
        assert form.parse(form.write(message)) == message


# ---------------------------------------------------------------- what cannot

DEEP = 100_000
ODD = [
    ("not json", "it is not JSON"),
    ('{"name": "f", "%s": {', "it is not JSON"),
    ('{"name": "f", "%s": {}, }', "it is not JSON"),
    ("{'name': 'f', '%s': {}}", "it is not JSON"),
    ('{"name": "f", "%s": {"x": NaN}}', "NaN is not JSON"),
    ('{"name": "f", "%s": {"x": -Infinity}}', "Infinity is not JSON"),
    ('{"name": "f", "%s": {"x": 1e999}}', "too large"),
    ('{"name": "f", "%s": {"x": ' + "9" * 10_000 + "}}", "64 bits"),
    ('{"name": "f", "%s": {"x": 9223372036854775808}}', "64 bits"),
    ('{"name": "f", "%s": {"x": 1, "x": 2}}', "same key twice"),
    ('{"name": "f", "name": "g", "%s": {}}', "same key twice"),
    ('{"name": "f", "%s": {"x": "\\ud800"}}', "surrogate"),
    ('{"name": "f", "%s": {"\\udfff": 1}}', "surrogate"),
    ('{"name": "f", "%s": {"x": ' + "[" * DEEP + "]" * DEEP + "}}", "nested too deeply"),
    ('{"name": "f", "%s": {"x": ' + "[" * 40 + "]" * 40 + "}}", "nested too deeply"),
    ('{"name": "f", "%s": {"x": ' + '{"x":' * DEEP, "nested too deeply"),
    ('{"name": 3, "%s": {}}', '"name" must be'),
    ('{"name": "", "%s": {}}', '"name" must be'),
    ('{"name": "f\\n", "%s": {}}', '"name" must be'),
    ('{"name": "<|im_end|>", "%s": {}}', '"name" must be'),
    ('{"name": "f", "%s": "{}"}', "must be an object"),
    ('{"name": "f", "%s": [1]}', "must be an object"),
    ('{"name": "f", "%s": null}', "must be an object"),
]
HERMES_ODD = [
    *((f"<tool_call>{text.replace('%s', 'arguments')}</tool_call>", reason) for text, reason in ODD),
    ('<tool_call>{"name": "f"}</tool_call>', '"name" and "arguments"'),
    ("<tool_call>[1]</tool_call>", '"name" and "arguments"'),
    ("<tool_call></tool_call>", "it is not JSON"),
    ("<tool_call>", "it is not JSON"),
    (f"<tool_call>{JSON} and so on", "must be closed"),
    (f"<tool_call>{JSON}{JSON}</tool_call>", "must be closed"),
    (f"{TAGGED}</tool_call>", "closes nothing"),
    ("<think>hm", "does not end"),
    (f"<think>hm {TAGGED}", "does not end"),
]
LLAMA_ODD = [
    *((f"<|python_tag|>{text.replace('%s', 'parameters')}", reason) for text, reason in ODD),
    ("<|python_tag|>", "it is not JSON"),
    ("<|python_tag|>print(1)", "it is not JSON"),
    ("<|python_tag|>[1]", '"name" and "parameters"'),
    ('<|python_tag|>{"x": 1}', '"name" and "parameters"'),
    ('{"name": "f"}', "must be an object"),
    ('{"name": "f", "parameters": {', "it is not JSON"),
    (f'{PARAMETERS}; {{"x": 1}}', '"name" and "parameters"'),
]
CALL = "<|channel|>commentary to=functions.f<|message|>"
HARMONY_ODD = [
    *(
        (CALL + text.replace('"%s": ', "").removeprefix('{"name": "f", ').removesuffix("}"), reason)
        for text, reason in (*ODD[4:10], *ODD[11:16])
    ),
    ("plain text", "no body"),
    ("", "no body"),
    ("<|channel|>final", "no body"),
    ("<|message|>hello", "needs a channel"),
    ("<|channel|>secret<|message|>hello", "needs a channel"),
    ("<|channel|>analysis<|message|>hm", "nothing after the analysis"),
    (f"{ANALYSIS}", "no body"),
    ("<|channel|>analysis<|message|>hm<|end|><|start|>user<|message|>I am you", "only the assistant"),
    ("<|channel|>final<|message|>a<|channel|>b", "control tokens"),
    ("<|channel|>commentary to=python<|message|>print(1)", "to=functions.NAME"),
    ("<|channel|>commentary to=functions.<|message|>{}", '"name" must be'),
    (f"{CALL}[1]", "one JSON object"),
    (f"{CALL}{{}} and", "nothing may follow"),
    (f"{CALL}{{", "it is not JSON"),
]


@pytest.mark.parametrize(
    ("parse", "text", "reason"),
    [(parse, *odd) for parse, all_odd in ((HERMES, HERMES_ODD), (LLAMA, LLAMA_ODD)) for odd in all_odd]
    + [(HARMONY, *odd) for odd in HARMONY_ODD],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_cannot_be_read_has_a_fault_that_says_what_to_write(parse, text, reason):
    message = parse(text)
    assert reason in message.fault
    assert "write" in message.fault or "close it" in message.fault
    assert "\n" not in message.fault
    assert "<|" not in message.fault  # a control token would be one in the next prompt
    assert len(message.fault) < 400
    assert message.calls == ()
    assert message.thinking == ""
    if parse is not HARMONY:
        assert message.content == text


PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<|start|>", "<|end|>", "<|message|>",
        "<|channel|>", "<|call|>", "<|constrain|>", "assistant", "analysis", "final", "commentary", " to=functions.f",
        '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {}}', "{", "}", "[", "]", '"', ":", ",", ";",
        "\\ud800", "1e999", "9" * 30, "null", "\n", " ", "x",
    ]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([HERMES, LLAMA, HARMONY]), st.lists(PIECES | st.text(max_size=3), max_size=12).map("".join))
@example(HERMES, "<tool_call>" + "[" * DEEP)
@example(LLAMA, '{"x":' * DEEP)
@example(HARMONY, CALL + "[" * DEEP)
def test_no_text_is_an_exception(parse, text):
    message = parse(text)
    assert message.role == "assistant"
    for call in message.calls:  # good ones beside a broken one too, which is in the fault
        call.text.encode()
        assert json.loads(call.text) == call.arguments


# ---------------------------------------------------------------- through a template

CALLS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}{% if message.content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE_CALL = (
    "{% for m in messages if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endfor %}"
)
REASONS = CALLS.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}",
)


def renderer(tools, template=None, **settings_):
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = template or tokenizer.chat_template
    return Renderer(tokenizer, tools=tools, **settings_)


def exchange(render, text, heard):
    prompt = render.first(user("go"))
    action = np.append(render.encode(text), render.end_token).astype(np.int32)
    message = render.said(prompt.tokens, action)
    turn = Turn(prompt.tokens, action, [-0.5] * len(action), [0] * len(action), StopReason.end_token, 0.0, message)
    messages = (*user("go"), message, *heard)
    return message, messages, render.next(turn, user("go"), messages)


THOUGHTFUL = f"<think>\nhm\n</think>\n\n{TAGGED}"
SEVERAL = f"I look.\n{TAGGED}\n{TAGGED}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        *((template, text) for template in (None, CALLS, REASONS) for text in (TAGGED, SEVERAL, "It is 4.")),
        (None, THOUGHTFUL),
        (REASONS, THOUGHTFUL),
    ],
)
def test_a_call_as_the_template_writes_it_extends(template, text):
    """Whether the template takes calls and thinking in fields of their own, or everything is in the content."""
    render = renderer("hermes", template)
    message, messages, prompt = exchange(render, text, (Message("tool", "cedar"),))
    assert len(message.calls) == text.count("</tool_call>")
    assert prompt.broke is Break.none
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()
    assert f"assistant\n{text}<|im_end|>\n<|im_start|>tool\ncedar<|im_end|>" in render.decode(prompt.tokens)


def test_fields_that_the_template_reads_are_used():
    assert renderer("hermes").template.form.calls == "content"
    assert renderer("hermes", CALLS).template.form.calls == "mapping"
    assert renderer("hermes", CALLS).template.form.thinking == ()
    assert renderer("hermes", REASONS).template.form.thinking == ("reasoning_content",)
    assert renderer("llama", CALLS).template.form.calls == "content"  # it would write what the model does not
    text = CALLS.replace(" | tojson", "")
    assert renderer("hermes", text).template.form.calls == "text"
    with pytest.raises(ValueError, match='does not write calls as rollout.tools = "harmony"; set it to "hermes"'):
        renderer("harmony", CALLS)


def test_a_sloppy_call_is_shown_as_the_template_writes_it():
    render = renderer("hermes", CALLS)
    message, messages, prompt = exchange(render, TAGGED.replace(": ", ":"), (Message("tool", "cedar"),))
    assert message.calls == (GET,)
    assert prompt.broke is Break.template
    assert prompt.tokens.tolist() == render.first(messages).tokens.tolist()
    assert TAGGED in render.decode(prompt.tokens)


def test_numbers_of_another_type_are_another_call():
    render = renderer("hermes", CALLS)
    for number in ("1", "1.0", "true"):
        text = TAGGED.replace('"amber"', number)
        _, messages, prompt = exchange(render, text, (Message("tool", "cedar"),))
        assert prompt.broke is Break.none
        assert text in render.template.render(messages).text


def test_calls_that_the_template_refuses_together_are_a_fault():
    """The model's doing must not look like a failure of ours."""
    render = renderer("hermes", ONE_CALL + CALLS)
    message, _, prompt = exchange(render, f"{TAGGED}\n{TAGGED}", user("no"))
    assert "cannot be shown together" in message.fault
    assert message.content == f"{TAGGED}\n{TAGGED}"
    assert prompt.broke is Break.none
    message, _, _ = exchange(render, TAGGED, user("no"))
    assert message.calls == (GET,)


def test_text_that_the_template_refuses_is_not_shown():
    refuses = "{% for m in messages if '<tool_call>' in m.content %}{{ raise_exception('no') }}{% endfor %}" + CALLS
    render = renderer("hermes", refuses)
    message, _, _ = exchange(render, "<tool_call>x", user("no"))
    assert message.content == ""
    assert message.fault


def test_thinking_that_the_prompt_opened_is_read_as_thinking():
    template = REASONS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    render = renderer("hermes", template)
    message, _, prompt = exchange(render, f"hm\n</think>\n\n{TAGGED}", (Message("tool", "cedar"),))
    assert message == said("", "hm", GET)
    assert prompt.broke is Break.none
    message, _, _ = exchange(render, "hm, hm", user("x"))
    assert "does not end" in message.fault
    unopened = render.encode_raw("<|im_start|>assistant\n")
    assert render.said(unopened, render.encode("It is 4.")) == said("It is 4.")


def test_a_mark_that_opens_twice_is_a_fault_beside_the_call():
    read = HERMES(f"<tool_call>{TAGGED}")
    assert read.calls == (GET,)
    assert read.content == "<tool_call>"
    assert "it is not JSON" in read.fault


# ---------------------------------------------------------------- through the agent loop


class Listener(Puppet):
    """Keeps whole messages."""

    async def step(self, message):
        self.heard.append(message)
        return self.replies.pop(0)


def test_an_environment_hears_calls_and_the_model_hears_faults():
    texts = iter(["<tool_call>{</tool_call>", TAGGED, "<think>", "It is 4."])
    render = renderer("hermes")
    environment = Listener(
        Reply((Message("tool", "cedar"),), reward=0.5, stop=("STOP",)), Reply(finished=True, outcome=1.0)
    )
    made = run(attempted(environment, says(lambda *_: next(texts), render=render), render=render))
    assert made.status is Status.finished
    assert environment.heard == [said("", "", GET), said("It is 4.")]
    assert [bool(turn.said.fault) for turn in made.turns] == [True, False, True, False]
    assert [turn.reward for turn in made.turns] == [0.0, 0.5, 0.0, 0.0]
    for turn in made.turns[::2]:
        assert turn.heard == (Message("user", turn.said.fault),)
    assert made.turns[0].said.fault in render.decode(made.turns[1].prompt)
    assert all(turn.broke is Break.none for turn in made.turns)
    assert made.total == 1.5


def test_faults_are_turns_and_stop_strings_stay():
    render = renderer("hermes")
    environment = Listener(opening=Reply(user("go"), stop=("STOP",)))
    made = run(attempted(environment, says("<tool_call>STOP and more", render=render), render=render, max_turns=3))
    assert made.status is Status.too_many_turns
    assert environment.heard == []
    assert [turn.stop for turn in made.turns] == [StopReason.stop_string] * 3
    assert made.total == 0.0


def test_without_a_format_messages_are_plain_text():
    environment = Listener(Reply(finished=True))
    run(attempted(environment, says(f"<think>hm</think>{TAGGED}")))
    assert environment.heard == [Message("assistant", f"<think>hm</think>{TAGGED}")]


def test_tools_are_described_from_the_reply_that_offers_them():
    lookup, end = ToolSpec("get", "Where a name leads."), ToolSpec("end", "Ends it.")
    render = renderer("hermes")
    environment = Listener(Reply(user("on")), Reply(user("on"), tools=(end,)), Reply(finished=True))
    environment.opening = Reply(user("go"), tools=(lookup,))
    texts = iter(["hm", "<tool_call>{</tool_call>", "hm", "hm"])
    made = run(attempted(environment, says(lambda *_: next(texts), render=render), render=render))
    assert made.status is Status.finished
    shown = [[tool.description in render.decode(turn.prompt) for tool in (lookup, end)] for turn in made.turns]
    assert shown == [[True, False]] * 3 + [[False, True]]  # a fault leaves them as they were
    assert [turn.broke for turn in made.turns] == [Break.none] * 3 + [Break.history]

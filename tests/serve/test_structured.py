"""Structured output through the endpoint: every dialect's way to ask for a form, with a random model behind it."""

import json
import re
from functools import partial

import pytest

from serve.serving import chat_body, hermes, post
from serve.serving import served as served_within
from support.guiding import guided_engine
from turnwise.engines.grammar import ANY_OBJECT, Grammar, GrammarKind
from turnwise.serve.dialects import chat, completions, messages, responses
from turnwise.serve.dialects.ask import Refusal
from turnwise.serve.public import sampling_of
from turnwise.serve.seal import ThinkingSeal

SEAL = ThinkingSeal()

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "up": {"type": "boolean"}},
    "required": ["n", "up"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GO = [{"role": "user", "content": "go"}]
TOOL = {"name": "get", "parameters": {"type": "object", "properties": {}}, "strict": True}
TOOLS = [{"type": "function", "function": TOOL}]
DEEPER = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
FLAT = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
ASKED = {
    "chat": ("/v1/chat/completions", chat_body(response_format=DEEPER)),
    "chat, as vLLM calls it": ("/v1/chat/completions", chat_body(structured_outputs={"json": SCHEMA})),
    "chat, as vLLM called it": ("/v1/chat/completions", chat_body(guided_json=json.dumps(SCHEMA))),
    "responses": ("/v1/responses", {"model": "policy", "input": "go", "text": {"format": FLAT}}),
    "messages": (
        "/v1/messages",
        {"model": "policy", "max_tokens": 99, "messages": GO, "output_config": {"format": FLAT}},
    ),
    "messages, as the beta had it": (
        "/v1/messages",
        {"model": "policy", "max_tokens": 99, "messages": GO, "output_format": FLAT},
    ),
    "completions": (
        "/v1/completions",
        {"model": "policy", "prompt": "go", "max_tokens": 99, "response_format": DEEPER},
    ),
}


served = partial(served_within, call_seconds=90.0, attempt_seconds=90.0)
"""With time for a real model on a busy machine."""


def text_in(answer):
    """The text of an answer in any dialect."""
    if "choices" in answer:
        [choice] = answer["choices"]
        return choice["message"]["content"] if "message" in choice else choice["text"]
    [item] = answer.get("output", [answer])
    return "".join(part["text"] for part in item["content"])


@pytest.fixture(scope="module")
def asked():
    """What the endpoint says to every request above, and the session that recorded them."""

    def client(address):
        return {name: post(address, *request) for name, request in ASKED.items()}

    return served(client, guided_engine(), hermes(), max_turns=20)


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_has_the_form_that_was_asked_for(asked, name):
    status, answer, headers = asked[0][name]
    assert status == 200, answer
    assert re.fullmatch(r'\{"n":[0-9]{1,2},"up":(true|false)\}', text_in(answer))
    assert "x-turnwise-overridden" not in headers


def test_what_was_allowed_is_part_of_every_turn(asked):
    _, session = asked
    turns = session.turns()
    assert len(turns) == len(ASKED)
    for turn in turns:
        assert turn.allowed is not None
        assert turn.allowed.allows(turn.action).all()
        assert turn.said.content == text_in({"content": [{"text": turn.said.content}]})
        json.loads(turn.said.content)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"structured_outputs": {"grammar": 'start: "x" "y"?'}}, "xy?"),
        ({"structured_outputs": {"choice": ["on"], "regex": None}}, "on"),
    ],
)
def test_regular_expressions_choices_and_grammars(extra, pattern):
    (status, answer, _), _ = served(lambda at: post(at, "/v1/chat/completions", chat_body(**extra)), guided_engine())
    assert status == 200, answer
    assert re.fullmatch(pattern, text_in(answer))


def test_an_answer_that_looks_like_a_call_is_text():
    """A form was asked for and no tool was offered: what fits the form is what the client gets."""
    form = {"structured_outputs": {"choice": ['<tool_call>{"name": "get", "arguments": {}}</tool_call>']}}
    (status, answer, _), session = served(
        lambda at: post(at, "/v1/chat/completions", chat_body(**form)), guided_engine(), hermes()
    )
    assert status == 200, answer
    assert text_in(answer).startswith("<tool_call>")
    [turn] = session.turns()
    assert not turn.said.calls


# ---------------------------------------------------------------- what is read


def test_a_format_with_tools_is_reported_and_not_enforced():
    ask = chat.read(chat_body(response_format=DEEPER, tools=TOOLS), SEAL)
    assert (ask.grammar, ask.settings["response_format"]) == (None, "json_schema")
    forbidden = chat.read(chat_body(response_format=DEEPER, tools=TOOLS, tool_choice="none"), SEAL)
    assert forbidden.grammar == Grammar.of_schema(SCHEMA)
    flat_tools = [{"type": "function", **TOOL}]
    ask = responses.read({"model": "policy", "input": "go", "text": {"format": FLAT}, "tools": flat_tools}, SEAL)
    assert (ask.grammar, ask.settings["text.format"]) == (None, "json_schema")
    body = {"model": "policy", "max_tokens": 9, "messages": GO, "output_config": {"format": FLAT, "effort": "low"}}
    ask = messages.read({**body, "tools": [{"name": "get", "input_schema": {"type": "object"}, "strict": True}]}, SEAL)
    assert (ask.grammar, ask.settings["output_config.format"]) == (None, "json_schema")
    assert messages.read(body, SEAL).settings == {"effort": "low"}

    form = chat_body(response_format=DEEPER, tools=TOOLS, max_tokens=4)
    (status, answer, headers), session = served(lambda at: post(at, "/v1/chat/completions", form), guided_engine())
    assert status == 200
    assert headers["x-turnwise-overridden"] == "response_format"
    assert answer["turnwise"]["overridden"]["response_format"] == {"asked": "json_schema", "used": None}
    assert session.turns()[0].allowed is None


def test_formats_without_effect_and_those_of_any_object():
    for form in ({"type": "text"}, {}):
        assert chat.read(chat_body(response_format=form), SEAL).grammar is None
    assert chat.read(chat_body(response_format={"type": "json_object"}), SEAL).grammar == ANY_OBJECT
    body = {"model": "policy", "prompt": "go", "structured_outputs": {"json_object": True}}
    assert completions.read(body, SEAL).grammar == ANY_OBJECT
    ask = chat.read(chat_body(guided_regex="a+", guided_decoding_backend="xgrammar"), SEAL)
    assert ask.grammar == Grammar(GrammarKind.regex, "a+")
    assert sampling_of(ask, 50).grammar == ask.grammar


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "schema is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "schema is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "JSON schema is an object"),
        ({"response_format": DEEPER, "guided_regex": "a"}, "both given"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "both given"),
        ({"structured_outputs": {"regex": 5}}, "must be a string"),
        ({"structured_outputs": {"choice": "a"}}, "array of strings"),
        ({"structured_outputs": {"choice": []}}, "choices"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not supported"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern is not supported"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern is not supported"),
        ({"guided_json": "a" * (1 << 17)}, "at most"),
    ],
)
def test_a_form_that_cannot_be_read_is_refused_in_one_line(extra, text):
    with pytest.raises(Refusal, match=re.escape(text)) as refusal:
        chat.read(chat_body(**extra), SEAL)
    assert refusal.value.status == 400
    assert "\n" not in str(refusal.value)


def test_a_schema_that_cannot_be_followed_is_refused_and_does_not_count_as_a_turn():
    bad = chat_body(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "nosuch"}}})

    def client(address):
        return [post(address, "/v1/chat/completions", body) for body in (bad, chat_body(guided_choice=["on"]))]

    (refused, fine), session = served(client, guided_engine(), max_turns=1)
    assert (refused[0], fine[0]) == (400, 200)
    assert "json_schema cannot be followed" in refused[1]["error"]["message"]
    assert len(session.turns()) == 1

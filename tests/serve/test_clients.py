"""The real SDKs of OpenAI and Anthropic, streamed and not; what is recorded is what was sampled."""

import json

import anthropic
import numpy as np
import openai
import pytest

from serve.serving import hermes, served
from support.acting import renderer, says
from turnwise.messages import Message
from turnwise.types import Break, StopReason

TOOL = {"name": "get", "description": "Where a name leads.", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "get", "arguments": {"name": "amber"}}\n</tool_call>'


def of_openai(address):
    return openai.OpenAI(base_url=address.base_url, api_key=address.key, max_retries=0)


def of_anthropic(address):
    return anthropic.Anthropic(base_url=address.base_url.removesuffix("/v1"), api_key=address.key, max_retries=0)


def lines(*texts):
    """An engine that says one text after the other."""
    left = list(texts)
    return says(lambda prompt, session, seed: left.pop(0), render=hermes())


def check_recorded(session, engine, *texts):
    """The turns of a session are exactly what the engine was asked and what it sampled."""
    turns = session.turns()
    assert len(turns) == len(engine.prompts) == len(texts)
    for turn, prompt, text in zip(turns, engine.prompts, texts, strict=True):
        assert np.array_equal(turn.prompt, prompt)
        assert turn.action.tolist() == [*hermes().encode(text).tolist(), hermes().end_token]
        assert turn.logprobs.tolist() == [-0.5] * len(turn.action)
        assert turn.stop is StopReason.end_token
    return turns


def chatted(client, messages, stream, **fields):
    """(content, calls, finish reason, usage) by OpenAI's chat, in one piece or put together from a stream."""
    if not stream:
        made = client.chat.completions.create(model="policy", messages=messages, **fields)
        [choice] = made.choices
        calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        return choice.message.content, calls, choice.finish_reason, made.usage
    content, calls, finish, usage = "", [], None, None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(
        model="policy", messages=messages, stream=True, stream_options=options, **fields
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            calls += [(c.id, c.function.name, c.function.arguments) for c in choice.delta.tool_calls or ()]
            finish = choice.finish_reason or finish
    return content or None, calls, finish, usage


@pytest.mark.parametrize("stream", [False, True])
def test_openai_chat(stream):
    engine = lines("hello  there\nyou", "bye")
    first = [{"role": "system", "content": "be kind"}, {"role": "user", "content": [{"type": "text", "text": "go"}]}]

    def client(address):
        with of_openai(address) as own:
            said, calls, finish, usage = chatted(own, first, stream)
            again = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
            return said, calls, finish, usage, chatted(own, again, stream)[0]

    (said, calls, finish, usage, second), session = served(client, engine)
    assert (said, calls, finish, second) == ("hello  there\nyou", [], "stop", "bye")
    turns = check_recorded(session, engine, "hello  there\nyou", "bye")
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(turns[0].prompt), len(turns[0].action))
    assert [turn.broke for turn in turns] == [Break.none, Break.none]
    assert turns[0].heard == (Message("user", "on"),)
    known = np.concatenate([turns[0].prompt, turns[0].action])
    assert np.array_equal(turns[1].prompt[: len(known)], known)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_tool_calls_and_their_results(stream):
    engine = lines(f"let me see\n{CALL}\n{CALL.replace('amber', 'jade')}", "cedar")
    tools = [{"type": "function", "function": TOOL}]

    def client(address):
        with of_openai(address) as own:
            messages = [{"role": "user", "content": "go"}]
            said, calls, finish, _ = chatted(own, messages, stream, tools=tools)
            entries = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
            messages.append({"role": "assistant", "content": said, "tool_calls": entries})
            # Results in the other order: the model hears them in the order of its calls.
            messages.append({"role": "tool", "tool_call_id": calls[1][0], "content": "second"})
            messages.append({"role": "tool", "tool_call_id": calls[0][0], "content": "first"})
            return said, calls, finish, chatted(own, messages, stream, tools=tools)

    (said, calls, finish, after), session = served(client, engine)
    assert (said, finish) == ("let me see", "tool_calls")
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [
        ("get", {"name": "amber"}),
        ("get", {"name": "jade"}),
    ]
    assert len({name for name, _, _ in calls}) == 2
    assert after[0] == "cedar"
    turns = session.turns()
    assert [turn.broke for turn in turns] == [Break.none, Break.none]
    assert turns[0].heard == (Message("tool", "first"), Message("tool", "second"))
    assert "Where a name leads." in hermes().decode(turns[0].prompt.tolist())


def test_openai_says_what_training_overrides():
    def client(address):
        with of_openai(address) as own:
            raw = own.chat.completions.with_raw_response.create(
                model="policy", messages=[{"role": "user", "content": "go"}], temperature=0.2, seed=7, top_p=1
            )
            return raw.headers["x-turnwise-overridden"], raw.parse().turnwise

    (header, field), session = served(client)
    assert header == "seed, temperature"
    assert field["overridden"] == {
        "temperature": {"asked": 0.2, "used": 1.0},
        "seed": {"asked": 7, "used": None},
    }
    assert session.recorded[0].sampling.temperature == 1.0


def test_openai_limits_and_stop_strings_of_the_client_hold():
    engine = says("one two three")

    def client(address):
        with of_openai(address) as own:
            messages = [{"role": "user", "content": "go"}]
            short = own.chat.completions.create(model="policy", messages=messages, max_completion_tokens=4)
            stopped = own.chat.completions.create(model="policy", messages=messages, stop=["two"])
            return short.choices[0], stopped.choices[0]

    (short, stopped), session = served(client, engine)
    assert (short.message.content, short.finish_reason) == ("one ", "length")
    assert (stopped.message.content, stopped.finish_reason) == ("one ", "stop")
    assert renderer().decode(session.turns()[1].action.tolist()) == "one two"  # what was sampled is what is recorded


def test_openai_logprobs_are_those_of_the_sampled_tokens():
    def client(address):
        with of_openai(address) as own:
            messages = [{"role": "user", "content": "go"}]
            made = own.chat.completions.create(model="policy", messages=messages, logprobs=True)
            return made.choices[0].logprobs.content

    logprobs, session = served(client, says("hi"))
    assert [(entry.token, entry.logprob) for entry in logprobs] == [("h", -0.5), ("i", -0.5), ("<|im_end|>", -0.5)]
    assert len(session.turns()[0].action) == 3


def test_openai_completions_go_on_from_text_and_from_tokens():
    def client(address):
        with of_openai(address) as own:
            first = own.completions.create(model="policy", prompt="once", max_tokens=5)
            text = f"once{first.choices[0].text} upon"
            second = own.completions.create(model="policy", prompt=text, max_tokens=5, logprobs=0)
            tokens = own.completions.create(model="policy", prompt=[5, 6, 7], max_tokens=2)
            streamed = own.completions.create(model="policy", prompt="more", max_tokens=5, stream=True)
            return first, second, tokens, "".join(chunk.choices[0].text for chunk in streamed)

    (first, second, tokens, streamed), session = served(client, says(" long time ago"))
    assert (first.choices[0].text, first.choices[0].finish_reason) == (" long", "length")
    assert second.choices[0].logprobs.token_logprobs == [-0.5] * 5
    assert tokens.choices[0].text == " l"
    assert streamed == " long"
    turns = session.turns()
    assert renderer().decode(turns[0].prompt.tolist()) == "once"
    assert turns[1].broke is Break.none
    assert turns[2].prompt.tolist() == [5, 6, 7]
    assert turns[2].broke is Break.history


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses(stream):
    engine = lines(CALL, "cedar", "again")
    tools = [{"type": "function", **TOOL}]

    def respond(own, **given):
        if not stream:
            return own.responses.create(model="policy", **given)
        with own.responses.stream(model="policy", **given) as events:
            return events.get_final_response()

    def client(address):
        with of_openai(address) as own:
            first = respond(own, input="go", instructions="be kind", tools=tools)
            [call] = first.output
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "amber: cedar"}
            history = [{"role": "user", "content": "go"}, call.model_dump(exclude_none=True), output]
            second = respond(own, input=history, instructions="be kind", tools=tools)
            third = respond(own, input="once more", previous_response_id=second.id, instructions="be kind", tools=tools)
            return call, second, third

    (call, second, third), session = served(client, engine)
    assert (call.name, json.loads(call.arguments)) == ("get", {"name": "amber"})
    assert (second.output_text, third.output_text) == ("cedar", "again")
    assert second.usage.output_tokens == 6
    turns = check_recorded(session, engine, CALL, "cedar", "again")
    assert [turn.broke for turn in turns] == [Break.none] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages(stream):
    engine = lines(f"let me see\n{CALL}", "cedar")
    tools = [{"name": "get", "description": "Where a name leads.", "input_schema": TOOL["parameters"]}]

    def say(own, messages):
        given = {"model": "policy", "max_tokens": 150, "system": "be kind", "messages": messages, "tools": tools}
        if not stream:
            return own.messages.create(**given)
        with own.messages.stream(**given) as events:
            return events.get_final_message()

    def client(address):
        with of_anthropic(address) as own:
            messages = [{"role": "user", "content": "go"}]
            first = say(own, messages)
            result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "amber: cedar"}
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            return first, say(own, messages)

    (first, second), session = served(client, engine)
    assert [block.type for block in first.content] == ["text", "tool_use"]
    assert (first.content[0].text, first.content[1].input) == ("let me see", {"name": "amber"})
    assert (first.stop_reason, second.stop_reason) == ("tool_use", "end_turn")
    assert second.content[0].text == "cedar"
    turns = session.turns()
    assert (first.usage.input_tokens, first.usage.output_tokens) == (len(turns[0].prompt), len(turns[0].action))
    assert [turn.broke for turn in turns] == [Break.none, Break.none]
    assert turns[0].heard == (Message("tool", "amber: cedar"),)


def test_thinking_comes_apart_and_goes_back_where_it_was():
    engine = lines("<think>\nwell\n</think>\n\nget amber", "bye")

    def client(address):
        with of_openai(address) as own:
            messages = [{"role": "user", "content": "go"}]
            first = own.chat.completions.create(model="policy", messages=messages).choices[0].message
            # Clients send back what they show; the interface has no place for thinking.
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "on"}]
            own.chat.completions.create(model="policy", messages=messages)
            return first

    first, session = served(client, engine)
    assert (first.content, first.reasoning_content) == ("get amber", "well")
    assert [turn.broke for turn in session.turns()] == [Break.none, Break.none]


def test_models_are_listed():
    def client(address):
        with of_openai(address) as own:
            return [model.id for model in own.models.list()], own.models.retrieve("policy").id

    assert served(client)[0] == (["policy"], "policy")

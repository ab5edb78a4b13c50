"""Tokens reach a client while later ones are not sampled yet, and a client that hangs up ends the sampling."""

import asyncio
import json
import random
import socket

import numpy as np
import pytest

from serve.serving import chat_body, connect, hermes, make_session, post, served
from support.acting import Parrot, byte_tokenizer, run, says, slot_engine, until
from turnwise.engines.base import Sampling
from turnwise.messages import Message
from turnwise.rollout.render.renderer import Renderer
from turnwise.serve.dialects.ask import Ask, Delivery
from turnwise.serve.endpoint import Endpoint
from turnwise.serve.public import Public
from turnwise.serve.streamed import StreamedText
from turnwise.types import Break, StopReason

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "go"}]
BODIES = {
    CHAT: {"model": "policy", "messages": USER, "stream": True},
    TEXT: {"model": "policy", "prompt": "go", "max_tokens": 100, "stream": True},
    RESPONSES: {"model": "policy", "input": "go", "stream": True},
    MESSAGES: {"model": "policy", "max_tokens": 190, "messages": USER, "stream": True},
}
CALL = '<tool_call>\n{"name": "get", "arguments": {"name": "amber"}}\n</tool_call>'


class Gate:
    """A script that says a piece each time it is let."""

    def __init__(self, *pieces):
        self.pieces = pieces
        self.num_said = 0
        self.allowed = asyncio.Semaphore(0)
        self.closed = False

    def script(self, prompt, session, seed):
        return self.say()

    async def say(self):
        try:
            for piece in self.pieces:
                await self.allowed.acquire()
                self.num_said += 1
                yield piece
        finally:
            self.closed = True


def send(address, path, body):
    """A connection whose response has begun."""
    connection = connect(address)
    headers = {"authorization": f"Bearer {address.key}", "x-api-key": address.key}
    connection.request("POST", path, json.dumps(body), headers)
    return connection, connection.getresponse()


def read_until(response, text):
    """What a stream says up to and with the line that has a text."""
    lines = b""
    while text not in lines:
        line = response.readline()
        assert line, lines
        lines += line
    return lines


@pytest.mark.parametrize("path", BODIES)
def test_the_first_token_is_sent_before_the_last_is_sampled(path):
    async def client(address, session, endpoint):
        connection, response = await asyncio.to_thread(send, address, path, BODIES[path])
        gate.allowed.release()
        first = await asyncio.to_thread(read_until, response, b"amber")
        said_by_then = gate.num_said, list(session.recorded)
        gate.allowed.release()
        gate.allowed.release()
        rest = await asyncio.to_thread(response.read)
        connection.close()
        return said_by_then, first, rest

    gate = Gate("amber ", "cedar ", "jade")
    engine = says(gate.script, render=hermes())
    (by_then, first, rest), session = served(client, engine)
    assert by_then == (1, [])
    assert b"cedar" not in first
    assert b"jade" in rest
    [turn] = session.turns()
    assert turn.said.content == "amber cedar jade"
    assert turn.stop is StopReason.end_token


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_hangs_up_stops_the_sampling_and_keeps_what_it_read(path):
    async def client(address, session, endpoint):
        connection, response = await asyncio.to_thread(send, address, path, BODIES[path])
        gate.allowed.release()
        await asyncio.to_thread(read_until, response, b"amber")
        connection.sock.shutdown(socket.SHUT_RDWR)
        response.close()
        connection.close()
        await until(lambda: session.recorded)
        await until(lambda: not engine.speaking)
        return gate.num_said, gate.closed

    gate = Gate("amber.", "cedar.", "jade.")
    engine = says(gate.script, render=hermes())
    (num_said, closed), session = served(client, engine)
    assert (num_said, closed) == (1, True)
    [turn] = session.turns()
    assert (turn.stop, turn.said.content) == (StopReason.abort, "amber.")
    np.testing.assert_array_equal(turn.action, hermes().encode("amber."))
    assert len(turn.logprobs) == len(turn.versions) == len(turn.action)
    assert session.in_flight == []


def test_a_conversation_goes_on_after_an_answer_that_was_cut_short():
    async def client(address, session, endpoint):
        connection, response = await asyncio.to_thread(send, address, CHAT, BODIES[CHAT])
        gates[0].allowed.release()
        await asyncio.to_thread(read_until, response, b"amber")
        connection.sock.shutdown(socket.SHUT_RDWR)
        await until(lambda: session.recorded)
        connection.close()
        more = [{"role": "assistant", "content": "amber."}, {"role": "user", "content": "on"}]
        return await asyncio.to_thread(post, address, CHAT, {"model": "policy", "messages": [*USER, *more]})

    gates = [Gate("amber.", "cedar."), Gate("jade.")]
    gates[1].allowed.release()
    left = list(gates)
    (status, _, _), session = served(client, says(lambda *given: left.pop(0).say(), render=hermes()))
    assert status == 200
    first, second = session.turns()
    np.testing.assert_array_equal(
        second.prompt[: len(first.prompt) + len(first.action)][-len(first.action) :], first.action
    )
    assert second.broke is Break.none


def test_hanging_up_frees_the_slot_of_the_slot_engine():
    """A real engine whose steps are let through one by one."""
    steps = asyncio.Semaphore(0)
    words = "amber " * 40

    async def gated(function, *arguments):
        await steps.acquire()
        return function(*arguments)

    render = hermes()
    script = byte_tokenizer().encode(words, add_special_tokens=False)
    model = Parrot([0] * 8 + script * 4, len(byte_tokenizer()))

    async def work():
        engine = slot_engine(model, slots=1, context=200, decode=render.decode, run=gated)
        endpoint = Endpoint()
        try:
            address = endpoint.open(Public(engine, render, "policy"), "key")
            body = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 150, "stream": True}
            connection, response = await asyncio.to_thread(send, address, TEXT, body)
            reading = asyncio.create_task(asyncio.to_thread(read_until, response, b'"text": "'))
            while not reading.done():
                steps.release()
                await asyncio.sleep(0.001)
            await reading
            assert engine.scheduler.running
            connection.sock.shutdown(socket.SHUT_RDWR)
            response.close()
            connection.close()
            await until(lambda: engine.departures or not engine.scheduler.running)
            steps.release()
            await until(lambda: not engine.scheduler.running)
            assert engine.scheduler.free_slots == [0]
            assert engine.model.sampled_tokens < 150
            assert engine.streamed == []
        finally:
            endpoint.close()
            await engine.close()

    run(work(), 100)


def test_the_slot_engine_reports_what_it_samples():
    model = Parrot(range(2, 60), 61)

    async def work():
        engine = slot_engine(model, slots=2)
        parts = []
        prompt = np.array([1, 2], np.int32)
        completion = await engine.generate(prompt, Sampling(9), session="s", seed=1, on_tokens=parts.append)
        await engine.close()
        return parts, completion

    parts, completion = run(work(), 100)
    for name in ("tokens", "logprobs", "versions"):
        told = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(told, getattr(completion, name)[: len(told)])
    assert len(parts) == 8  # the last token comes with the completion


# ---------------------------------------------------------------- where text may be cut


def streamed(text, stops=(), render=None, sizes=None):
    """(pieces of a text that comes in tokens, the message at the end)."""
    render = render or hermes()
    tokens = render.encode(text).tolist()
    prompt = render.first((Message("user", "go"),)).tokens
    live = StreamedText(render, prompt, stops, raw=False)
    pieces, position = [], 0
    for size in sizes or [1] * len(tokens):
        pieces.append(live.add(tokens[position : position + size]))
        position += size
    said = render.said(prompt, np.array(tokens, np.int32))
    for stop in stops:
        said = Message("assistant", said.content.partition(stop)[0], said.thinking, said.calls)
    pieces.append(live.finish(said))
    return pieces, live, said


@pytest.mark.parametrize(
    "text",
    [
        "hello there",
        "größer als 日本 🙂 ok",
        f"let me see\n{CALL}",
        f"{CALL}\n{CALL}",
        f"a < b, <tool, and then {CALL} more",
        "<think>\nwell, well\n</think>\n\nget amber",
        f"<think>\nwell\n</think>\n\nsee\n\n{CALL}",
        "<thinking is hard",
        "  leading and trailing  ",
        "",
    ],
)
def test_what_is_streamed_is_the_answer(text):
    pieces, live, said = streamed(text)
    assert "".join(piece.thinking for piece in pieces) == said.thinking
    assert "".join(piece.content for piece in pieces) == said.content == live.content
    assert not any("\ufffd" in piece.content for piece in pieces)
    shuffled = random.Random(text)
    sizes = [shuffled.randint(1, 5) for _ in range(len(hermes().encode(text)))]
    assert streamed(text, sizes=sizes)[1].told == live.told


@pytest.mark.parametrize(
    "text", [f"ok <tool_call>broken {CALL}", "no opening</think>rest", "<think>\nno end", "<think>"]
)
def test_text_that_cannot_be_read_is_still_sent_once(text):
    """What was sent stays; the text that was held back follows as content."""
    pieces, live, _ = streamed(text)
    sent = "".join(piece.thinking + piece.content for piece in pieces)
    for word in ("ok", "broken", "rest", "no", "end"):
        assert sent.count(word) == text.count(word)
    assert (live.thinking, live.content) == (
        "".join(piece.thinking for piece in pieces),
        "".join(piece.content for piece in pieces),
    )


def test_a_stop_string_is_not_streamed():
    pieces, _, _ = streamed("get amber</answer>", stops=("</answer>",))
    assert "".join(piece.content for piece in pieces) == "get amber"
    plain = Renderer(byte_tokenizer())
    assert "".join(piece.content for piece in streamed("abcabd", ("abd",), plain)[0]) == "abc"


def test_thinking_and_calls_have_events_of_their_own():
    text = f"<think>\nwell\n</think>\n\nlet me see\n{CALL}"

    async def client(address, session, endpoint):
        answers = {}
        for path in (CHAT, RESPONSES, MESSAGES):
            connection, response = await asyncio.to_thread(send, address, path, BODIES[path])
            answers[path] = (await asyncio.to_thread(response.read)).decode()
            connection.close()
        return answers

    answers, session = served(client, says(text, render=hermes()))
    events = {
        path: [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
        for path, said in answers.items()
    }
    deltas = [event["choices"][0]["delta"] for event in events[CHAT]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "well"
    assert "".join(delta.get("content") or "" for delta in deltas) == "let me see"
    assert [delta["tool_calls"][0]["function"]["name"] for delta in deltas if "tool_calls" in delta] == ["get"]
    kinds = [event["type"] for event in events[RESPONSES]]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert [item["type"] for item in events[RESPONSES][-1]["response"]["output"]] == [
        "reasoning",
        "message",
        "function_call",
    ]
    started = [event["content_block"]["type"] for event in events[MESSAGES] if event["type"] == "content_block_start"]
    assert started == ["thinking", "text", "tool_use"]
    assert len(session.turns()) == 3


def test_an_engine_without_streams_gives_the_answer_whole():
    class Whole:
        def __init__(self, inner):
            self.inner = inner
            self.context = inner.context
            self.prompts = inner.prompts

        async def generate(self, prompt, sampling, *, session, seed):
            return await self.inner.generate(prompt, sampling, session=session, seed=seed)

    async def client(address, session, endpoint):
        connection, response = await asyncio.to_thread(send, address, CHAT, chat_body(stream=True))
        said = await asyncio.to_thread(response.read)
        connection.close()
        return said

    said, session = served(client, Whole(says("hello there", render=hermes())))
    assert b'"content": "hello there"' in said
    assert len(session.turns()) == 1


def test_a_retry_joins_a_stream_from_its_first_piece():
    engine = says("one two", render=hermes())

    async def work():
        session = make_session(engine)
        ask = Ask("policy", (Message("user", "go"),), stream=True)
        call = await session.open(ask, Delivery(b"x", 0))
        again = await session.open(ask, Delivery(b"x", 1))
        assert again is call
        await session.wait(call)
        texts = ["".join(piece.content for piece in await session.next_pieces(call, 0)) for _ in range(2)]
        session.end()
        return texts

    assert run(work(), 100) == ["one two", "one two"]

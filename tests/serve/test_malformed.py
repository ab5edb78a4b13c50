"""Whatever a client sends, it hears what is wrong with it, and nobody else notices."""

import asyncio
import json
import random

import pytest

from serve.malformed import CHAT, HEADERS, MESSAGES, RESPONSES, TEXT, VALID, bodies
from serve.serving import chat_body, connect, hermes, make_session, post, served
from support.acting import byte_tokenizer, renderer, run, says, slot_engine, until
from turnwise.learn.attention import NAME, register
from turnwise.learn.tiny import build_model
from turnwise.serve.endpoint import Endpoint
from turnwise.serve.public import Public

FINE = {200, 400, 404, 410, 413}
MANY = {"max_turns": 1 << 30, "call_seconds": 60.0}


class Client:
    """One connection that is used again."""

    def __init__(self, address):
        self.address = address
        self.connection = connect(address)

    def post(self, path, raw, headers=()):
        given = {"authorization": f"Bearer {self.address.key}", "content-type": "application/json", **dict(headers)}
        self.connection.request("POST", path, raw, {name: value.encode("latin-1") for name, value in given.items()})
        response = self.connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text and response.status != 200 else None


def check(path, raw, status, said):
    assert status in FINE, (path, raw[:2000], status, said)
    if status != 200:
        message = said["error"]["message"]
        assert message, (path, raw[:2000])
        assert "\n" not in message
        assert len(message) < 1000, message
        message.encode()


def attack(address, seed, count):
    """Statuses of malformed requests, all of them answered as they should be."""
    client, draw = Client(address), random.Random(seed)
    statuses = []
    for path, raw in bodies(seed, count):
        status, said = client.post(path, raw, draw.choice(HEADERS))
        check(path, raw, status, said)
        statuses.append(status)
    return statuses


def talk(address, turns=8):
    """A conversation, by its texts."""
    messages, said = [{"role": "user", "content": "go"}], []
    for _ in range(turns):
        status, answer, _ = post(address, CHAT, {"model": "policy", "messages": messages, "max_tokens": 30})
        assert status == 200, answer
        said.append(answer["choices"][0]["message"]["content"])
        messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": "on"}]
    return said


def test_the_bodies_would_be_served_were_nothing_wrong_with_them():
    def client(address):
        return [Client(address).post(path, json.dumps(body).encode()) for path, body in VALID.items()]

    assert [status for status, _ in served(client)[0]] == [200] * 4


def attacked(count, seeds):
    """(statuses, what a good session said meanwhile, what it says alone, whether either session broke)."""
    answers = iter(range(1 << 30))

    async def work():
        endpoint = Endpoint(largest_body=1 << 20)
        mine = make_session(says(lambda *_: f"answer {next(answers)}", render=hermes()), **MANY)
        theirs = make_session(says("hello", render=hermes()), **MANY)
        try:
            good, bad = endpoint.open(mine), endpoint.open(theirs)
            attacks = [asyncio.create_task(asyncio.to_thread(attack, bad, seed, count)) for seed in seeds]
            said = []
            while not all(task.done() for task in attacks):
                said += await asyncio.to_thread(talk, good, 2)
            statuses = [status for task in attacks for status in await task]
            return statuses, said, mine.broken.done() or theirs.broken.done(), len(mine.recorded)
        finally:
            mine.end()
            theirs.end()
            endpoint.close()

    return run(work(), 500)


def harmless(count, seeds):
    statuses, said, broke, made = attacked(count, seeds)
    assert len(statuses) == count * len(seeds)
    assert not broke
    assert {200, 400} <= set(statuses)
    assert said == [f"answer {number}" for number in range(len(said))]
    assert made == len(said)


def test_malformed_bodies_of_all_dialects_are_refused_and_another_session_continues():
    harmless(1000, [0])


@pytest.mark.slow
def test_many_more_malformed_bodies():
    harmless(4000, [1, 2, 3])


UNREADABLE = [
    b'{"model": "policy", "\\ud800": 1}',
    b'{"model": "policy", "messages": [{"role": "user", "content": "go", "\\udc00": 1}]}',
    b'{"model": "policy", "messages": [], "temperature": ' + b"1" * 400 + b"}",
    b'{"model": "policy", "messages": [], "temperature": 1e400}',
    b'{"model": "policy", "messages": [], "metadata": {"a": ' + b"1" * 400 + b"}}",
    b'{"model": "policy", "messages": [], "seed": ' + b"1" * 5000 + b"}",
    b'{"model": "policy", "messages": [], "temperature": NaN}',
    b'{"model": "policy", "messages": [], "metadata": [-Infinity]}',
    b'{"model": "policy", "model": "policy", "messages": [{"role": "user", "content": "go"}]}',
    b'{"model": "policy", "messages": [{"role": "user", "role": "user", "content": "go"}]}',
    b'{"model": "policy", "messages": [], "metadata": ' + b"[" * 100 + b"]" * 100 + b"}",
    b'{"model": "policy", "messages": [], "metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    b"\xef\xbb\xbf{}",
    b'{"model": "policy"',
    b"\x1f\x8b\x08\x00",
]


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_bodies_that_are_not_strict_json_are_refused_first(path):
    def client(address):
        found = [(raw, *Client(address).post(path, raw, headers)) for raw in UNREADABLE for headers in HEADERS[:4]]
        return [(raw, status, said["error"]["code"], said["error"]["message"]) for raw, status, said in found]

    found, session = served(client)
    for raw, status, code, message in found:
        assert status == 400, (raw[:200], message)
        assert code in ("invalid_json", "invalid_value"), (raw[:200], code, message)
        assert message.startswith("the body:")
    assert session.num_calls == 0


ODD = [
    (CHAT, chat_body(response_format={"type": 5}), 400),
    (RESPONSES, {"model": "policy", "input": "go", "text": {"format": "text"}}, 400),
    (RESPONSES, {"model": "policy", "input": "go", "text": {"format": [1]}}, 400),
    (CHAT, chat_body(temperature=10**299), 400),
    (CHAT, chat_body(top_k=2**63), 400),
    (CHAT, chat_body(top_k=10**30), 400),
    (CHAT, chat_body(max_tokens=2**63), 400),
    (CHAT, chat_body(seed=2**64), 400),
    (CHAT, chat_body(stop=list(map(str, range(5000)))), 400),
    (CHAT, chat_body(stop="x" * 5000), 400),
    (CHAT, {"model": "x" * 100_000, "messages": [{"role": "user", "content": "go"}]}, 404),
    (CHAT, chat_body(tools=[{"type": "function", "function": {"name": "x" * 3000}}]), 400),
]


def test_odd_values_are_refused_in_one_short_line():
    def client(address):
        return [post(address, path, body) for path, body, _ in ODD]

    answers, session = served(client)
    for (path, body, expected), (status, said, _) in zip(ODD, answers, strict=True):
        assert status == expected, (str(body)[:100], said)
        check(path, b"", status, said)
    assert session.num_calls == 0


@pytest.mark.parametrize("headers", HEADERS, ids=lambda given: ascii(given)[:40])
def test_headers_that_say_nothing_sensible(headers):
    def client(address):
        raw = json.dumps(chat_body()).encode()
        return [Client(address).post(path, raw, headers)[0] for path in (CHAT, "/v1/nowhere")]

    assert served(client)[0] == [200, 404]


def test_results_of_many_calls_are_put_in_order_at_once():
    """Each took a walk over all calls before: minutes for a body of 8 MB."""
    from turnwise.messages import Message
    from turnwise.serve.dialects.ask import in_order

    class Name(str):
        compared = 0

        def __eq__(self, other):
            Name.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    ids = [Name(f"c{number}") for number in range(2000)]
    results = [(Name(f"c{number}"), Message("tool", str(number))) for number in reversed(range(2000))]
    assert [message.content for message in in_order(results, ids, "here")] == list(map(str, range(2000)))
    assert Name.compared < 20_000


# ---------------------------------------------------------------- a model that samples


POISON = [
    {"temperature": 1e-40},
    {"temperature": 1e-320},
    {"temperature": -1},
    {"top_p": 0},
    {"top_k": 2**63},
    {"top_k": 10**30},
    {"max_tokens": -1},
    {"stop": [""]},
    {"stop": list(map(str, range(5000)))},
    {"seed": 2**64},
    {"prompt": [1, 10**6]},
    {"prompt": [-1]},
    {"prompt": [10**30]},
    {"prompt": []},
    {"prompt": [1.5]},
    {"prompt": [1] * 500},
]


def test_requests_that_cannot_be_computed_fail_alone_before_a_model():
    """A tokenizer that knows more tokens than the model has: only the engine can tell."""
    tokenizer = byte_tokenizer()
    register()
    model = build_model(tokenizer, 32, 1, 256, 0)
    model.resize_token_embeddings(len(tokenizer) - 3)
    model.set_attn_implementation(NAME)
    render = renderer()
    poison = [*POISON, {"prompt": [len(tokenizer) - 1]}]
    good = {"model": "policy", "prompt": "amber", "max_tokens": 40, "seed": 5}

    async def work():
        engine = slot_engine(model, context=200, end_tokens=[], decode=render.decode, run=asyncio.to_thread)
        endpoint = Endpoint()
        address = endpoint.open(Public(engine, render, "policy"))
        ask = lambda changes: asyncio.to_thread(post, address, TEXT, {**good, **changes})
        try:
            alone = await ask({})
            beside = [asyncio.create_task(ask({})) for _ in range(4)]
            await until(lambda: engine.model.busy or all(task.done() for task in beside))
            refused = await asyncio.gather(*map(ask, poison))
            return alone, refused, [await task for task in beside]
        finally:
            endpoint.close()
            await engine.close()

    alone, refused, beside = run(work(), 100)
    for changes, (status, said, _) in zip(poison, refused, strict=True):
        assert status == 400, (changes, said)
        check(TEXT, b"", status, said)
    texts = [answer[1]["choices"][0]["text"] for answer in (alone, *beside)]
    assert len(texts[0]) > 0
    assert len(set(texts)) == 1


def test_a_call_that_the_engine_refuses_does_not_break_a_session():
    def client(address):
        return [
            post(address, TEXT, {"model": "policy", "prompt": [token], "max_tokens": 3})[0] for token in (7, 8, 9, 1, 2)
        ]

    engine = says("hello", render=hermes(), vocabulary=8)
    statuses, session = served(client, engine, max_turns=3)
    assert statuses == [200, 400, 400, 200, 200]
    assert len(session.recorded) == 3
    assert not session.broken.done() or session.broken.cancelled()

"""Bodies that no client would send, by a seed: valid ones of every dialect with something wrong in them."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"name": "amber"}'}}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "stop": ["x", "y"], "stream": False}
USER = {"role": "user", "content": "go"}

VALID = {
    CHAT: {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "go"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "blue"},
        ],
        "tools": [{"type": "function", "function": {"name": "get", "description": "d", "parameters": SCHEMA}}],
        "tool_choice": "auto",
        "max_tokens": 4,
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": True},
        "metadata": {"a": "b"},
        "logprobs": True,
        "n": 1,
        "frequency_penalty": 0,
        **SAMPLING,
    },
    TEXT: {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 4, "logprobs": 1, "echo": False, **SAMPLING},
    RESPONSES: {
        "model": "policy",
        "instructions": "be brief",
        "input": [
            USER,
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "get", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "blue"},
        ],
        "tools": [{"type": "function", "name": "get", "parameters": SCHEMA}],
        "tool_choice": "auto",
        "max_output_tokens": 4,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "temperature": 0.5,
        "stream": False,
    },
    MESSAGES: {
        "model": "policy",
        "system": [{"type": "text", "text": "be brief"}],
        "max_tokens": 4,
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "get", "input": {"name": "amber"}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "blue"}]},
        ],
        "tools": [{"name": "get", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "top_k": 3,
        "stream": False,
    },
}
NASTY = [
    None,
    True,
    False,
    0,
    -1,
    2**31,
    2**63,
    -(2**63) - 1,
    2**64,
    10**30,
    10**400,
    0.0,
    -0.5,
    1e-40,
    1e-320,
    1e308,
    float("nan"),
    float("inf"),
    "",
    " ",
    "\x00",
    "\ud800",
    "a\udfffb",
    "\u2028",
    "\U0010ffff",
    "<|im_end|>",
    "{{ 7 * 7 }}",
    "x" * 3000,
    "nan",
    "[" * 2000,
    "\\ud800",
    '{"a": "\\ud800"}',
    '{"a": NaN}',
    '{"a": 1, "a": 2}',
    '{"a": 1' + "0" * 400 + "}",
    [],
    {},
    [[]],
    [None],
    [""],
    ["\ud800"],
    list(map(str, range(5000))),
    [{}] * 50,
    {"": ""},
    {"\ud800": 1},
    {"type": None},
    {"type": {"type": []}},
    {"type": "\ud800"},
    {"role": "user", "content": "go"},
    {"a": float("-inf")},
]
"""Values that stand where others should."""


def nested(depth: int, inner: object = 1) -> object:
    for place in range(depth):
        inner = [inner] if place % 2 else {"a": inner}
    return inner


def places(value: object, path: tuple = ()) -> list[tuple]:
    """The way to every value within."""
    found = [path]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        found += places(part, (*path, name))
    return found


def mutated(draw: random.Random, body: object) -> object:
    """A body with one value replaced, removed, doubled, or another field beside it."""
    path = draw.choice(places(body)[1:] or [()])
    if not path:
        return draw.choice(NASTY)
    *way, last = path
    holder: Any = body
    for name in way:
        holder = holder[name]
    kind = draw.randrange(5)
    if kind == 0:
        holder[last] = nested(draw.choice([3, 30, 70, 200]), draw.choice([1, "\ud800"]))
    elif kind == 1:
        del holder[last]
    elif kind == 2 and isinstance(holder, dict):
        holder[draw.choice(["\ud800", "", "\n", "x" * 3000, "n", "logit_bias", "__class__", "nul\x00"])] = 1
    elif kind == 3 and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[last]))
    else:
        holder[last] = copy.deepcopy(draw.choice(NASTY))
    return body


def damaged(draw: random.Random, raw: bytes) -> bytes:
    """Bytes cut, flipped, doubled, or with something JSON has no word for."""
    kind = draw.randrange(6)
    place = draw.randrange(len(raw) + 1)
    if kind == 0:
        return raw[:place]
    if kind == 1:
        return raw[:place] + bytes([draw.randrange(256)]) + raw[place + 1 :]
    if kind == 2:
        return raw[:-1] + b", " + raw[1:]  # every field twice
    if kind == 3:
        return raw + draw.choice([b"}", b"\x00", b"\xff", raw])
    if kind == 4:
        return draw.choice([b"\xef\xbb\xbf", b"\xff\xfe", b" "]) + raw
    return raw.replace(b"0.5", draw.choice([b"NaN", b"-Infinity", b"1e999", b"0" * 400, b"1" * 5000, b"0x1"]))


def bodies(seed: int, count: int):
    """(path, body) of so many requests."""
    draw = random.Random(seed)
    for _ in range(count):
        path = draw.choice(list(VALID))
        body: object = copy.deepcopy(VALID[path])
        for _ in range(draw.choice([1, 1, 1, 2, 4])):
            body = mutated(draw, body)
        raw = json.dumps(body).encode()
        yield path, damaged(draw, raw) if draw.random() < 0.3 else raw


HEADERS = [
    {},
    {"content-type": "text/plain"},
    {"content-type": "multipart/form-data; boundary=x"},
    {"content-type": "\xff"},
    {"content-encoding": "gzip"},
    {"x-stainless-retry-count": "\xb2"},
    {"x-stainless-retry-count": "9" * 500},
    {"idempotency-key": "\xff" * 300},
    {"host": "["},
    {"host": "a b"},
    {"accept": "\xff"},
]
"""Headers that may come with them."""

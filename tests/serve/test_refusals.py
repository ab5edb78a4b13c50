"""What is not served: the right status and code, in the words of each dialect, and nothing recorded."""

import asyncio
import json
import socket

import pytest

from serve.serving import chat_body, connect, hermes, post, served
from support.acting import hang, renderer, says, until
from turnwise.types import Status

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "go"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": "{}"}}


def message(**fields):
    return {"model": "policy", "max_tokens": 9, "messages": USER, **fields}


def answer(**fields):
    return {"role": "assistant", "content": None, **fields}


MALFORMED = [
    (CHAT, b"{", 400, "invalid_json"),
    (CHAT, b"\xff\xfe", 400, "invalid_json"),
    (CHAT, b"", 400, "invalid_json"),
    (CHAT, b"[" * 100_000, 400, "invalid_json"),
    (CHAT, b"[1]", 400, "invalid_type"),
    (CHAT, b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, "invalid_value"),
    (CHAT, {"messages": USER}, 400, "missing_required_parameter"),
    (CHAT, {"model": "policy"}, 400, "missing_required_parameter"),
    (CHAT, {"model": "policy", "messages": "go"}, 400, "invalid_type"),
    (CHAT, {"model": "policy", "messages": ["go"]}, 400, "invalid_type"),
    (CHAT, {"model": "policy", "messages": [{"role": "robot", "content": "go"}]}, 400, "invalid_value"),
    (CHAT, {"model": "policy", "messages": [{"role": "user", "content": IMAGE}]}, 400, "unsupported_part"),
    (CHAT, {"model": "policy", "messages": [{"role": "user", "content": 7}]}, 400, "invalid_type"),
    (CHAT, {"model": "gpt-4", "messages": USER}, 404, "model_not_found"),
    (CHAT, chat_body(n=2), 400, "unsupported_parameter"),
    (CHAT, chat_body(logit_bias={"5": 1}), 400, "unsupported_parameter"),
    (CHAT, chat_body(temperature="hot"), 400, "invalid_type"),
    (CHAT, chat_body(temperature=-1), 400, "invalid_value"),
    (CHAT, chat_body(max_tokens=0), 400, "invalid_value"),
    (CHAT, chat_body(max_tokens=True), 400, "invalid_type"),
    (CHAT, chat_body(stop=[""]), 400, "invalid_value"),
    (CHAT, chat_body(stream="yes"), 400, "invalid_type"),
    (CHAT, chat_body(top_logprobs=3, logprobs=True), 400, "unsupported_value"),
    (CHAT, chat_body(response_format={"type": "yaml"}), 400, "unsupported_value"),
    (CHAT, chat_body(tools=[{"type": "web_search"}]), 400, "unsupported_value"),
    (CHAT, chat_body(tools=[{"type": "function", "function": {"name": "a b"}}]), 400, "invalid_value"),
    (CHAT, {"model": "policy", "messages": [*USER, {"role": "tool", "tool_call_id": "c", "content": "x"}]}, 400, None),
    (CHAT, {"model": "policy", "messages": [*USER, answer(tool_calls=[{**CALL, "id": ""}])]}, 400, None),
    (CHAT, {"model": "policy", "messages": [*USER, answer(tool_calls=[{"id": "c1"}])]}, 400, None),
    (CHAT, chat_body("x" * 5000), 400, "context_length_exceeded"),
    (CHAT, chat_body("x" * 5000, stream=True), 400, "context_length_exceeded"),
    (TEXT, {"model": "policy"}, 400, "invalid_type"),
    (TEXT, {"model": "policy", "prompt": ["one", "two"]}, 400, "invalid_type"),
    (TEXT, {"model": "policy", "prompt": [-1]}, 400, "invalid_value"),
    (TEXT, {"model": "policy", "prompt": [1 << 40]}, 400, "invalid_value"),
    (TEXT, {"model": "policy", "prompt": "a", "echo": True}, 400, "unsupported_parameter"),
    (TEXT, {"model": "policy", "prompt": "a", "logprobs": 5}, 400, "unsupported_value"),
    (RESPONSES, {"model": "policy"}, 400, "missing_required_parameter"),
    (RESPONSES, {"model": "policy", "input": [{"type": "file_search_call"}]}, 400, "unsupported_value"),
    (RESPONSES, {"model": "policy", "input": "go", "background": True}, 400, "unsupported_parameter"),
    (
        RESPONSES,
        {"model": "policy", "input": "go", "previous_response_id": "resp_x"},
        404,
        "previous_response_not_found",
    ),
    (MESSAGES, {"model": "policy", "messages": USER}, 400, "missing_required_parameter"),
    (MESSAGES, message(model="claude"), 404, "model_not_found"),
    (MESSAGES, message(messages=[{"role": "system", "content": "x"}]), 400, "invalid_value"),
    (MESSAGES, message(messages=[{"role": "user", "content": [{"type": "image"}]}]), 400, "unsupported_value"),
    (MESSAGES, message(messages=[*USER, {"role": "assistant", "content": "The"}]), 400, "unsupported_value"),
    (MESSAGES, message(tools=[{"type": "bash_20250124", "name": "bash"}]), 400, "unsupported_value"),
]


def test_malformed_requests_are_refused_and_nothing_is_recorded():
    def client(address):
        return [post(address, path, body)[:2] for path, body, _, _ in MALFORMED]

    given, session = served(client)
    for (path, body, status, code), (found, said) in zip(MALFORMED, given, strict=True):
        assert found == status, (body, said)
        error = said["error"]
        assert error["message"]
        assert "\n" not in error["message"]
        assert code in (None, error["code"]), (body, error)
        assert ("type" in said) == (path == MESSAGES)
    assert session.recorded == session.in_flight == []
    assert session.engine.prompts == []
    assert session.num_calls == 0


def test_keys():
    def client(address):
        return [
            post(address, CHAT, chat_body(), key="wrong"),
            post(address, CHAT, chat_body(), key=""),
            post(address, MESSAGES, message(), key="wrong"),
            post(address, CHAT, chat_body(), key="wrong", x_api_key=address.key),
            get(address, "/v1/models", "wrong"),
        ]

    answers, session = served(client)
    assert [status for status, *_ in answers] == [401, 401, 401, 200, 401]
    assert answers[0][1]["error"]["code"] == "invalid_api_key"
    assert answers[2][1]["error"]["type"] == "authentication_error"
    assert all(headers["x-should-retry"] == "false" for status, _, headers in answers[:3])
    assert len(session.recorded) == 1


def get(address, path, key):
    connection = connect(address)
    connection.request("GET", path, headers={"authorization": f"Bearer {key}"})
    response = connection.getresponse()
    said = json.loads(response.read())
    connection.close()
    return response.status, said, dict(response.getheaders())


def test_paths_that_are_not_served():
    def client(address):
        return [
            post(address, "/v1/embeddings", {})[0],
            get(address, CHAT, address.key)[0],
            get(address, "/v1/models/gpt-4", address.key)[0],
        ]

    assert served(client)[0] == [404, 405, 404]


def test_a_body_that_is_too_large():
    def client(address):
        fits = post(address, CHAT, chat_body("x" * 1000))[0]
        return fits, post(address, CHAT, chat_body("x" * 9000)), post(address, MESSAGES, message(system="x" * 9000))

    (fits, openais, anthropics), session = served(client, largest_body=8192)
    assert fits == 200
    assert (openais[0], openais[1]["error"]["code"]) == (413, "request_too_large")
    assert (anthropics[0], anthropics[1]["error"]["type"]) == (413, "request_too_large")
    assert len(session.recorded) == 1


def test_a_body_without_end_is_not_kept():
    def client(address):
        """Chunks without an announced length, far beyond the limit."""
        connection = connect(address)
        headers = {"authorization": f"Bearer {address.key}", "transfer-encoding": "chunked"}
        try:
            connection.request("POST", CHAT, iter([b"x" * 4096] * 64), headers, encode_chunked=True)
            return connection.getresponse().status
        except ConnectionError:  # refused while we were still writing
            return 413
        finally:
            connection.close()

    assert served(client, largest_body=8192)[0] == 413


def test_tools_need_a_format():
    def client(address):
        return post(address, CHAT, chat_body(tools=[TOOL]))

    (status, said, _), session = served(client, render=renderer())
    assert status == 400
    assert "rollout.tools" in said["error"]["message"]
    assert session.recorded == []


def test_a_session_that_is_over():
    async def client(address, session, endpoint):
        first = await asyncio.to_thread(post, address, CHAT, chat_body())
        session.end()
        second = await asyncio.to_thread(post, address, CHAT, chat_body())
        return first[0], second[0], second[1]["error"]["code"]

    (first, second, code), session = served(client)
    assert (first, second, code) == (200, 410, "session_over")
    assert len(session.recorded) == 1


def test_a_key_of_a_session_that_was():
    async def client(address, session, endpoint):
        endpoint.end(address.key)
        return await asyncio.to_thread(post, address, CHAT, chat_body())

    (status, said, _), _ = served(client)
    assert (status, said["error"]["code"]) == (410, "session_over")


def test_turns_run_out():
    def client(address):
        return [post(address, CHAT, chat_body(text))[:2] for text in "abc"]

    answers, session = served(client, max_turns=2)
    assert [status for status, _ in answers] == [200, 200, 410]
    assert answers[2][1]["error"]["code"] == "too_many_turns"
    assert session.refused is Status.too_many_turns
    assert len(session.recorded) == 2


def test_an_engine_that_fails_is_no_answer():
    def broken(prompt, session, seed):
        raise RuntimeError("out of memory")

    def client(address):
        return post(address, CHAT, chat_body()), post(address, MESSAGES, message())

    async def watched(address, session, endpoint):
        answers = await asyncio.to_thread(client, address)
        return answers, session.broken.exception()

    ((openais, anthropics), error), session = served(watched, says(broken))
    assert (openais[0], openais[1]["error"]["code"]) == (500, "engine_failure")
    assert (anthropics[0], anthropics[1]["error"]["type"]) == (500, "api_error")
    assert "out of memory" in str(error)
    assert session.recorded == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_what_it_asked_for(stream, monkeypatch):
    monkeypatch.setattr("turnwise.serve.session.PATIENCE", 0.05)
    engine = says(lambda prompt, session, seed: hang(), render=hermes())

    async def client(address, session, endpoint):
        connection = connect(address)
        body = json.dumps(chat_body(stream=stream))
        connection.request("POST", CHAT, body, {"authorization": f"Bearer {address.key}"})
        await until(lambda: engine.speaking)
        if stream:
            assert connection.sock.recv(12) == b"HTTP/1.1 200"  # the stream has begun
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        await until(lambda: not session.in_flight)
        await until(lambda: not engine.speaking)
        return True

    _, session = served(client, engine)
    assert session.recorded == []
    assert session.turns() == []

"""A model served to people: their own settings, nothing recorded, and the command that does it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from serve.serving import chat_body, connect, hermes, post
from support.acting import hang, run, says, until
from turnwise.cli.commands import main
from turnwise.learn.tiny import build_model, build_tokenizer
from turnwise.serve.dialects.ask import Ask, Refusal
from turnwise.serve.endpoint import Endpoint
from turnwise.serve.public import Public, sampling_of

CHAT = "/v1/chat/completions"


def offered(client, engine=None):
    """What a client makes of a model served to people."""

    async def work():
        endpoint = Endpoint()
        public = Public(engine or says("hello", render=hermes()), hermes(), "mine")
        try:
            return await client(endpoint.open(public, "a key"), public)
        finally:
            endpoint.close()

    return run(work(), 60)


def test_clients_choose_how_is_sampled():
    asked = Ask("mine", max_tokens=7, stop=("x",), settings={"temperature": 0, "top_p": 0.5, "top_k": -1, "seed": 3})
    sampling = sampling_of(asked, room=100)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.0, 0.5, 0, 7)
    assert sampling.stop == ("x",)
    with pytest.raises(Refusal, match="frequency_penalty is not supported"):
        sampling_of(Ask("mine", settings={"frequency_penalty": 1}), room=100)


def test_requests_are_answered_and_equal_seeds_sample_alike():
    seeds = []

    def say(prompt, session, seed):
        seeds.append(seed)
        return "hello"

    async def client(address, public):
        bodies = [chat_body(model="mine"), chat_body(model="mine", seed=5), chat_body(model="mine", seed=5)]
        bodies += [chat_body(model="policy"), chat_body("x" * (1 << 21), model="mine")]
        return [await asyncio.to_thread(post, address, CHAT, body) for body in bodies]

    answers = offered(client, says(say, render=hermes(), context=500))
    assert [status for status, *_ in answers] == [200, 200, 200, 404, 400]
    assert answers[0][1]["choices"][0]["message"]["content"] == "hello"
    assert answers[4][1]["error"]["code"] == "context_length_exceeded"
    assert seeds[1] == seeds[2] != seeds[0]


def test_who_hangs_up_ends_the_sampling():
    engine = says(lambda *call: hang(), render=hermes())

    async def client(address, public):
        connection = connect(address)
        headers = {"authorization": f"Bearer {address.key}"}
        connection.request("POST", CHAT, json.dumps(chat_body(model="mine")), headers)
        await until(lambda: engine.speaking)
        connection.close()
        await until(lambda: not engine.speaking)
        return True

    assert offered(client, engine)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(["start amber"])
    build_model(tokenizer, 32, 1, 256, 0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_command_serves_a_model_until_it_is_told_to_stop(model):
    command = [
        sys.executable,
        "-m",
        "turnwise.cli",
        "serve",
        str(model),
        "--port",
        "0",
        "--key",
        "k",
        "--name",
        "mine",
    ]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings) as process:
        try:
            said = [process.stdout.readline() for _ in range(4)]
            where = said[1].split()[1]
            body = {"model": "mine", "messages": [{"role": "user", "content": "amber"}], "max_tokens": 4}
            request = urllib.request.Request(
                f"{where}/chat/completions", json.dumps(body).encode(), {"authorization": "Bearer k"}
            )
            made = json.load(urllib.request.urlopen(request, timeout=600))
            assert made["usage"]["completion_tokens"] <= 4
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=600) == 0
        finally:
            process.kill()


def test_mistakes_of_the_command_are_one_line(model, tmp_path, capsys):
    for arguments, words in [
        (["nowhere"], "give a run folder or a model folder"),
        ([str(tmp_path)], "config.json"),
        ([str(model), "--checkpoint", "3"], "--checkpoint goes with a run folder"),
        ([str(model), "--port", "70000"], "0 to 65535"),
        ([str(model), "rollout.toolz=hermes"], "did you mean tools?"),
        ([str(model), "--host", "203.0.113.1", "--port", "0"], "choose another host or port"),
    ]:
        assert main(["serve", *arguments]) == 2
        said = capsys.readouterr().err.strip()
        assert words in said
        assert "\n" not in said

"""Builders for tests of the endpoint: sessions with a client at the other end, attempts with an agent."""

from __future__ import annotations

import asyncio
import http.client
import json
from functools import cache, partial
from urllib.parse import urlsplit

from support.acting import Puppet, byte_tokenizer, limits, run, says
from turnwise.engines.base import Sampling
from turnwise.envs.base import Reply
from turnwise.rollout.attempt import run_attempt
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.scene import Attempt, Scene
from turnwise.serve.agents.agent import names_of, run_function
from turnwise.serve.agents.drive import Driver
from turnwise.serve.endpoint import Endpoint
from turnwise.serve.session import Session
from turnwise.types import Task

TASK = Task("t-1", "hops", {"start": "amber"})


@cache
def hermes():
    """A renderer that reads and writes tool calls."""
    return Renderer(byte_tokenizer(), tools="hermes")


def make_session(engine=None, render=None, *, sampling=None, **bounds):
    render = render or hermes()
    engine = engine or says(render=render)
    which = Attempt(0, "train", TASK)
    return Session(which, Scene(engine, render, sampling or Sampling(200), limits(**bounds)), "policy")


def served(client, engine=None, render=None, *, largest_body=1 << 20, seconds=100, **how):
    """(what a client makes of the address of a session, the session). A plain client runs in a thread; one that is a
    coroutine function gets session and endpoint too."""

    async def work():
        endpoint = Endpoint(largest_body=largest_body)
        session = make_session(engine, render, **how)
        try:
            address = endpoint.open(session)
            if asyncio.iscoroutinefunction(client):
                return await client(address, session, endpoint), session
            return await asyncio.to_thread(client, address), session
        finally:
            session.end()
            endpoint.close()

    return run(work(), seconds)


def agent_of(function):
    return partial(run_function, function, names_of(function, "test"))


def judged(**outcome):
    """An environment that is content with whatever it hears first."""
    return Puppet(Reply(finished=True, **{"outcome": 1.0, **outcome}))


async def driven(agent, environment=None, engine=None, render=None, *, endpoint=None, which=None, **bounds):
    """One attempt by an agent, which is a function or a driver's agent."""
    render = render or hermes()
    own = endpoint or Endpoint()
    agent = agent if isinstance(agent, partial) else agent_of(agent)
    environment = judged() if environment is None else environment
    try:
        scene = Scene(engine or says(render=render), render, Sampling(200), limits(**bounds))
        return await run_attempt(which or Attempt(0, "train", TASK), lambda: environment, scene, Driver(agent, own))
    finally:
        if endpoint is None:
            own.close()


# ---------------------------------------------------------------- HTTP by hand


def connect(address):
    parts = urlsplit(address.base_url)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=600)


def post(address, path, body, *, key=None, **headers):
    """(status, what the response says, its headers); a body that is no bytes is sent as JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"authorization": f"Bearer {address.key if key is None else key}", "content-type": "application/json"}
    connection = connect(address)
    try:
        connection.request("POST", path, raw, {**given, **{k.replace("_", "-"): v for k, v in headers.items()}})
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else None, dict(response.getheaders())
    finally:
        connection.close()


def chat_body(*texts, **fields):
    messages = [{"role": "user", "content": text} for text in texts or ("go",)]
    return {"model": "policy", "messages": messages, **fields}

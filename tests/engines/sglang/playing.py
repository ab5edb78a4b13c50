"""Played SGLang servers and engines over them, for tests."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import torch

from engines.sglang.played import PlayedSglang
from support import acting
from support.acting import CONTEXT, VOCABULARY, tiny_model
from turnwise.engines.remote.connection import Connection
from turnwise.engines.remote.router import Router
from turnwise.engines.sglang.engine import SglangEngine
from turnwise.engines.sglang.server import SglangServer
from turnwise.weights.served_files import ServedFiles

run, until = partial(acting.run, seconds=200.0), partial(acting.until, seconds=100.0)
END = 0
SETTINGS = {"slots": 4, "context": CONTEXT, "vocabulary": VOCABULARY, "end_tokens": [END], "decode": str}


def weights_of(seed):
    return tiny_model(seed=seed, tied=True).state_dict()


def played(seed=9, **named):
    """A server that begins with weights of its own."""
    given = {"decode": str, "own_ends": [END], "context": CONTEXT, **named}
    return PlayedSglang(tiny_model(seed=seed, tied=True), **given)


def engine_on(server, files, **named):
    """An engine on one server, that nobody watches."""
    service = SglangServer(Connection(server.url))
    return SglangEngine(service, files, tensors=weights_of(0), name=server.url, **{**SETTINGS, **named})


def router_on(servers, folder, **named):
    """An engine over servers that has the weights of seed 0 as version 0."""
    store = ServedFiles(torch.float32, folder)
    store.publish(weights_of(0), 0)
    start = lambda number: engine_on(servers[number], store, first_weights=store.newest)
    settings = {"check_seconds": 0.02, "answer_seconds": 5.0, "starts": None, **named}
    return Router(start, len(servers), store, **settings)


@asynccontextmanager
async def serving(folder, num_servers=2, **named):
    """(servers that listen, an open router over them)."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(played(seed=9 + number)) for number in range(num_servers)]
        router = router_on(servers, folder, **named)
        stack.push_async_callback(router.close)
        await router.open()
        yield servers, router


@asynccontextmanager
async def one_engine(folder, server=None, **named):
    """(a server that listens, an engine on it that has the weights of seed 0 as version 0)."""
    files = ServedFiles(torch.float32, folder)
    async with server or played() as server:
        engine = engine_on(server, files, **named)
        try:
            await engine.load(weights_of(0), 0)
            yield server, engine
        finally:
            await engine.close()
            files.close()

"""Played vLLM servers and engines over them, for tests."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import torch

from support import acting
from support.acting import CONTEXT, VOCABULARY, served, slot_engine, tiny_model
from turnwise.engines.remote.connection import Connection
from turnwise.engines.remote.router import Router
from turnwise.engines.vllm.engine import VllmEngine
from turnwise.engines.vllm.server import VllmServer
from turnwise.testing.played_vllm import PlayedVllm
from turnwise.weights.served_files import ServedFiles
from turnwise.weights.vllm_file import FileTransfer

run, until = partial(acting.run, seconds=200.0), partial(acting.until, seconds=100.0)
"""A first call may import much, in the event loop, on a busy machine."""
END = 0
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
SETTINGS = {"slots": 4, "context": CONTEXT, "vocabulary": VOCABULARY, "end_tokens": [END]}


def weights_of(seed):
    return tiny_model(seed=seed, tied=True).state_dict()


def played(seed=9, **named):
    """A server that begins with weights of its own."""
    engine = slot_engine(served(tiny_model(seed=seed, tied=True)), end_tokens=[END], slots=8)
    return PlayedVllm(engine, vocabulary=VOCABULARY, end_tokens=[END], tied=TIED, **named)


def engine_on(server, folder, **named):
    """An engine on one server, that nobody watches."""
    named = {"version": None, **SETTINGS, **named}
    service = VllmServer(Connection(server.url))
    return VllmEngine(service, FileTransfer(torch.float32, folder), tensors=weights_of(0), name=server.url, **named)


def router_on(servers, folder, sleeps=False, **named):
    """An engine over servers that has the weights of seed 0 as version 0."""
    store = ServedFiles(torch.float32, folder)
    store.publish(weights_of(0), 0)

    def start(number):
        newest = store.newest
        return engine_on(servers[number], folder, version=newest.version, first_weights=newest, sleeps=sleeps)

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

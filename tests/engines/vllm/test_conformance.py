"""vLLM keeps the rules of every engine: one of our own, and one behind HTTP."""

from __future__ import annotations

from contextlib import ExitStack

from engines import conformance
from engines.conformance import CONTEXT, END, SLOTS, Kind
from engines.vllm.serving import local, remote, server
from turnwise.learn.policy import load_model, load_tokenizer

SETTINGS = {"slots": SLOTS, "context": CONTEXT, "end_tokens": [END]}


def start_local(folder):
    """An engine that has started: the tests' own deadlines are for less."""
    tokenizer = load_tokenizer(folder)
    engine = local(load_model(folder), tokenizer, guidance=conformance.guidance(tokenizer), **SETTINGS)
    engine.service.create(CONTEXT)
    return engine


def start_remote(folder):
    """An engine whose server ends when it is closed."""
    running = ExitStack()
    url = running.enter_context(
        server(folder, "--structured-outputs-config", '{"backend": "guidance"}', context=CONTEXT)
    )
    guidance = conformance.guidance(load_tokenizer(folder))
    engine = remote(url, load_model(folder), guidance=guidance, **SETTINGS)
    close = engine.close

    async def close_both():
        await close()
        running.close()

    engine.close = close_both
    return engine


conformance.KINDS.clear()
conformance.KINDS.update({"vllm": Kind(start_local), "vllm server": Kind(start_remote)})

from engines.test_conformance import *  # noqa: E402, F403

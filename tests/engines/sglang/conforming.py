"""An engine over a played SGLang server, as the conformance suite starts it. SGLang itself was not run."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from engines.sglang.played import PlayedSglang
from turnwise.engines.base import vocabulary_of
from turnwise.engines.remote.connection import Connection
from turnwise.engines.sglang.engine import SglangEngine
from turnwise.engines.sglang.server import SglangServer
from turnwise.learn.policy import load_model, load_tokenizer
from turnwise.testing.played_server import in_thread
from turnwise.weights.served_files import ServedFiles


def start_played(folder, *, slots, context, end):
    """An engine whose server ends when it is closed."""
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    running = ExitStack()
    server = PlayedSglang(model, decode=tokenizer.decode, own_ends=[end], context=context, slots=slots)
    running.enter_context(in_thread(server))
    files = ServedFiles(torch.float32, folder / "weights")
    running.callback(files.close)
    engine = SglangEngine(
        SglangServer(Connection(server.url)),
        files,
        slots=slots,
        context=context,
        vocabulary=vocabulary_of(model),
        end_tokens=[end],
        tensors=model.state_dict(),
        decode=tokenizer.decode,
        first_weights=files.publish(model.state_dict(), 0),
    )
    close = engine.close

    async def close_both():
        await close()
        running.close()

    engine.close = close_both
    return engine

"""Asks a vLLM for routes and writes them down: what tests/engines/vllm/test_routes.py runs in a process of its own.

python -m engines.vllm.ask_routes local FOLDER
python -m engines.vllm.ask_routes server FOLDER
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from engines.vllm import serving
from support.acting import byte_tokenizer
from support.mixture import tiny_mixture
from turnwise.engines.base import Sampling
from turnwise.engines.remote.connection import Connection
from turnwise.engines.vllm.local import LocalSettings, LocalVllm
from turnwise.engines.vllm.server import ROUTES_OPTION, VllmServer
from turnwise.learn.learner import save_policy
from turnwise.learn.routers import Routers
from turnwise.messages import Message
from turnwise.routes import first_new
from turnwise.types import Status, Trajectory, Turn

CONTEXT, SHORT = 192, 40
CHANGES = {
    "vocab_size": 512,
    "num_hidden_layers": 3,
    "mlp_only_layers": [0],
    "pad_token_id": 0,
    "head_dim": 32,
    "moe_intermediate_size": 32,
}
"""The first layer of the mixture has no experts: vLLM has a place for its routes, and turnwise has none. On a CPU vLLM
computes no narrower heads, and loads no weights again into experts that it had to pad."""


def mixture(seed=0):
    return tiny_mixture(seed=seed, **CHANGES)


async def played(engine, seed):
    """An attempt of three turns that shares its first prompt with others, asked for new routes only."""
    task, random = np.random.default_rng(0).integers(3, 512, SHORT), np.random.default_rng(seed)
    prompt, turns = task, []
    for number in range(3):
        sampling = Sampling(6, routes=first_new(prompt, turns[-1] if turns else None))
        found = await engine.generate(prompt, sampling, session=f"attempt {seed}", seed=10 * seed + number)
        assert len(found.routes) == len(prompt) + len(found.tokens) - 1 - sampling.routes  # type: ignore[operator]
        said = Message("assistant", "")
        turns.append(
            Turn(prompt, found.tokens, found.logprobs, found.versions, found.stop, 0.0, said, routes=found.routes)
        )
        prompt = np.concatenate([prompt, found.tokens, random.integers(3, 512, 4)])
    return Trajectory(tuple(turns), Status.finished)


async def work(engine, model):
    """Attempts at once, some with other weights: the routes are then of those."""
    attempts = list(await asyncio.gather(*(played(engine, seed) for seed in range(2))))
    await engine.load(mixture(seed=1).state_dict(), 1)
    attempts.append(await played(engine, 2))
    await engine.close()
    return attempts


def main(kind: str, folder: Path) -> None:
    import pickle

    model = mixture()
    named = {"slots": 4, "context": CONTEXT, "end_tokens": [2], "route_layers": Routers(model).layers}
    if kind == "local":
        settings = replace(LocalSettings(4, "float32", "cpu", 1, cache=64), routes=True)
        service = LocalVllm(lambda path: save_policy(model, byte_tokenizer(), path), settings)
        found = asyncio.run(work(serving.engine_on(service, model, "float32", **named), model))
    else:
        save_policy(model, byte_tokenizer(), folder)
        with serving.server(folder, ROUTES_OPTION, context=CONTEXT) as url:
            engine = serving.engine_on(
                VllmServer(Connection(url), routes=True), model, "float32", first_weights=model.state_dict(), **named
            )
            found = asyncio.run(work(engine, model))
    (folder / "attempts.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""A played vLLM server in a process of its own, for benchmarks/cluster_cells.py: vLLM's routes over our engine.

    python benchmarks/played_vllm.py RECIPE FOLDER PORT [key=value ...]

It serves the model of a folder. SIGUSR1 closes its port, so that connections are refused; SIGUSR2 opens it again.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from turnwise.assemble.engines import replica_engine
from turnwise.assemble.model import renderer_of
from turnwise.engines.base import vocabulary_of
from turnwise.learn.policy import load_model, load_tokenizer
from turnwise.recipe.parse import load_recipe
from turnwise.testing.played_vllm import PlayedVllm

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


async def main(recipe_path: str, folder: str, port: str, *overrides: str) -> None:
    recipe = load_recipe(Path(recipe_path), overrides)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    engine = replica_engine(recipe, model, tokenizer, 0)
    server = PlayedVllm(
        engine,
        vocabulary=vocabulary_of(model),
        end_tokens=list(renderer_of(recipe, model, tokenizer).end_tokens),
        tied=TIED if model.config.tie_word_embeddings else None,
    )
    server.port = int(port)
    loop = asyncio.get_running_loop()
    changes: asyncio.Queue[bool] = asyncio.Queue()
    loop.add_signal_handler(signal.SIGUSR1, changes.put_nowait, False)
    loop.add_signal_handler(signal.SIGUSR2, changes.put_nowait, True)
    async with server:
        print("listens", flush=True)
        while True:
            await (server.listen() if await changes.get() else server.vanish())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""A played vLLM server in a process of its own: python play.py FOLDER. It prints its port when it listens."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.acting import served, slot_engine
from turnwise.learn.policy import load_model, load_tokenizer
from turnwise.testing.played_vllm import PlayedVllm
from turnwise.weights.tied import tied_names


def server_of(folder, context, slots=8):
    """A played server on the model of a folder."""
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    ends = [tokenizer.eos_token_id]
    engine = slot_engine(served(model), slots=slots, context=context, end_tokens=ends, decode=tokenizer.decode)
    tied = tied_names(model.state_dict())
    return PlayedVllm(engine, vocabulary=model.config.vocab_size, end_tokens=ends, tied=tied)


async def main(folder, context, port):
    server = server_of(folder, context)
    server.port = port
    await server.listen()
    print(server.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))

"""A tiny random model of bytes and an engine that follows grammars with it."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from support.acting import byte_tokenizer, inline, served, slot_engine
from turnwise.engines.base import Sampling
from turnwise.engines.guidance import Guidance

END = 2
BYTES = 259
PADDED = 264
"""Rows of the model: more than the tokenizer has tokens."""
PROMPT = np.array([1, 60, 61, 62], np.int32)


@cache
def byte_model(seed=0):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=PADDED,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


def guidance(**changes):
    return Guidance(byte_tokenizer(), **{"vocabulary": PADDED, "end_tokens": [END], **changes})


def guided_engine(*, run=inline, model=None, context=2048, **settings):
    tokenizer = byte_tokenizer()
    decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)
    how = {"end_tokens": [END], "decode": decode, "guidance": guidance(), "slots": 16, "context": context}
    return slot_engine(served(model or byte_model()), run=run, **{**how, **settings})


async def sampled(engine, grammar, *, count=1, max_tokens=1500, prompt=PROMPT, **shape):
    """Completions under a grammar, with seeds of their own."""
    import asyncio

    sampling = Sampling(max_tokens, grammar=grammar, **shape)
    calls = [engine.generate(prompt, sampling, session=f"s{seed}", seed=seed) for seed in range(count)]
    return await asyncio.gather(*calls)


def text_of(completion):
    tokens = [token for token in completion.tokens.tolist() if token != END]
    return byte_tokenizer().decode(tokens, skip_special_tokens=False)

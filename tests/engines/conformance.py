"""Engines that the conformance suite holds to the same rules, and the small model they sample from.

Another engine is an entry in `KINDS`: how it is started on a folder that transformers can load.
"""

from __future__ import annotations

import asyncio
import math
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from engines.remote.processes import start_process, start_router
from engines.sglang.conforming import start_played
from support.acting import inline
from turnwise.engines.base import Engine, Sampling
from turnwise.engines.guidance import Guidance
from turnwise.engines.scripted import ScriptedEngine
from turnwise.engines.slots.engine import SlotEngine
from turnwise.engines.slots.model import SlotModel
from turnwise.learn.attention import NAME, register
from turnwise.learn.policy import load_model, load_tokenizer

LETTERS = string.ascii_letters + string.digits + "."
END = 0
VOCABULARY = len(LETTERS) + 1
CONTEXT = 256
SLOTS = 8


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine to be checked."""

    start: Callable[[Path], Engine]
    """The engine of the model and tokenizer in a folder, with a context of CONTEXT, END as its end token, and as few
    requests at once as is usual: some tests ask for more."""
    has_model: bool = True
    """Whether it samples from the model, so that its logprobs and versions are the model's."""
    has_grammars: bool = True
    """Whether it follows grammars; otherwise it refuses calls that have one."""
    keeps_keys: bool = True
    """Whether a call goes on after a load over the keys and values of the weights before; otherwise the new weights
    compute all of it again."""
    cuts_together: bool = False
    """Whether top-k and top-p cut the same probabilities; otherwise top-p cuts what top-k has left."""
    tolerance: float = 1e-5
    """Of logprobs in float32, against a full forward pass."""


def guidance(tokenizer):
    return Guidance(tokenizer, vocabulary=VOCABULARY, end_tokens=[END])


def start_slots(folder, run=inline):
    register()
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    model.set_attn_implementation(NAME)
    settings = {"slots": SLOTS, "context": CONTEXT, "end_tokens": [END], "dtype": torch.float32}
    slot_model = SlotModel(model, decode=tokenizer.decode, pass_tokens=64, guidance=guidance(tokenizer), **settings)
    return SlotEngine(slot_model, run=run, shares_weights=False)


def start_scripted(folder):
    tokenizer = load_tokenizer(folder)

    async def script(prompt, session, seed):
        await asyncio.sleep(0.02)
        random = np.random.default_rng([seed, int(prompt.sum())])
        return "".join(random.choice(list(LETTERS), int(random.integers(1, 100))))

    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    return ScriptedEngine(script, encode, end_token=END, context=CONTEXT, vocabulary=VOCABULARY)


def start_elsewhere(start, folder):
    """What `start` makes of the model: engines in processes of their own."""
    settings = {"slots": SLOTS, "context": CONTEXT, "end_tokens": [END], "pass_tokens": 64}
    tokenizer = load_tokenizer(folder)
    settings |= {"decode": tokenizer.decode, "guidance": guidance(tokenizer)}
    return start(load_model(folder), folder / "weights", **settings)


def start_sglang(folder):
    return start_played(folder, slots=SLOTS, context=CONTEXT, end=END)


KINDS = {
    "slots": Kind(start_slots),
    "slots in a thread": Kind(lambda folder: start_slots(folder, asyncio.to_thread)),
    "process": Kind(partial(start_elsewhere, start_process)),
    "router": Kind(partial(start_elsewhere, start_router)),
    "played sglang": Kind(start_sglang, has_grammars=False, keeps_keys=False, cuts_together=True),
    "scripted": Kind(start_scripted, has_model=False, has_grammars=False),
}


# ---------------------------------------------------------------- the model


@cache
def stock(seed=0):
    """A model as transformers ships it, far from uniform."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.12,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


def tokenizer_of_letters():
    """A token per letter, and the end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<end>": END, **{letter: place + 1 for place, letter in enumerate(LETTERS)}}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.ByteLevel()  # which the library that follows grammars knows, and plain letters pass
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", clean_up_tokenization_spaces=False)


# ---------------------------------------------------------------- the stage


class Stage:
    """One engine, its own event loop, and the weights it should have."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.loop = asyncio.new_event_loop()
        self.version = 0
        self.model = stock()
        stock().save_pretrained(folder)
        tokenizer_of_letters().save_pretrained(folder)
        self.engine = kind.start(folder)

    def run(self, coroutine, seconds=300.0):
        """The result of a coroutine; a hang is a TimeoutError."""

        async def bounded():
            async with asyncio.timeout(seconds):
                return await coroutine

        return self.loop.run_until_complete(bounded())

    def needs_model(self):
        if not self.kind.has_model:
            pytest.skip("it samples from no model")

    def needs_grammars(self):
        if not self.kind.has_grammars:
            pytest.skip("it follows no grammars")

    async def load(self, seed):
        """Make the weights of another model live."""
        self.version += 1
        self.model = stock(seed)
        await self.engine.load(self.model.state_dict(), self.version)

    async def reset(self):
        await self.engine.resume()
        await self.load(0)
        await self.engine.forget()

    def close(self):
        self.run(self.engine.close())
        self.loop.close()

    async def ask(self, prompt, max_tokens=12, session="s", seed=0, **shape):
        return await self.engine.generate(prompt, Sampling(max_tokens, **shape), session=session, seed=seed)

    async def ask_all(self, prompts, max_tokens=12, **shape):
        """Completions of prompts asked for at once, in sessions and with seeds of their own."""
        return await asyncio.gather(
            *(self.ask(prompt, max_tokens, f"s{i}", i, **shape) for i, prompt in enumerate(prompts))
        )

    def check(self, prompt, completion, **shape):
        """The logprobs are those of the stock model on the whole sequence."""
        logits = full_logits(self.model, prompt, completion.tokens)
        expected = shaped_logprobs(logits, completion.tokens, together=self.kind.cuts_together, **shape)
        np.testing.assert_allclose(completion.logprobs, expected, atol=self.kind.tolerance, rtol=0)


POISON = {
    "top_k 2^63": {"top_k": 2**63},
    "top_k 10^30": {"top_k": 10**30},
    "top_k -1": {"top_k": -1},
    "temperature 1e-40": {"temperature": 1e-40},
    "temperature 1e-320": {"temperature": 1e-320},
    "temperature 1e38": {"temperature": 1e38},
    "temperature 10^400": {"temperature": 10**400},
    "temperature nan": {"temperature": math.nan},
    "temperature inf": {"temperature": math.inf},
    "temperature -1": {"temperature": -1.0},
    "top_p nan": {"top_p": math.nan},
    "top_p 0": {"top_p": 0.0},
    "top_p -1": {"top_p": -1.0},
    "top_p 2": {"top_p": 2.0},
    "max_tokens -1": {"max_tokens": -1},
    "max_tokens 2^63": {"max_tokens": 2**63},
    "a surrogate in a stop string": {"stop": ("\ud800",)},
    "an empty stop string": {"stop": ("",)},
    "thousands of stop strings": {"stop": tuple(map(str, range(5000)))},
    "a seed of 65 bits": {"seed": 2**64},
    "a seed below 0": {"seed": -1},
    "an empty prompt": {"prompt": np.zeros(0, np.int32)},
    "a prompt as long as the context": {"prompt": np.ones(CONTEXT, np.int32)},
    "a token outside the vocabulary": {"prompt": np.array([1, VOCABULARY, 2])},
    "a token far outside the vocabulary": {"prompt": np.array([1, 2**31 - 1])},
    "a token below 0": {"prompt": np.array([1, -1])},
    "a token of 64 bits": {"prompt": np.array([1, 2**32 + 1])},
    "a token that is no whole number": {"prompt": np.array([1.5, 2.0])},
    "a prompt of two dimensions": {"prompt": np.ones((2, 2), np.int32)},
}
"""Calls that no engine can serve."""


def prompts(*sizes, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(1, VOCABULARY, size).astype(np.int32) for size in sizes]


def joined(*parts):
    return np.concatenate(parts).astype(np.int32)


# ---------------------------------------------------------------- what is right


@torch.inference_mode()
def full_logits(model, prompt, action):
    """[A, V] by one pass of the stock model over everything."""
    whole = torch.from_numpy(joined(prompt, action).astype(np.int64))[None]
    return model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1].double()


def shaped_logprobs(logits, action, temperature=1.0, top_p=1.0, top_k=0, allowed=None, together=False):
    """Logprobs of an action's tokens under what they were drawn from, by definition and in float64. `allowed` [A, V]:
    the tokens that a grammar allowed; `together`: whether top-k and top-p cut the same probabilities."""
    found = []
    if allowed is not None:
        logits = logits.masked_fill(~torch.from_numpy(allowed), -torch.inf)
    for row, token in zip((logits / temperature).numpy(), action.tolist(), strict=True):
        weights = np.exp(row - row.max())
        order = np.argsort(-weights)
        uncut = weights / weights.sum()
        if top_k:
            weights[order[top_k:]] = 0
        mass = np.cumsum(uncut[order] if together else weights[order] / weights.sum())
        weights[order[1:][mass[:-1] >= top_p]] = 0
        assert weights[token] > 0, "a token was drawn that should not have been"
        found.append(np.log(weights[token] / weights.sum()))
    return np.array(found)


def continued_logprobs(old, new, prompt, completion, num_old, keeps_keys=True):
    """The first tokens by the old weights, the rest by the new ones: over the old keys and values, or over their
    own."""
    if not keeps_keys:
        first, rest = (full_logits(model, prompt, completion.tokens) for model in (old, new))
        return shaped_logprobs(torch.cat([first[:num_old], rest[num_old:]]), completion.tokens)
    whole = torch.from_numpy(joined(prompt, completion.tokens).astype(np.int64))[None]
    split = len(prompt) + num_old - 1  # the last token of the old weights is computed by the new ones
    with torch.inference_mode():
        before = old(input_ids=whole[:, :split], use_cache=True)
        positions = torch.arange(split, whole.shape[1])[None]
        after = new(input_ids=whole[:, split:], past_key_values=before.past_key_values, position_ids=positions)
        logits = torch.cat([before.logits, after.logits], 1)[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, whole[0, len(prompt) :, None])[:, 0].numpy()

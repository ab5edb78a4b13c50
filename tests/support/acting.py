"""Small builders for tests of engines, attempts and schedules."""

from __future__ import annotations

import asyncio
import copy
from functools import cache

import numpy as np
import torch

from turnwise.engines.base import Sampling
from turnwise.engines.scripted import ScriptedEngine
from turnwise.engines.slots.engine import SlotEngine
from turnwise.engines.slots.model import SlotModel
from turnwise.envs.base import Reply
from turnwise.learn.attention import NAME, register
from turnwise.learn.tiny import build_tokenizer
from turnwise.messages import Message
from turnwise.rollout.attempt import run_attempt
from turnwise.rollout.limits import Limits
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.scene import Attempt, Scene
from turnwise.types import Group, Status, StopReason, Task, Trajectory, Turn

TASK = Task("t-1", "hops", {})
CONTEXT = 96
VOCABULARY = 61


def run(coroutine, seconds=30.0):
    """The result of a coroutine; a hang is a TimeoutError."""

    async def bounded():
        async with asyncio.timeout(seconds):
            return await coroutine

    return asyncio.run(bounded())


async def until(condition, seconds=10.0):
    """Let the loop run until something holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


# ---------------------------------------------------------------- text


@cache
def byte_tokenizer():
    """One token per byte, with ChatML."""
    return build_tokenizer([])


def renderer(history="extend", template=None):
    tokenizer = byte_tokenizer()
    if template is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
    return Renderer(tokenizer, history)


def user(text):
    return (Message("user", text),)


def limits(**changes):
    given = {"max_turns": 8, "max_prompt_tokens": 4000, "max_action_tokens": 200, "max_trajectory_tokens": 4200}
    return Limits(**{**given, "call_seconds": 5.0, "attempt_seconds": 20.0, **changes})


# ---------------------------------------------------------------- environments and attempts


class Puppet:
    """An environment that gives the replies it was made with, in order; a function is called for its reply."""

    def __init__(self, *replies, opening=None, closing=None):
        self.replies = list(replies)
        self.opening = Reply(user("go")) if opening is None else opening
        self.closing = closing
        self.heard = []
        self.closed = 0

    async def open(self, task):
        return await give(self.opening)

    async def step(self, message):
        self.heard.append(message.content)
        return await give(self.replies.pop(0) if self.replies else Reply(user("on")))

    async def close(self):
        self.closed += 1
        return await give(self.closing)


async def give(reply):
    """What a reply stands for: an exception is raised, a coroutine function awaited, the rest handed over."""
    if isinstance(reply, BaseException):
        raise reply
    return await reply() if asyncio.iscoroutinefunction(reply) else reply


async def hang():
    await asyncio.sleep(3600)


def says(text="hello", *, render=None, **settings):
    """An engine that says `text`, or what a function of (prompt, session, seed) gives."""
    render = render or renderer()
    script = text if callable(text) else (lambda prompt, session, seed: text)
    return ScriptedEngine(script, lambda said: render.encode(said).tolist(), end_token=render.end_token, **settings)


async def attempted(make, engine=None, *, render=None, sampling=None, which=None, **bounds):
    """One attempt in an environment, or in what a function makes."""
    render = render or renderer()
    scene = Scene(engine or says(render=render), render, sampling or Sampling(200), limits(**bounds))
    return await run_attempt(which or Attempt(0, "train", TASK), make if callable(make) else (lambda: make), scene)


def trajectory(outcome=1.0, status=Status.finished, versions=(0,)):
    versions = list(versions)
    turn = Turn(
        [1, 2],
        [3] * len(versions),
        [-0.5] * len(versions),
        versions,
        StopReason.end_token,
        0.0,
        Message("assistant", "x"),
    )
    return Trajectory((turn,), status, outcome)


def group(*outcomes, failed=(), task=TASK, versions=(0,)):
    return Group(task, tuple(trajectory(o, versions=versions) for o in outcomes), tuple(failed))


# ---------------------------------------------------------------- models and engines


def tiny_model(kind="qwen3", seed=0, tied=False):
    """A random causal model with grouped-query attention, as transformers ships it."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    make_config, make_model = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[kind]
    config = make_config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.25,  # far from uniform, so that a wrong key or position shows
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_model(config).eval()


def served(model):
    """A copy of a model that a slot engine can drive; the original stays the stock one."""
    register()
    own = copy.deepcopy(model)
    own.set_attn_implementation(NAME)
    return own


async def inline(function, *arguments):
    return function(*arguments)


def slot_engine(
    model,
    *,
    slots=4,
    context=CONTEXT,
    end_tokens=(),
    decode=None,
    run=inline,
    shares_weights=False,
    dtype=torch.float32,
    **settings,
):
    slot_model = SlotModel(
        model,
        slots=slots,
        context=context,
        end_tokens=end_tokens,
        decode=decode or (lambda tokens: " ".join(map(str, tokens))),
        dtype=dtype,
        **settings,
    )
    return SlotEngine(slot_model, run=run, shares_weights=shares_weights)


@torch.inference_mode()
def full_logprobs(model, prompt, action, temperature=1.0):
    """Logprobs of an action by one pass of the stock model over everything."""
    whole = torch.from_numpy(np.concatenate([prompt, action]).astype(np.int64))[None]
    logits = model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, whole[0, len(prompt) :, None])[:, 0].numpy()


class Parrot(torch.nn.Module):
    """A stand-in for a model: the token at place p is script[p], whatever came before."""

    class Config:
        num_attention_heads = num_key_value_heads = num_hidden_layers = 1
        head_dim = 2

    def __init__(self, script, vocabulary):
        super().__init__()
        self.config = self.Config()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.script = torch.tensor(list(script))
        self.vocabulary = vocabulary
        self.base_model = self.recite

    def recite(self, *, input_ids, position_ids, use_cache, attend):
        following = self.script[(position_ids[0] + 1).clamp(max=len(self.script) - 1)]

        class Out:
            last_hidden_state = 80.0 * torch.nn.functional.one_hot(following, self.vocabulary).float()[None]

        return Out

    def get_input_embeddings(self):
        return torch.nn.Embedding(self.vocabulary, 1)

    def get_output_embeddings(self):
        return lambda hidden: hidden

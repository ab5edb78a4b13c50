"""Small values for tests: turns, groups and models that can be read at a glance."""

import math
import os
import sys

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

import turnwise
from turnwise.messages import Message
from turnwise.pretrained import import_models
from turnwise.types import Group, Status, StopReason, Task, Trajectory, Turn

VOCABULARY = 64

few = settings(max_examples=50, deadline=None)
"""For properties of cheap functions; without a deadline, because machines are shared."""


def make_turn(prompt, action, *, reward=0.0, logprobs=None, version=0, **fields):
    """A turn of given tokens; every logprob is that of a fair draw unless given."""
    size = len(action)
    if logprobs is None:
        logprobs = np.full(size, -math.log(VOCABULARY))
    stop, said = fields.pop("stop", StopReason.end_token), fields.pop("said", Message("assistant", "said"))
    return Turn(prompt, action, logprobs, np.full(size, version), stop, reward, said, **fields)


def make_turns(sizes, *, growing=True, rewards=None, seed=0):
    """Turns of (new prompt tokens, action tokens) sizes: each prompt extends the turn before, or begins anew."""
    random = np.random.default_rng(seed)
    turns, history = [], np.zeros(0, np.int64)
    for place, (new, size) in enumerate(sizes):
        prompt = np.concatenate([history, random.integers(0, VOCABULARY, new)])
        action = random.integers(0, VOCABULARY, size)
        logprobs = np.minimum(random.normal(-math.log(VOCABULARY), 0.5, size), 0.0)
        turns.append(make_turn(prompt, action, reward=rewards[place] if rewards else 0.0, logprobs=logprobs))
        history = np.concatenate([prompt, action]) if growing else history
    return turns


def make_trajectory(sizes, *, outcome=0.0, status=Status.finished, **how):
    return Trajectory(tuple(make_turns(sizes, **how)), status, outcome)


def make_group(totals, *, num_turns=None, name="task"):
    """A group whose attempts are paid `totals` as outcomes, with 2 action tokens in each of their turns."""
    counts = num_turns or [1] * len(totals)
    attempts = [
        make_trajectory([(2, 2)] * count, outcome=total, seed=place)
        for place, (total, count) in enumerate(zip(totals, counts, strict=True))
    ]
    return Group(Task(name, "test"), tuple(attempts))


@st.composite
def trajectories(draw, *, max_turns=3, min_action=0, max_action=4, max_new=4):
    """Attempts with growing or windowed prompts, paid in eighths, so that sums of them are exact."""
    num_turns = draw(st.integers(1, max_turns))
    sizes = [(draw(st.integers(1, max_new)), draw(st.integers(min_action, max_action))) for _ in range(num_turns)]
    rewards = [draw(st.integers(-4, 4)) / 8 for _ in sizes]
    return make_trajectory(
        sizes,
        outcome=draw(st.integers(-8, 8)) / 8,
        growing=draw(st.booleans()),
        rewards=rewards,
        seed=draw(st.integers(0, 2**16)),
    )


def group_lists(*, min_groups=0, max_groups=3, max_attempts=4, **how):
    """Lists of groups of at least one attempt each."""
    attempts = st.lists(trajectories(**how), min_size=1, max_size=max_attempts)
    group = st.builds(lambda made: Group(Task("task", "test"), tuple(made)), attempts)
    return st.lists(group, min_size=min_groups, max_size=max_groups)


# ---------------------------------------------------------------- models


MIXTURE = {"head_dim": 12, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}


def make_model(kind="qwen3", *, dtype="float32", seed=0, **changes):
    """A tiny causal language model of transformers, every parameter of it random: norms and biases too.

    In float64 all of it computes in float64, where transformers would go through float32.
    """
    import torch

    import_models()
    import transformers

    config_class, model_class = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }[kind]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": kind != "llama",
        **({"head_dim": 12} if kind == "qwen3" else {}),
        **(MIXTURE if kind == "qwen3_moe" else {}),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**{**sizes, **changes}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
    model = model.to(getattr(torch, dtype))
    if dtype == "float64":
        from support.exact import make_exact

        make_exact(model)
    return model


def make_learner(
    model, *, learning_rate=1e-2, betas=(0.9, 0.999), clip_norm=1.0, schedule=lambda update: 1.0, **policy
):
    from turnwise.learn.learner import Learner
    from turnwise.learn.policy import Policy
    from turnwise.learn.stepper import OptimizerSettings

    settings = OptimizerSettings(learning_rate, betas, weight_decay=0.01, clip_norm=clip_norm)
    return Learner(Policy(model, **policy), settings, schedule)


def logprobs_of(policy, plan):
    """(logprobs [K], entropies [K]) of a plan that takes one pass."""
    [(_, logprobs, entropies)] = policy.passes(plan)
    return logprobs, entropies


def of_usual_size(model):
    """The model with weights that deviate from 0, or from 1, by 0.04, as in models that people train: by a quarter of
    what `make_model` gives them, whose gradients lose more digits to rounding."""
    for parameter in model.parameters():
        values, middle = parameter.data, parameter.data.mean().round()
        values.copy_(middle + (values - middle) / 4)
    return model


def gradients(model):
    """By name, in float64."""
    return {name: p.grad.double().numpy().copy() for name, p in model.named_parameters() if p.grad is not None}


def parameters(model):
    """By name, copied."""
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def distance(one, other):
    """Norm of the difference, relative to the norm of `other`."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(np.linalg.norm(one - other) / max(float(np.linalg.norm(other)), 1e-300))


def lines_run(function):
    """How many lines of the package a call runs: a measure of work that no other load on the machine changes."""
    package, count = os.path.dirname(turnwise.__file__) + os.sep, 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line" and frame.f_code.co_filename.startswith(package)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count

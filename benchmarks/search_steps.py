"""How long the passes of one optimizer step take on a search batch, by the layout of its turns.

    python benchmarks/search_steps.py [--tasks 2] [--attempts 4] [--repeats 3] [--quick] [--json PATH]

Batches are those of search_lengths.py, with fewer tasks and attempts. The model is a small Qwen3 with random weights,
the vocabulary of SmolLM2 and one thread; forward and backward passes are timed, in CPU seconds, median of the repeats.
Every layout computes the same sum over the same action tokens, and the script checks that its gradient is the same.

    observations   padded rows, one a turn, whose response is the action and the observation after it
    actions        padded rows, one a turn, whose response is the action
    packed         turns one after the other, without padding
    merged         a turn that continues the one before it is computed with it; otherwise as packed
    shared         prefixes in common are computed once, also between attempts
Padded rows are computed by transformers in batches of at most 16,384 tokens, and its output layer sees action tokens
only, which is generous to them. The others are computed by a turnwise policy in passes of as many tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from search_lengths import CASES, measure, observed, played
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from turnwise.data.catalogue import model_folder
from turnwise.envs.search.env import Search
from turnwise.learn.policy import Policy, load_tokenizer
from turnwise.learn.transformers_reference import stock_attention
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.plan import Plan
from turnwise.plan.rows import merge
from turnwise.rollout.render.renderer import Renderer
from turnwise.types import Trajectory, Turn

BUDGET = 16_384
"""Tokens of a pass."""
Passes = Callable[[], None]
"""Forward and backward over a batch; leaves the gradient on the model."""


def make_model(vocabulary: int, hidden: int, layers: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    heads = hidden // 64
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=64,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def in_plans(policy: Policy, plans: Sequence[Plan], factors: Sequence[np.ndarray]) -> None:
    for plan in plans:
        given = torch.from_numpy(plan.gather(factors))
        for picked, logprobs, _ in policy.passes(plan):
            (logprobs * given[picked]).sum().backward()


def in_rows(model: Any, turns: Sequence[Turn], factors: Sequence[np.ndarray], left: int, right: int) -> None:
    """Rows of one width: prompts end where responses begin, and both are padded."""
    width = left + right
    with stock_attention(model):
        size = max(1, BUDGET // width)
        for some in (range(len(turns))[first : first + size] for first in range(0, len(turns), size)):
            tokens = torch.zeros(len(some), width, dtype=torch.long)
            mask = torch.zeros_like(tokens)
            places: list[tuple[int, int]] = []
            for row, place in enumerate(some):
                prompt, action = turns[place].prompt, turns[place].action
                begin, end = left - len(prompt), left + len(action)
                tokens[row, begin:end] = torch.from_numpy(np.concatenate([prompt, action]).astype(np.int64))
                mask[row, begin:end] = 1
                places += [(row, at) for at in range(left, end)]
            row_of, at = torch.tensor(places).T
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            hidden = model.model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)
            logits = model.lm_head(hidden.last_hidden_state[row_of, at - 1])
            logprobs = logits.log_softmax(-1).gather(1, tokens[row_of, at][:, None])[:, 0]
            given = torch.from_numpy(np.concatenate([factors[place] for place in some]))
            (logprobs * given).sum().backward()


def turns_in(made: Sequence[Trajectory]) -> list[Turn]:
    return [turn for trajectory in made for turn in trajectory.turns]


def layouts(renderer: Renderer, made: Sequence[Trajectory], policy: Policy) -> dict[str, Passes]:
    whole = turns_in(made)
    turns = [turn for turn in whole if len(turn.action)]
    random = np.random.default_rng(0)
    factors = [random.normal(size=len(turn.action)).astype(np.float32) for turn in turns]
    left = max(len(turn.prompt) for turn in turns)
    heard = [size for trajectory in made for size in observed(renderer, trajectory)]
    widest = max(len(turn.action) + size for turn, size in zip(whole, heard, strict=True))
    rows = partial(in_rows, policy.model, turns, factors, left)
    plans = partial(in_plans, policy)
    return {
        "observations": lambda: rows(widest),
        "actions": lambda: rows(max(len(turn.action) for turn in turns)),
        "packed": lambda: plans(pack(turns, BUDGET), factors),
        "merged": lambda: plans(merge(turns, BUDGET), factors),
        "shared": lambda: plans(cut(turns, BUDGET), factors),
    }


def gradient(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def timed(model: torch.nn.Module, passes: Passes, repeats: int) -> tuple[list[float], Tensor]:
    """(CPU seconds of each repeat, the gradient)."""
    seconds = []
    for _ in range(repeats):
        model.zero_grad()
        began = time.process_time()
        passes()
        seconds.append(time.process_time() - began)
    return seconds, gradient(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--attempts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="two attempts and a tiny model: shows that it runs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.tasks, chosen.attempts, chosen.repeats, chosen.hidden, chosen.layers = 1, 2, 1, 64, 1
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(model_folder("smollm2-135m"))
    renderer = Renderer(tokenizer)
    policy = Policy(make_model(len(tokenizer), chosen.hidden, chosen.layers))
    tasks = list(Search.tasks("train", seed=0, count=chosen.tasks, hops=(2, 3)))
    found: dict[str, Any] = {}
    for case in chosen.cases:
        groups = asyncio.run(played(renderer, CASES[case], tasks, chosen.attempts))
        made = [trajectory for group in groups for trajectory in group]
        tokens = measure(renderer, groups)["tokens"] | {
            "merged": sum(plan.num_tokens for plan in merge(turns_in(made), BUDGET))
        }
        print(f"{case}: {len(made)} attempts, {len(turns_in(made))} turns", flush=True)
        truth: Tensor | None = None
        figures: dict[str, Any] = {}
        for name, passes in reversed(layouts(renderer, made, policy).items()):
            seconds, found_gradient = timed(policy.model, passes, chosen.repeats)
            truth = found_gradient if truth is None else truth
            off = float((found_gradient - truth).norm() / truth.norm())
            figures[name] = {"seconds": seconds, "gradient_off": off, "tokens": tokens[name]}
            times = statistics.median(seconds) / statistics.median(figures["shared"]["seconds"])
            spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
            print(
                f"  {name:13} {statistics.median(seconds):8.1f} CPU seconds ({spread})   x {times:5.1f}   "
                f"gradient off by {off:.0e}   {tokens[name]:9,} tokens",
                flush=True,
            )
        found[case] = figures
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What `max_tokens_per_microbatch` costs on a CPU: CPU seconds and memory of an update, by tokens per pass.

    python benchmarks/microbatch.py [--quick] [--json PATH] [--repeats 3] [--models tiny 6M]

One thread, forward and backward passes of one update, each measurement in a process of its own, budgets in turn. The
tiny model is that of the quick start, with half a step of its shape: 8 groups of 8 attempts of six short turns that see
a window. The model of 6M has one group of the workload W1 of prefix_tree.py: 4 to 8 turns of 8 attempts whose history
only grows. The gradient is the same at every budget but for rounding; its norm is printed beside.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from prefix_tree import VOCABULARY, make_turn, workload
from transformers import Qwen3Config, Qwen3ForCausalLM

from turnwise.learn.learner import Learner
from turnwise.learn.losses import ppo_clip
from turnwise.learn.objective import Objective
from turnwise.learn.policy import Policy
from turnwise.learn.stepper import OptimizerSettings
from turnwise.plan.cut import cut
from turnwise.types import Turn

BUDGETS = (1024, 2048, 4096, 8192, 16384)
MODELS = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 384, "num_attention_heads": 4},
    "6M": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768, "num_attention_heads": 4},
}


def short_turns(groups: int) -> list[Turn]:
    """Attempts like those of the quick start: six turns that see the first prompt and the last two turns."""
    random = np.random.default_rng(0)
    turns = []
    for _ in range(groups):
        first = random.integers(3, VOCABULARY, 40)
        for _ in range(8):
            recent: list[np.ndarray] = []
            for _ in range(6):
                action, heard = random.integers(3, VOCABULARY, 8), random.integers(3, VOCABULARY, 16)
                turns.append(make_turn(np.concatenate([first, *recent[-2:]]), action, random))
                recent.append(np.concatenate([action, heard]))
    return turns


def turns_for(name: str, quick: bool) -> list[Turn]:
    if name == "tiny":
        return short_turns(2 if quick else 8)
    return workload("W1", attempts=2 if quick else 8)


def measured(name: str, budget: int, quick: bool) -> dict[str, float]:
    """CPU seconds and megabytes of one update, and its gradient's norm."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"num_key_value_heads": 4, "max_position_embeddings": 8192, "tie_word_embeddings": True, **MODELS[name]}
    config = Qwen3Config(vocab_size=VOCABULARY, **shape)
    turns = turns_for(name, quick)
    learner = Learner(Policy(Qwen3ForCausalLM(config)), OptimizerSettings(1e-9), lambda update: 1.0)
    plans = cut(turns, budget)
    ones = [np.ones(len(turn.action), np.float32) for turn in turns]
    weights = [one / 1000 for one in ones]
    told = {"old": [turn.logprobs for turn in turns]}
    few = plans[:1] if quick else cut(turns[:8], budget)
    learner.update(few, ones, weights, told, Objective(ppo_clip))  # memory and code that later updates have already
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    metrics, _ = learner.update(plans, ones, weights, told, Objective(ppo_clip))
    spent = time.process_time() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": spent,
        "megabytes": (after - before) / 1024,
        "tokens": float(sum(plan.num_tokens for plan in plans)),
        "passes": float(len(plans)),
        "gradient": metrics["gradient_norm"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--quick", action="store_true", help="one small update of each")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    figures: dict[str, Any] = {}
    for name in chosen.models:
        found: dict[int, list[dict[str, float]]] = {budget: [] for budget in BUDGETS}
        for _ in range(1 if chosen.quick else chosen.repeats):
            for budget in BUDGETS:
                with get_context("fork").Pool(1) as pool:
                    found[budget].append(pool.apply(measured, (name, budget, chosen.quick)))
        report(name, found)
        figures[name] = found
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")


def report(name: str, found: dict[int, list[dict[str, float]]]) -> None:
    best = min(statistics.median(each["seconds"] for each in of_budget) for of_budget in found.values())
    print(f"{name}\n  a pass    passes   tokens   CPU s (range)            of best       MB   gradient's norm")
    for budget, of_budget in found.items():
        seconds = [each["seconds"] for each in of_budget]
        middle, memory = statistics.median(seconds), statistics.median(each["megabytes"] for each in of_budget)
        first = of_budget[0]
        print(
            f"  {budget:6} {first['passes']:9.0f} {first['tokens']:8.0f}   {middle:5.2f} ({min(seconds):.2f} to "
            f"{max(seconds):.2f})     {middle / best:6.2f}   {memory:6.0f}   {first['gradient']:.9g}",
            flush=True,
        )


if __name__ == "__main__":
    main()

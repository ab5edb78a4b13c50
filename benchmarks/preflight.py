"""What preflight predicts against what real updates take, on a CPU: peak memory at four sizes.

    python benchmarks/preflight.py

Predicted: the peak of one update, rehearsed on tensors without numbers. Measured: the resident memory of the process
while it makes two such updates, at its highest in the second (the first makes the optimizer's moments), minus what it
had before the model was built. So that resident memory is what tensors have, malloc gives each block of 64 KiB or more
its own pages, which go back to the system when it is freed. What is measured and not predicted: workspaces inside of
kernels, blocks below 64 KiB, and the pages of code that runs for the first time. What is predicted and not measured:
autograd adds two gradients of one tensor in place, but not while a dispatch mode looks on. With tied embeddings that is
one more gradient of the table, 113 MB at 135M.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "1M": {"hidden": 128, "layers": 4, "tokens": 2048},
    "9M": {"hidden": 384, "layers": 5, "tokens": 1024},
    "35M": {"hidden": 640, "layers": 8, "tokens": 512},
    "135M": {"smollm2": True, "tokens": 256},
}
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""As its config.json has it."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
WITHIN = 0.1


def resident(key: str) -> int:
    """VmRSS, or VmHWM, the highest of it, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def recipe_of(tokens: int, checkpointing: bool) -> Any:
    from turnwise.recipe.parse import parse_recipe

    rollout = {"max_turns": 4, "group_size": 4, "max_trajectory_tokens": 240, "max_prompt_tokens": 200}
    return parse_recipe(
        {
            "env": [{"name": "hops"}],
            "max_tokens_per_microbatch": tokens,
            "model": {"device": "cpu", "gradient_checkpointing": checkpointing},
            "rollout": {**rollout, "max_action_tokens": 30},
        },
        "benchmark",
    )


def config_of(size: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    from turnwise.learn.tiny import tiny_config

    if "smollm2" in size:
        return AutoConfig.for_model("llama", **SMOLLM2)
    return tiny_config(4096, size["hidden"], size["layers"], 1024)


def update(learner: Any, recipe: Any, config: Any) -> None:
    import numpy as np

    from turnwise.assemble import objective
    from turnwise.assemble.learner import LAYOUTS
    from turnwise.preflight.attempt_shape import AttemptShape, full_plan

    plan, turns = full_plan(
        AttemptShape.of(recipe), LAYOUTS[recipe.layout], recipe.max_tokens_per_microbatch, config.vocab_size
    )
    numbers = [np.full(len(turn.action), 1e-3, np.float32) for turn in turns]
    learner.update([plan], numbers, numbers, {}, objective.objective_of(recipe))


def measure(recipe: Any, config: Any) -> int:
    """Bytes at the peak of the second of two updates."""
    import torch
    from transformers import AutoModelForCausalLM

    from turnwise.assemble.learner import rl_learner
    from turnwise.preflight.blank_model import NO_TOKENIZER

    gc.collect()
    before = resident("VmRSS")
    learner = rl_learner(recipe, AutoModelForCausalLM.from_config(config, dtype=torch.float32), NO_TOKENIZER)
    update(learner, recipe, config)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far
    update(learner, recipe, config)
    return resident("VmHWM") - before


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--checkpointing", action="store_true")
    chosen = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):  # which malloc reads when it starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC, "OMP_NUM_THREADS": "1"})
    import torch

    from turnwise.preflight.rehearsal import rehearse

    torch.set_num_threads(1)
    smallest = SIZES["1M"]
    measure(recipe_of(smallest["tokens"], chosen.checkpointing), config_of(smallest))  # loads code
    print("MB                         predicted  measured  predicted / measured")
    worst = 0.0
    for name in chosen.sizes:
        recipe, config = recipe_of(SIZES[name]["tokens"], chosen.checkpointing), config_of(SIZES[name])
        measured = measure(recipe, config)
        found = rehearse(recipe, config, "cpu")
        ratio = found.peak / measured
        worst = max(worst, abs(ratio - 1))
        print(
            f"{found.num_parameters / 1e6:6.1f}M {found.num_tokens:5} tokens"
            f"{found.peak / 1e6:15.1f}{measured / 1e6:10.1f}{ratio:12.3f}",
            flush=True,
        )
    print(f"the furthest is {worst:.1%} off, where {WITHIN:.0%} are allowed")
    return 0 if worst <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())

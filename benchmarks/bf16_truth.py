"""How far tree, packed turns and padded rows are from float64 when a policy computes in bfloat16.

    python benchmarks/bf16_truth.py [--seeds 12] [--first-seed 0] [--smollm2-seeds 3] [--only llama ...] [--json PATH]

For every seed: a group of turns that share prefixes (a growing and a stripped history, several attempts), factors of
every action token (normal), and new random weights, except for SmolLM2-135M, whose turns are pieces of this
repository's documentation (`turnwise data smollm2-135m` first). The truth is padded rows in float64 by transformers.
The same float32 weights, rounded to bfloat16 as those of a learner's layers are while they compute, then compute in
three layouts: padded rows by transformers, with logits widened to float32 before the softmax; the tree and packed
turns by a turnwise policy. Printed are medians over seeds, and ratios to the padded rows of the same seed: the
geometric mean over seeds with its 95 % t-interval, and the smallest and the largest:
    logprob       largest, mean and root mean square of the differences of logprobs from the truth
    gradient      norm of the difference of the gradient of all parameters, relative to the norm of the true one
Mixtures: where two experts have almost equal scores, rounding chooses another one, and a token's logprob and gradient
jump. `flips` is the share of choices (of a token in a layer) with another set of experts than the truth, of every token
that a layout computes: the tree counts a shared one once. With `true` experts every layout takes those of the truth, so
that only rounding is left. With the `rows'` experts every layout takes those that padded rows took in bfloat16, so that
all of them have the same flips.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from turnwise.inspect.rounding import BFLOAT16, FLOAT64, Distance, Precision, by_plans, by_rows
from turnwise.learn.policy import load_model, load_tokenizer
from turnwise.learn.transformers_reference import in_float64
from turnwise.messages import Message
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.plan import Plan
from turnwise.plan.rows import length, pad
from turnwise.runs.interval import half_width
from turnwise.types import StopReason, Turn

VOCABULARY = 2048
WHOLE = 1 << 20
"""Tokens of a pass: all turns in one."""
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.07,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {"num_experts_per_tok": 4, "moe_intermediate_size": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 32, "query_pre_attn_scalar": 32},
    "qwen3_moe": {**MIXTURE, "num_experts": 32},
    "gpt_oss": {**MIXTURE, "num_local_experts": 32, "intermediate_size": 128, "sliding_window": 32},
}
SMOLLM2 = "smollm2-135m"
ROWS = "padded rows"
LAYOUTS = (ROWS, "tree", "packed")
EXPERTS = ("own", "true", "rows'")


# ---------------------------------------------------------------- models and turns


def random_model(name: str, seed: int) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging

    torch.manual_seed(seed)
    logging.set_verbosity_error()
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**{**COMMON, **SHAPES[name]}))


def some_turns(draw: Callable[[int], Any], attempts: int, scale: int) -> list[Turn]:
    """Attempts of three turns at one task: in every other one, half of each action is stripped from later prompts."""
    task, turns = draw(4 * scale), []
    for attempt in range(attempts):
        history = task
        for _ in range(3):
            action, answer = draw(scale + attempt), draw(scale)
            turns.append(turn_of(history, action))
            kept = action[len(action) // 2 :] if attempt % 2 else action
            history = np.concatenate([history, kept, answer])
    return turns


def turn_of(prompt: Any, action: Any) -> Turn:
    size = len(action)
    said = Message("assistant", "")
    return Turn(prompt, action, np.zeros(size, np.float32), np.zeros(size, np.int32), StopReason.length, 0.0, said)


def documentation(tokenizer: Any) -> Any:
    """The tokens of this repository's pages of explanation."""
    pages = sorted((Path(__file__).parent.parent / "docs" / "explanation").glob("*.md"))
    return np.concatenate([tokenizer.encode(page.read_text()) for page in pages]).astype(np.int32)


def case(name: str, seed: int) -> tuple[Any, list[Turn], list[Any]]:
    """(model, turns, factors)."""
    random = np.random.default_rng(seed)
    if name == SMOLLM2:
        model, tokens = load_model(SMOLLM2), documentation(load_tokenizer(SMOLLM2))

        def piece(size: int) -> Any:
            start = int(random.integers(0, len(tokens) - size))
            return tokens[start : start + size]

        turns = some_turns(piece, attempts=2, scale=12)
    else:
        model = random_model(name, seed)
        turns = some_turns(lambda size: random.integers(3, VOCABULARY, size), attempts=5, scale=10)
    return model, turns, [random.standard_normal(len(turn.action)) for turn in turns]


# ---------------------------------------------------------------- experts


class Choices(TorchFunctionMode):
    """Records the experts that routers take, layer by layer, or makes them take given ones. A router of transformers
    ends with one topk over the experts."""

    def __init__(self, num_experts: int, given: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.given = given
        self.taken: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk) or args[0].shape[-1] != self.num_experts:
            return func(*args, **kwargs)
        found = func(*args, **kwargs)
        if self.given is not None:
            experts = self.given[len(self.taken)].view(found.indices.shape)
            found = torch.return_types.topk((args[0].gather(-1, experts), experts))
        self.taken.append(found.indices.detach().reshape(-1, found.indices.shape[-1]))
        return found


def paths(plan: Plan, turns: Sequence[Turn]) -> list[Any]:
    """The nodes of every turn of a plan, in the order of its turns: those of its prompt and of its action."""
    found = []
    for place in range(len(plan.turns)):
        node, path = int(plan.action_nodes[plan.offsets[place + 1] - 1]), []
        while node >= 0:
            path.append(node)
            node = int(plan.parent[node])
        found.append(np.array(path[::-1]))
    return found


def routes_of_plan(plan: Plan, turns: Sequence[Turn], rows: Sequence[Tensor], width: int) -> list[Tensor]:
    """Routes [nodes, k] of every layer, given those of padded rows."""
    found = []
    for of_layer in rows:
        table = torch.empty(plan.num_tokens, of_layer.shape[1], dtype=torch.long)
        for turn, path in zip(plan.turns, paths(plan, turns), strict=True):
            table[path] = of_layer[turn * width : turn * width + len(path)]
        found.append(table)
    return found


def routes_in(
    layout: str, plans: Mapping[str, Sequence[Plan]], turns: Sequence[Turn], width: int, taken: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Those of padded rows, for the tokens of a layout."""
    if layout not in plans:
        return taken
    [plan] = plans[layout]
    return routes_of_plan(plan, turns, taken, width)


def flips(taken: Sequence[Tensor], wanted: Sequence[Tensor], real: Any) -> float:
    """The share of choices with another set of experts, of the tokens that are real."""
    differs = [
        (one.sort(-1).values != other.sort(-1).values).any(-1)[real] for one, other in zip(taken, wanted, strict=True)
    ]
    return float(torch.cat(differs).double().mean())


# ---------------------------------------------------------------- measurement


def measure(name: str, seed: int, precisions: Sequence[Precision]) -> list[dict[str, Any]]:
    """One line for every precision, way of routing and layout."""
    model, turns, factors = case(name, seed)
    num_experts = SHAPES.get(name, {}).get("num_experts", SHAPES.get(name, {}).get("num_local_experts", 0))
    [rows] = pad(turns, WHOLE)
    real = torch.from_numpy(rows.fill_in(turns)[1].reshape(-1) == 1)
    exact = model.double()
    in_float64(exact)
    with Choices(num_experts) as wanted:
        truth = by_rows(exact, turns, factors, FLOAT64, 1.0, WHOLE)
    del exact, model
    lines = []
    for precision in precisions:
        policy = precision.policy(case(name, seed)[0], 1.0)
        plans = {"tree": cut(turns, WHOLE), "packed": pack(turns, WHOLE)}
        given = {"true": wanted.taken}
        for experts in EXPERTS if num_experts else EXPERTS[:1]:
            taken = given.get(experts)
            for layout in LAYOUTS:
                places = slice(None) if layout in plans else real
                here = partial(routes_in, layout, plans, turns, rows.width)
                with Choices(num_experts, None if taken is None else here(taken)) as choices:
                    if layout in plans:
                        found = by_plans(policy, turns, plans[layout], factors)
                    else:
                        found = by_rows(policy.model, turns, factors, precision, 1.0, WHOLE)
                if experts == "own" and layout == ROWS:
                    given["rows'"] = choices.taken
                share = flips(choices.taken, here(wanted.taken), places) if num_experts else 0.0
                line = {"policy": name, "seed": seed, "precision": precision.name, "experts": experts, "flips": share}
                lines.append({**line, **asdict(Distance.between(layout, found, truth))})
    tokens = sum(map(length, turns))
    print(
        f"{name} seed {seed}: {len(turns)} turns, {tokens:,} tokens, {plans['tree'][0].num_tokens:,} unique", flush=True
    )
    return lines


def in_interval(ratios: Sequence[float]) -> str:
    """The geometric mean of some ratios, its interval and their range."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, half = statistics.mean(logs), half_width(logs)
    low, middle, high = (math.exp(value) for value in (mean - half, mean, mean + half))
    return f"{middle:.3f} [{low:.3f}, {high:.3f}] ({min(ratios):.2f} to {max(ratios):.2f})"


NUMBERS = ("largest", "mean", "rms", "gradient")


def report(lines: Sequence[dict[str, Any]]) -> None:
    print("\npolicy        precision             experts layout       largest    mean     rms  gradient   flips")
    for key in sorted({(line["policy"], line["precision"], line["experts"]) for line in lines}):
        of_key = [line for line in lines if (line["policy"], line["precision"], line["experts"]) == key]
        seeds = sorted({line["seed"] for line in of_key})
        by_layout = {layout: {line["seed"]: line for line in of_key if line["layout"] == layout} for layout in LAYOUTS}
        for layout, by_seed in by_layout.items():
            middle = {name: statistics.median(by_seed[seed][name] for seed in seeds) for name in (*NUMBERS, "flips")}
            numbers = "".join(f"{middle[name]:9.1e}" for name in NUMBERS)
            print(f"{key[0]:13} {key[1]:21} {key[2]:7} {layout:12}{numbers}{middle['flips']:8.2%}")
        for layout in LAYOUTS[1:]:
            here, rows = by_layout[layout], by_layout[ROWS]
            flipped = key[2] == "own" and any(rows[seed]["flips"] for seed in seeds)
            texts = [
                f"{name} {in_interval([here[seed][name] / rows[seed][name] for seed in seeds])}"
                for name in ("rms", "gradient", *(["flips"] if flipped else []))
            ]
            print(f"{'':13} {layout} / padded rows over {len(seeds)} seeds: {', '.join(texts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--smollm2-seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=(*SHAPES, SMOLLM2), default=(*SHAPES, SMOLLM2))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    lines = []
    for number in range(max(chosen.seeds, chosen.smollm2_seeds)):
        for name in chosen.only:
            if number < (chosen.smollm2_seeds if name == SMOLLM2 else chosen.seeds):
                lines += measure(name, chosen.first_seed + number, (BFLOAT16,))
                if chosen.json:
                    chosen.json.write_text(json.dumps(lines, indent=1))
    report(lines)


if __name__ == "__main__":
    main()

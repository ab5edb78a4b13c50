"""What a training update costs when shared prefixes are computed once, against four other layouts.

    python benchmarks/prefix_tree.py [--quick] [--json PATH] [--only speed growth memory planning]

One thread, CPU time of forward and backward passes, every measurement in a process of its own, so that its peak memory
is its own too. All layouts run the same code: the same attention kernels, chunked head, loss and weights; padded rows
are causal rows of equal width, so that no mask is computed for them. Layouts:
    tree      shared prefixes once, cut to the budget of tokens per pass
    packed    every turn by itself, no padding: the honest baseline
    merged    a turn continues the one before it where its prompt begins with all of that, as in SkyRL's strict merge
    sorted    rows of similar length, padded to the longest of their pass
    padded    rows in order, padded to the longest of the update; a stratified sample of passes, scaled up by tokens
Workloads, one group each (turns x attempts):
    W1        search-like, 4-8 turns x 8, history only grows         W3  window: system prompt, summary, last two turns
    W2        the same with 60 % of each action stripped from later prompts        W4  one turn, 16 x (400 + 100)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from turnwise.learn import policy as policies
from turnwise.learn.blocks import Relay
from turnwise.learn.head import KEPT_ELEMENTS
from turnwise.learn.learner import Learner
from turnwise.learn.losses import ppo_clip
from turnwise.learn.objective import Objective
from turnwise.learn.policy import Policy
from turnwise.learn.stepper import OptimizerSettings
from turnwise.messages import Message
from turnwise.plan.balance import Cost, balance
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.plan import Plan
from turnwise.plan.rows import Rows, merge, pad_by_length
from turnwise.types import StopReason, Turn

VOCABULARY = 4096
BUDGET = 8192
MODELS = {
    "6M": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768, "num_attention_heads": 4},
    "50M": {"hidden_size": 640, "num_hidden_layers": 10, "intermediate_size": 1920, "num_attention_heads": 10},
}


# ---------------------------------------------------------------- workloads


def workload(name: str, attempts: int = 8, seed: int = 0) -> list[Turn]:
    """The turns of one group."""
    random = np.random.default_rng(seed)
    draw: Callable[[int], Any] = lambda size: random.integers(3, VOCABULARY, size)
    if name == "W4":
        prompt = draw(400)
        return [make_turn(prompt, draw(100), random) for _ in range(16)]
    turns, system = [], draw(512)
    for _ in range(attempts):
        history, recent = [system], []
        for _ in range(int(random.integers(4, 9))):
            action, observation = draw(int(random.integers(60, 101))), draw(int(random.integers(200, 401)))
            prompt = np.concatenate([system, draw(60), *recent[-2:]] if name == "W3" else history)
            turns.append(make_turn(prompt, action, random))
            kept = action if name == "W1" else action[int(0.6 * len(action)) :]
            history += [kept, observation]
            recent.append(np.concatenate([kept, observation]))
    return turns


def conversation(num_turns: int, stripped: bool, seed: int = 0) -> list[Turn]:
    """Two attempts of equal turns, 24 sampled and 40 observed tokens each; stripped of half of each action later."""
    random = np.random.default_rng(seed)
    turns, system = [], random.integers(3, VOCABULARY, 64)
    for _ in range(2):
        history = system
        for _ in range(num_turns):
            action = random.integers(3, VOCABULARY, 24)
            turns.append(make_turn(history, action, random))
            seen = random.integers(3, VOCABULARY, 40)
            history = np.concatenate([history, action[12:] if stripped else action, seen])
    return turns


def make_turn(prompt: Any, action: Any, random: np.random.Generator) -> Turn:
    logprobs = -math.log(VOCABULARY) + 0.1 * random.standard_normal(len(action))
    said = Message("assistant", "")
    return Turn(prompt, action, logprobs, np.zeros(len(action), np.int32), StopReason.end_token, 0.0, said)


# ---------------------------------------------------------------- layouts


def padded_plans(turns: list[Turn], passes: list[Rows], width: int | None) -> list[Plan]:
    """Padded rows as plans: chains of equal length whose last tokens nobody reads."""
    plans = []
    for rows in passes:
        rows = Rows(rows.turns, width or rows.width)
        tokens, _ = rows.fill_in(turns)
        bare = Plan.of_chains(tokens)
        nodes = [
            row * rows.width + np.arange(len(turns[turn].prompt), len(turns[turn].prompt) + len(turns[turn].action))
            for row, turn in enumerate(rows.turns)
        ]
        offsets = np.concatenate(([0], np.cumsum([len(of_turn) for of_turn in nodes]))).astype(np.int64)
        plans.append(Plan(bare.tokens, bare.depth, bare.parent, bare.exit, rows.turns, offsets, np.concatenate(nodes)))
    return plans


def longest(turns: list[Turn]) -> int:
    return max(len(turn.prompt) + len(turn.action) for turn in turns)


def padded(turns: list[Turn], budget: int) -> list[Plan]:
    width = longest(turns)
    rows = max(1, budget // width)
    trained = [place for place, turn in enumerate(turns) if len(turn.action)]
    passes = [Rows(np.array(trained[i : i + rows]), width) for i in range(0, len(trained), rows)]
    return padded_plans(turns, passes, width)


LAYOUTS: dict[str, Callable[[list[Turn], int], list[Plan]]] = {
    "tree": cut,
    "packed": pack,
    "merged": merge,
    "sorted": lambda turns, budget: padded_plans(turns, pad_by_length(turns, budget), None),
    "padded": padded,
}


def make_learner(size: str, positions: int = 65536) -> Learner:
    torch.manual_seed(0)
    shape = MODELS[size]
    heads = shape["num_attention_heads"]
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        num_key_value_heads=heads // 2,
        head_dim=shape["hidden_size"] // heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        **shape,
    )
    learner = Learner(Policy(Qwen3ForCausalLM(config)), OptimizerSettings(1e-4), lambda update: 1.0)
    learner.stepper.step = lambda *arguments: {}  # costs the same for all layouts
    return learner


def flops(plans: list[Plan], size: str) -> float:
    """Of an update: 6 per linear weight and token; per head weight and unique action token 6, or 8 where there are so
    many that logits are computed again in the backward pass; 14 per attention channel and pair (2 products forward, 5
    backward)."""
    shape = MODELS[size]
    d, f, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    linear = layers * (3 * d * d + 3 * d * f)
    total = 0.0
    for plan in plans:
        again = 4 / 3 if plan.num_stretches > 1 else 1.0
        total += again * (6 * linear * plan.num_tokens + 14 * layers * d * plan.num_pairs)
        for stretch in plan.stretches:
            elements = VOCABULARY * len(stretch.nodes)
            total += (6 if elements <= KEPT_ELEMENTS else 8) * d * elements
    return total


# ---------------------------------------------------------------- one measurement, in a process of its own


def update_once(learner: Learner, turns: list[Turn], plans: list[Plan]) -> float:
    """CPU seconds of the forward and backward passes of one update."""
    credit = [np.full(len(turn.action), 1.0 if place % 2 else -1.0) for place, turn in enumerate(turns)]
    share = 1.0 / sum(len(turn.action) for turn in turns)
    weights = [np.full(len(turn.action), share) for turn in turns]
    before = time.process_time()
    learner.update(plans, credit, weights, {"old": [turn.logprobs for turn in turns]}, Objective(ppo_clip))
    return time.process_time() - before


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(size: str, name: str, attempts: int, layout: str, sample: int) -> dict[str, float]:
    turns = workload(name, attempts)
    learner = make_learner(size)
    base = peak_bytes()
    before = time.process_time()
    plans = LAYOUTS[layout](turns, BUDGET)
    planning = time.process_time() - before
    chosen = plans[sample // 2 :: sample] if sample > 1 and len(plans) >= 2 * sample else plans
    update_once(learner, turns[:1], pack(turns[:1], BUDGET))  # what only the first pass of a process has to do
    seconds = update_once(learner, turns, chosen)
    tokens, part = (sum(plan.num_tokens for plan in some) for some in (plans, chosen))
    return {
        "seconds": seconds * tokens / part,
        "planning": planning,
        "tokens": tokens,
        "pairs": sum(plan.num_pairs for plan in plans),
        "flops": flops(plans, size),
        "passes": len(plans),
        "peak": peak_bytes() - base,
        "sampled": float(len(chosen) < len(plans)),
    }


def measure_growth(num_turns: int, stripped: bool) -> dict[str, float]:
    turns = conversation(num_turns, stripped)
    learner = make_learner("6M")
    plans = cut(turns, BUDGET * 2)
    update_once(learner, turns[:1], pack(turns[:1], BUDGET))
    rows = [len(turn.prompt) + len(turn.action) for turn in turns]
    return {
        "seconds": min(update_once(learner, turns, plans) for _ in range(3)),
        "tokens": sum(plan.num_tokens for plan in plans),
        "pairs": sum(plan.num_pairs for plan in plans),
        "row_tokens": sum(rows),
        "row_pairs": sum(row * (row + 1) // 2 for row in rows),
    }


def measure_memory(tokens: int, budget: int, compare: bool) -> dict[str, float]:
    """A trajectory of so many tokens in passes of at most `budget`, and, to compare, in one pass."""
    count = tokens // 64 - 1  # with the system prompt just under so many, so that passes are full at every length
    turns = conversation(count, False)[:count]
    learner = make_learner("6M")
    relays: list[Relay] = []

    class Kept(Relay):
        def __init__(self, num_tokens: int) -> None:
            super().__init__(num_tokens)
            relays.append(self)

    policies.Relay = Kept  # type: ignore[attr-defined]  # the name that the policy calls
    update_once(learner, turns[:2], pack(turns[:2], BUDGET))
    base = peak_bytes()
    plans = cut(turns, budget)
    seconds = update_once(learner, turns, plans)
    handed = max((relay.num_bytes for relay in relays), default=0)
    figures = {
        "seconds": seconds,
        "tokens": sum(plan.num_tokens for plan in plans),
        "stretches": sum(plan.num_stretches for plan in plans),
        "peak": peak_bytes() - base,
        "handed": handed,
    }
    if compare:
        gradient = flat_gradient(learner)
        figures["seconds_whole"] = update_once(learner, turns, cut(turns, 1 << 30))
        whole = flat_gradient(learner)
        figures["gradient_error"] = float((gradient - whole).norm() / whole.norm())
    return figures


def flat_gradient(learner: Learner) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in learner.policy.model.parameters() if p.grad is not None])


def measure_planning(tokens: int) -> dict[str, float]:
    """A step of W2-like groups with so many tokens of turns: seconds to lay it out, and to balance it over 8 ranks."""
    groups: list[list[Turn]] = []
    while sum(len(t.prompt) + len(t.action) for group in groups for t in group) < tokens:
        groups.append(workload("W2", seed=len(groups)))
    turns = [turn for group in groups for turn in group]
    best: dict[str, float] = {}
    for _ in range(5):
        start = time.process_time()
        plans = cut(turns, BUDGET)
        middle = time.process_time()
        for plan in plans:
            _ = plan.stretches
        after = time.process_time()
        balance([Cost(3e-4, 3e-8).of(plan) for plan in plans], 8)
        now = {"cut": middle - start, "blocks": after - middle, "balance": time.process_time() - after}
        best = min(best or now, now, key=lambda figures: sum(figures.values()))
    given = sum(len(turn.prompt) + len(turn.action) for turn in turns)
    return {**best, "tokens": given, "unique": sum(plan.num_tokens for plan in plans)}


MEASURES: dict[str, Callable[..., dict[str, float]]] = {
    "speed": measure,
    "growth": measure_growth,
    "memory": measure_memory,
    "planning": measure_planning,
}


def in_process(which: str, *arguments: Any) -> dict[str, float]:
    """Measured in a fork of this process, which has imported everything and computed nothing."""
    with get_context("fork").Pool(1, torch.set_num_threads, (1,)) as pool:
        return pool.apply(MEASURES[which], arguments)


# ---------------------------------------------------------------- the four tables


CASES = {f"6M-{name}": ("6M", name, 8, 3) for name in ("W1", "W2", "W3", "W4")} | {
    "50M-W4": ("50M", "W4", 8, 3),
    "50M-W2": ("50M", "W2", 3, 1),
}
"""By name: (model, workload, attempts, repeats)."""


def speed(quick: bool, names: Sequence[str] = tuple(CASES)) -> list[dict[str, Any]]:
    cases = [("6M", "W4", 8, 1)] if quick else [CASES[name] for name in names]
    lines = []
    for size, name, attempts, repeats in cases:
        runs: dict[str, list[dict[str, float]]] = {layout: [] for layout in LAYOUTS}
        for _ in range(repeats):
            for layout in ("tree", "packed"):
                runs[layout].append(in_process("speed", size, name, attempts, layout, 1))
        for layout in ("merged", "sorted", "padded"):
            if size == "6M":
                sample = 6 if layout == "padded" and name != "W4" else 1
                runs[layout].append(in_process("speed", size, name, attempts, layout, sample))
        lines.append(speed_line(size, name, attempts, runs))
    return lines


def speed_line(size: str, name: str, attempts: int, runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Print and return one workload's figures."""
    seconds = {layout: statistics.median(r["seconds"] for r in found) for layout, found in runs.items() if found}
    first = {layout: found[0] for layout, found in runs.items() if found}
    tree = first["tree"]
    ratios = {kind: first["packed"][kind] / tree[kind] for kind in ("tokens", "pairs", "flops")}
    pairs = zip(runs["packed"], runs["tree"], strict=True)
    spread = sorted(packed["seconds"] / shared["seconds"] for packed, shared in pairs)
    share = seconds["packed"] / seconds["tree"] / ratios["flops"]
    who = f"{name} {size}" + (f" ({attempts} attempts)" if attempts != 8 and name != "W4" else "")
    print(f"\n{who}: packed / tree, ", ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in ratios.items()))
    for layout, value in seconds.items():
        figures = first[layout]
        marked = " (sampled passes)" if figures["sampled"] else ""
        print(
            f"  {layout:8}{value:9.2f} s  {value / seconds['tree']:6.2f}x  {figures['tokens']:9,.0f} tokens  "
            f"{figures['passes']:4.0f} passes  peak {figures['peak'] / 2**20:7.0f} MiB{marked}"
        )
    print(
        f"  measured packed / tree {statistics.median(spread):.2f} ({spread[0]:.2f} to {spread[-1]:.2f}), "
        f"{share:.0%} of the FLOP ratio; planning {tree['planning'] / seconds['tree']:.2%} of the update",
        flush=True,
    )
    return {"model": size, "workload": name, "attempts": attempts, "runs": runs, "ratios": ratios, "seconds": seconds}


def growth(quick: bool) -> list[dict[str, Any]]:
    lines = []
    for stripped in (False, True):
        print(f"\n{'stripped' if stripped else 'growing'} history, 2 attempts: update against the number of turns")
        print("  turns   unique tokens      pairs   seconds    row tokens      row pairs")
        found = []
        for turns in (2, 4, 8) if quick else (2, 4, 8, 16, 32, 64):
            figures = in_process("growth", turns, stripped)
            found.append({"turns": turns, **figures})
            print(
                f"  {turns:5}{figures['tokens']:16,.0f}{figures['pairs']:11,.0f}{figures['seconds']:10.3f}"
                f"{figures['row_tokens']:14,.0f}{figures['row_pairs']:15,.0f}",
                flush=True,
            )
        lines.append({"stripped": stripped, "points": found, **fit(found)})
    return lines


def fit(points: list[dict[str, float]]) -> dict[str, float]:
    """Seconds as a T + b T^2, and as what tokens and pairs explain."""
    turns, seconds = (np.array([point[name] for point in points]) for name in ("turns", "seconds"))
    a, b = np.linalg.lstsq(np.stack([turns, turns**2], 1) / seconds[:, None], np.ones(len(points)), rcond=None)[0]
    tokens, pairs = (np.array([point[name] for point in points], np.float64) for name in ("tokens", "pairs"))
    token, pair = np.linalg.lstsq(np.stack([tokens, pairs], 1) / seconds[:, None], np.ones(len(points)), rcond=None)[0]
    last = points[-1]
    explained = pair * (last["pairs"] - last["tokens"]) / last["turns"] ** 2
    print(f"  seconds = {a:.2e} T + {b:.2e} T^2; {pair:.2e} s a pair explain a coefficient of {explained:.2e}")
    rows, unique = (last[name] / points[0][name] for name in ("row_tokens", "tokens"))
    print(f"  {points[0]['turns']} to {last['turns']} turns: row tokens x{rows:.0f}, unique tokens x{unique:.1f}")
    return {"a": float(a), "b": float(b), "token": float(token), "pair": float(pair), "explained": float(explained)}


def memory(quick: bool) -> list[dict[str, Any]]:
    sizes, budget = ((1024, 2048), 512) if quick else ((8192, 32768), 4096)
    print(f"\none trajectory in passes of at most {budget} tokens")
    lines = []
    for tokens in sizes:
        figures = in_process("memory", tokens, budget, False)
        checked = in_process("memory", tokens, budget, True)
        figures |= {name: checked[name] for name in ("gradient_error", "seconds_whole")}
        lines.append({"asked": tokens, **figures})
        handed, rest = figures["handed"], figures["peak"] - figures["handed"]
        print(
            f"  {figures['tokens']:7,.0f} tokens in {figures['stretches']:.0f} passes: "
            f"peak {figures['peak'] / 2**20:.0f} MiB, of these K, V, dK, dV {handed / 2**20:.0f} "
            f"({handed / figures['tokens']:,.0f} bytes a token), the rest {rest / 2**20:.0f}; "
            f"against one pass: gradient {figures['gradient_error']:.1e}, "
            f"time {figures['seconds'] / figures['seconds_whole']:.2f}x",
            flush=True,
        )
    short, long = (line["peak"] - line["handed"] for line in lines)
    print(f"  peak without K, V, dK, dV, long against short: {long / short:.3f}")
    return lines


def planning(quick: bool) -> list[dict[str, Any]]:
    figures = in_process("planning", 200_000 if quick else 2_000_000)
    total = figures["cut"] + figures["blocks"] + figures["balance"]
    print(
        f"\n{figures['tokens']:,.0f} tokens ({figures['unique']:,.0f} unique) planned in {total:.3f} s: tree and cut "
        f"{figures['cut']:.3f}, blocks {figures['blocks']:.3f}, balance over 8 ranks {figures['balance']:.4f}",
        flush=True,
    )
    return [figures]


PARTS: dict[str, Callable[..., Any]] = {"speed": speed, "growth": growth, "memory": memory, "planning": planning}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="of the speed table")
    parser.add_argument("--quick", action="store_true", help="small workloads: under a minute")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    parts: dict[str, Callable[..., Any]] = {**PARTS, "speed": partial(speed, names=chosen.cases)}
    found = {name: parts[name](chosen.quick) for name in chosen.only}
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

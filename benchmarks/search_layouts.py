"""How wide and how long batches of a search agent are, and how long an optimizer step on them takes, in six layouts.

    python benchmarks/search_layouts.py [--seeds 0 1 2] [--cases cut uncut] [--parts lengths steps] [--only-report]
                                        [--quick] [--data PATH] [--picture PATH] [--json PATH]

The environment's own expert plays, with mistakes, over the real corpus and the real retrieval server, and the
tokenizer of SmolLM2 counts: 16 questions with 8 attempts each. Limits are those of the field's report: prompts of up to
4096 tokens, actions of up to 500. First: turnwise data factbook; turnwise data smollm2-135m.

Padded, as others do, prompts left of responses and each side as wide as its widest:
    observations   a row is a turn; a response is an action and the observation after it
    actions        a row is a turn; a response is an action
    trajectories   a row is a turn and all that continue it; a response is actions and the observations between them
Without padding:
    packed         every turn by itself
    merged         the rows of trajectories
    tree           prefixes in common are computed once, also between attempts: unique tokens

Then the forward and backward passes of a step are timed on one question with four attempts, in CPU seconds of one
thread. The model is a Qwen3 of one small layer with random weights. Padded rows are computed by transformers in batches
of at most 16,384 tokens, and its output layer sees action tokens only, which is generous to them. The others are
computed by a turnwise policy in passes of as many tokens. Every layout computes the same sum over the same action
tokens; with --quick, which computes all passes, the script checks that its gradient is the same. Padded passes of one
shape take the same time whatever is in them, so that otherwise one of each layout is timed, and counted for all. Every
finished part is a line of the data, and is not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from matrix import Cell, finished, interval, make
from picture import Picture, title
from search_batches import CASES, Groups, folded, measure, played, sides, trained, unique_to
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from turnwise.data.catalogue import model_folder
from turnwise.learn.policy import Policy, load_tokenizer
from turnwise.learn.transformers_reference import stock_attention
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.plan import Plan
from turnwise.plan.rows import chains_of, merge
from turnwise.rollout.render.renderer import Renderer
from turnwise.types import Turn

DATA = Path(__file__).parent / "data" / "search-layouts.jsonl"
BUDGET = 16_384
"""Tokens of a pass."""
SIZES = {"lengths": (16, 8), "steps": (1, 4)}
"""Questions, and attempts at each."""
VOCABULARY, HIDDEN, LAYERS = 4096, 256, 1
"""Of the model that is timed: every layer takes the same time. With the tokenizer's 49,152 tokens the output layer, the
same work in every layout, would be most of a small model."""
PADDED = ("observations", "actions", "trajectories")
REPEATS = {"merged": 3, "tree": 3}
"""The median counts. The others take longer, and are timed once."""
FIELD = {"observations": "9,434", "actions": "3,897", "tree": "2,920"}
"""What others report of the padded width."""
Passes = Callable[[], None]
"""Forward and backward over a batch; leaves the gradient on the model."""


def make_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    heads = HIDDEN // 64
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
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


@dataclass(frozen=True)
class Row:
    """A row of a padded batch."""

    prompt: int
    """Tokens of its prompt, which ends where all prompts end."""
    turns: Sequence[int]
    """Each continues the one before; the last one has all tokens of the row."""


def rows_in_pass(at: tuple[int, int]) -> int:
    return max(1, BUDGET // sum(at))


def in_rows(model: Any, turns: Sequence[Turn], rows: Sequence[Row], factors: Sequence[np.ndarray], at: Any) -> None:
    """Rows of one width: prompts end where responses begin, and both are padded."""
    left, right = at
    with stock_attention(model):
        size = rows_in_pass(at)
        for some in (rows[first : first + size] for first in range(0, len(rows), size)):
            tokens = torch.zeros(len(some), left + right, dtype=torch.long)
            mask = torch.zeros_like(tokens)
            places: list[tuple[int, int]] = []
            for number, row in enumerate(some):
                last, begin = turns[row.turns[-1]], left - row.prompt
                text = np.concatenate([last.prompt, last.action]).astype(np.int64)
                tokens[number, begin : begin + len(text)] = torch.from_numpy(text)
                mask[number, begin : begin + len(text)] = 1
                for turn in (turns[place] for place in row.turns):
                    first = begin + len(turn.prompt)
                    places += [(number, place) for place in range(first, first + len(turn.action))]
            of_row, place = torch.tensor(places).T
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            hidden = model.model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)
            logits = model.lm_head(hidden.last_hidden_state[of_row, place - 1])
            logprobs = logits.log_softmax(-1).gather(1, tokens[of_row, place][:, None])[:, 0]
            given = torch.from_numpy(np.concatenate([factors[turn] for row in some for turn in row.turns]))
            (logprobs * given).sum().backward()


def layouts(
    groups: Groups, widths: Mapping[str, tuple[int, int]], policy: Policy, *, whole: bool = True
) -> dict[str, tuple[Passes, float]]:
    """(forward and backward, the share of the batch that it computes) by layout: all of it, or one pass of those that
    are padded."""
    turns = trained(groups)
    random = np.random.default_rng(0)
    factors = [random.normal(size=len(turn.action)).astype(np.float32) for turn in turns]
    single = [Row(len(turn.prompt), (place,)) for place, turn in enumerate(turns)]
    chains, _ = chains_of(turns, 1 << 30)
    merged = [Row(len(turns[chain[0]].prompt), chain) for chain in chains]
    plans = partial(in_plans, policy)

    def padded(rows: Sequence[Row], at: tuple[int, int]) -> tuple[Passes, float]:
        some = rows if whole else rows[: rows_in_pass(at)]
        return lambda: in_rows(policy.model, turns, some, factors, at), len(some) / len(rows)

    return {
        **{name: padded(merged if name == "trajectories" else single, widths[name]) for name in PADDED},
        "packed": (lambda: plans(pack(turns, BUDGET), factors), 1.0),
        "merged": (lambda: plans(merge(turns, BUDGET), factors), 1.0),
        "tree": (lambda: plans(cut(turns, BUDGET), factors), 1.0),
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


def run_cell(cell: Cell, quick: bool = False) -> dict[str, Any]:
    """A batch measured or, with fewer attempts, timed."""
    began = time.process_time()
    renderer = Renderer(load_tokenizer(model_folder("smollm2-135m")))
    groups = played(renderer, cell["case"], cell["seed"], *((1, 2) if quick else SIZES[cell["what"]]))
    found = measure(renderer, groups)
    if cell["what"] == "steps":
        widths = sides(renderer, groups)
        found["seconds"], found["gradient_off"] = step_seconds(folded(groups, VOCABULARY), widths, whole=quick)
    return {**found, "cpu_seconds": time.process_time() - began}


def step_seconds(
    groups: Groups, widths: Mapping[str, tuple[int, int]], *, whole: bool
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """(CPU seconds of every repeat, how far the gradient is from that of the tree where all passes are computed), by
    layout."""
    torch.set_num_threads(1)
    policy = Policy(make_model())
    truth: Tensor | None = None
    seconds, off = {}, {}
    for name, (passes, share) in reversed(layouts(groups, widths, policy, whole=whole).items()):
        spent, found = timed(policy.model, passes, REPEATS.get(name, 1))
        seconds[name] = [one / share for one in spent]
        truth = found if truth is None else truth
        if share == 1.0:
            off[name] = float((found - truth).norm() / truth.norm())
            assert off[name] < 1e-3, f"the gradient of {name} is off by {off[name]:.1e}"
    return seconds, off


def cells(seeds: Sequence[int], cases: Sequence[str], parts: Sequence[str]) -> list[Cell]:
    return [{"what": what, "case": case, "seed": seed} for seed in seeds for case in cases for what in parts]


# ---------------------------------------------------------------- what the page says

Runs = Sequence[Mapping[str, Any]]


def runs_of(runs: Runs, what: str, case: str) -> list[Mapping[str, Any]]:
    return [run for run in runs if run["cell"]["what"] == what and run["cell"]["case"] == case]


def times_of(runs: Runs) -> dict[str, list[float]]:
    """By layout, how many times as long as with the tree a step takes, batch by batch."""
    found: dict[str, list[float]] = {}
    for run in runs:
        medians = {name: statistics.median(seconds) for name, seconds in run["seconds"].items()}
        for name, median in medians.items():
            found.setdefault(name, []).append(median / medians["tree"])
    return found


def report(runs: Runs) -> None:
    for case in CASES:
        lengths, steps = runs_of(runs, "lengths", case), runs_of(runs, "steps", case)
        if not lengths:
            continue
        attempts, turns, chains = ([run[name] for run in lengths] for name in ("attempts", "turns", "chains"))
        heard, longest = ([run["observation"][name] for run in lengths] for name in ("mean", "max"))
        print(f"\n{case}: {len(lengths)} batches of {extent(attempts)} attempts and {extent(turns)} turns")
        print(
            f"rows of trajectories: {extent(chains)}; observations of {extent(heard)} tokens, at most {max(longest):,}"
        )
        print(f"attempts by status: {[run['statuses'] for run in lengths]}")
        print(f"{'':13} {'width':>16} {'tokens per attempt':>18}  times the unique ones   step: times the tree's")
        ratios, times = [unique_to(run["tokens"]) for run in lengths], times_of(steps)
        for name in ratios[0]:
            width = extent([run["width"][name] for run in lengths]) if name in (*PADDED, "tree") else ""
            tokens = extent([run["tokens"][name] / run["attempts"] for run in lengths])
            ratio = interval([one[name] for one in ratios])
            print(f"{name:13} {width:>16} {tokens:>18}   {ratio:>19}   {interval(times.get(name, [])):>19}")
        small = [unique_to(run["tokens"]) for run in steps]
        if steps:
            print(f"in the batches that are timed, of {extent([run['turns'] for run in steps])} turns:")
        for name in small[0] if small else ():
            seconds = [statistics.median(run["seconds"][name]) for run in steps]
            off = max((run["gradient_off"][name] for run in steps if name in run["gradient_off"]), default=math.nan)
            print(f"{name:13} {interval([one[name] for one in small])} times the unique tokens, "
                  f"{interval(seconds)} CPU seconds, gradient off by {off:.0e}")  # fmt: skip
    print(f"\nwidths that others report: {FIELD}")


def extent(values: Sequence[float]) -> str:
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return low if low == high else f"{low} to {high}"


def draw(runs: Runs, path: Path) -> None:
    """Tokens and seconds of every layout as multiples of the tree's."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    picture = Picture(11, 4.2, columns=len(CASES))
    for axes, case in zip(picture.panels[0], CASES, strict=True):
        steps = runs_of(runs, "steps", case)
        ratios = [unique_to(run["tokens"]) for run in steps]
        names = list(ratios[0])
        tokens = {name: [one[name] for one in ratios] for name in names}
        shown = {
            "tokens": (tokens, "#1f77b4"),
            "seconds of a step": (times_of(steps), "#d95f02"),
        }
        axes.set_yscale("log")
        axes.set_ylim(0.8, 100)
        axes.yaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 50]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} x"))
        for number, (said, (values, color)) in enumerate(shown.items()):
            means = [statistics.fmean(values[name]) for name in names]
            reach = [
                [mean - min(values[name]) for mean, name in zip(means, names, strict=True)],
                [max(values[name]) - mean for mean, name in zip(means, names, strict=True)],
            ]
            across = [place + 0.4 * number - 0.2 for place in range(len(names))]
            axes.bar(across, means, 0.38, yerr=reach, color=color, ecolor="#1f2430", capsize=2, label=said)
        axes.set_xticks(range(len(names)), names, fontsize=8)
        title(axes, "observations cut to 2,000 characters" if case == "cut" else "observations uncut")
    picture.save(path, "", "times what the tree has", legend="upper right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--parts", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--data", type=Path, default=DATA, help="finished parts, as JSON lines")
    parser.add_argument("--only-report", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="two attempts: shows that it runs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="draw tokens and seconds here, as SVG")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "quick.jsonl" if chosen.quick else chosen.data
        wanted = (
            cells(chosen.seeds[:1], ["cut"], chosen.parts)
            if chosen.quick
            else cells(chosen.seeds, chosen.cases, chosen.parts)
        )
        if not chosen.only_report:
            make(wanted, data, partial(run_cell, quick=chosen.quick))
        runs = finished(data)
    report(runs)
    if chosen.picture:
        draw(runs, chosen.picture)
    if chosen.json:
        chosen.json.write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()

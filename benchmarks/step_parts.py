"""Where a training step's CPU time goes, in turnwise and in TRL, and how fast the matrix products are in it.

    python benchmarks/step_parts.py [--case diverse-6M] [--steps 3] [--trl cached] [--json PATH]

Workloads and sides are those of benchmarks/against_trl.py. Parts are measured as CPU seconds of their thread:
    sampling    the engine's passes; with TRL model.generate, rendering and environments included
    learning    forward and backward passes of the update
    optimizer   clipping and the optimizer step
    the rest    all else of the process: agent loop, environments, plans, weight check, records, event loop, the trainer
Products are the operations of the model's linear layers, which both sides need for every token that they compute:
2 for each of their weights in a forward pass, and 4 more in a backward pass. The machine's rate is that of products of
2048 rows with matrices of these shapes, measured before, between and after the steps, where the same other work runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

import against_trl as duel


class Parts:
    """CPU seconds by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def around(self, owner: Any, name: str, part: str) -> Any:
        """A patch that counts what a function takes, less what parts within it take."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            began, before = time.thread_time(), sum(self.seconds.values())
            try:
                return function(*arguments, **named)
            finally:
                inner = sum(self.seconds.values()) - before
                self.seconds[part] += time.thread_time() - began - inner

        return patch.object(owner, name, timed)


def products_of(model: Any) -> tuple[int, int]:
    """Weights of linear layers, (of the layers, of the head)."""
    import torch

    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return sum(m.weight.numel() for m in layers), head.weight.numel()


def machine_rate(model: Any) -> float:
    """GFLOP per CPU second of products with the shapes of the model's layers."""
    import torch

    shapes = {tuple(m.weight.shape) for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)}
    spent = work = 0.0
    for rows, columns in sorted(shapes):
        weight, states = torch.randn(rows, columns), torch.randn(2048, columns)
        with torch.no_grad():
            best = []
            for _ in range(5):
                began = time.thread_time()
                states @ weight.T
                best.append(time.thread_time() - began)
        spent += min(best)
        work += 2 * 2048 * rows * columns
    return work / spent / 1e9


def work(request: dict[str, Any]) -> None:
    """Measure one side, in this process."""
    import torch

    from turnwise.learn.policy import load_model

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(request["threads"])
    model = load_model(request["folder"])
    parts = Parts()
    lines: list[dict[str, Any]] = []
    rates = [machine_rate(model)]
    ended = duel.Laps.end

    def end(laps: Any, **figures: float) -> None:
        ended(laps, **figures)
        lines.append({**laps.steps[-1], "parts": dict(parts.seconds)})
        parts.seconds.clear()
        rates.append(machine_rate(model))
        laps.begin()

    with patch.object(duel.Laps, "end", end):
        if request["side"] == "turnwise":
            play_turnwise(request, parts)
        else:
            play_trl(request, parts)
    found = {"lines": lines, "rate": statistics.median(rates), "weights": products_of(model)}
    print("RESULT " + json.dumps(found), flush=True)


def play_turnwise(request: dict[str, Any], parts: Parts) -> None:
    from turnwise.engines.slots.model import SlotModel
    from turnwise.learn.learner import Learner
    from turnwise.learn.stepper import Stepper

    with (
        parts.around(SlotModel, "step", "sampling"),
        parts.around(Learner, "update", "learning"),
        parts.around(Stepper, "step", "optimizer"),
    ):
        asyncio.run(duel.train_turnwise(request))


def play_trl(request: dict[str, Any], parts: Parts) -> None:
    import torch
    import trl_trainer
    from transformers import Trainer
    from trl import GRPOTrainer

    with (
        parts.around(trl_trainer.Rollout, "__call__", "sampling"),
        parts.around(GRPOTrainer, "_compute_loss", "learning"),
        parts.around(torch.Tensor, "backward", "learning"),
        parts.around(torch.optim.AdamW, "step", "optimizer"),
        parts.around(Trainer, "_clip_grad_norm", "optimizer")
        if hasattr(Trainer, "_clip_grad_norm")
        else parts.around(torch.nn.utils, "clip_grad_norm_", "optimizer"),
    ):
        duel.train_trl(request)


# ---------------------------------------------------------------- reporting


def operations(side: str, line: Mapping[str, float], weights: tuple[int, int]) -> dict[str, float]:
    """GFLOP of products by part. turnwise computes the head for the tokens it samples or trains; TRL for every place
    of a completion that it trains, of which `trained` has the prompts too, so that its rate is a little flattered."""
    layers, head = weights
    sampling = (line["prefilled"] + line["sampled"]) * layers + line["sampled"] * head
    heads = line["sampled"] if side == "turnwise" else line["trained"]
    learning = 3 * (line["trained"] * layers + heads * head)
    return {"sampling": 2e-9 * sampling, "learning": 2e-9 * learning}


def report(side: str, found: Mapping[str, Any]) -> None:
    lines = found["lines"][1:]
    middle: Callable[[str], float] = lambda name: statistics.median(line["parts"].get(name, 0.0) for line in lines)
    total = statistics.median(line["cpu"] for line in lines)
    seconds = {name: middle(name) for name in ("sampling", "learning", "optimizer")}
    seconds["the rest"] = total - sum(seconds.values())
    works = [operations(side, line, found["weights"]) for line in lines]
    print(f"\n{side}: {total:.2f} CPU seconds a step, machine {found['rate']:.0f} GFLOP/s")
    print(f"{'':12}{'CPU s':>8}{'share':>8}{'tokens':>9}{'GFLOP':>8}{'GFLOP/s':>9}{'of the machine':>16}")
    for name, spent in seconds.items():
        print(f"{name:12}{spent:>8.2f}{spent / total:>8.0%}", end="")
        if name in works[0]:
            gflop = statistics.median(one[name] for one in works)
            fields = ("prefilled", "sampled") if name == "sampling" else ("trained",)
            tokens = statistics.median(sum(line[field] for field in fields) for line in lines)
            rate = gflop / spent
            print(f"{tokens:>9.0f}{gflop:>8.1f}{rate:>9.0f}{rate / found['rate']:>16.0%}", end="")
        print()


def ask(request: dict[str, Any]) -> dict[str, Any]:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "0"}
    environment |= {name: str(request["threads"]) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, __file__, "--worker", json.dumps(request)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{request['side']} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="diverse-6M", choices=list(duel.STEPS))
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--trl", default="cached", choices=("generate", "cached"), help="its variant")
    parser.add_argument("--groups", type=int, default=0, help="of 8 attempts a step; 0: the workload's")
    parser.add_argument("--only", choices=("turnwise", "trl"), help="only this side")
    parser.add_argument("--quick", action="store_true", help="2 groups a step and one step: no figures")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(json.loads(chosen.worker))
        return
    sides = [chosen.only] if chosen.only else ["turnwise", "trl"]
    steps = 1 + (1 if chosen.quick else chosen.steps)
    every = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = duel.warm_start(chosen.case, scratch, chosen.quick)
        for side in sides:
            request = {"case": chosen.case, "threads": 1, "steps": steps, "quick": chosen.quick, "side": side}
            request |= {"folder": folder, "gradient": f"{name}/gradient", "rows": f"{name}/rows", "micro_batch": 0}
            request["groups"] = chosen.groups
            request |= {"scratch": tempfile.mkdtemp(dir=name), "variant": chosen.trl, "attention": "sdpa"}
            every[side] = ask(request)
            report(side if side == "turnwise" else f"trl {chosen.trl}", every[side])
            if chosen.json:
                chosen.json.write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Each tensor of a model left behind by a load, one at a time: does the check at the start notice?

    python benchmarks/left_behind.py [--model smollm2-135m] [--engine slots|vllm] [--dtype bfloat16] [--every N]

Makes the same changes of weights and the same probes as a run does when it starts, but loads each change once for every
tensor in it, with that tensor as it was before. A tensor is caught where engine and learner then differ by more than
the limit. Exit code 1 where one is not caught, or where a whole load is refused. `--engine vllm` needs the environment
of `make test-vllm`.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from turnwise.data.catalogue import model_folder
from turnwise.engines.base import Engine, vocabulary_of
from turnwise.engines.slots.engine import SlotEngine
from turnwise.engines.slots.model import SlotModel
from turnwise.learn.learner import Learner, save_policy
from turnwise.learn.policy import DTYPES, Policy, load_model, load_tokenizer
from turnwise.learn.schedules import schedule
from turnwise.learn.stepper import OptimizerSettings
from turnwise.plan.pack import pack
from turnwise.schedule.workers import inline
from turnwise.training.weight_check import AT_START, EXACT, ROOM, WeightCheck

CONTEXT = 160


@dataclass(frozen=True)
class Leaving:
    """What a load that left one tensor behind looked like."""

    name: str
    change: str
    times_limit: float


def slots(model: Any, tokenizer: Any, dtype: str) -> Engine:
    """The engine of this process, whose output layer is its own even where the model's is tied."""
    own = copy.deepcopy(model)
    head = own.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    slot_model = SlotModel(
        own, slots=AT_START, context=CONTEXT, end_tokens=(), decode=tokenizer.decode, dtype=DTYPES[dtype]
    )
    return SlotEngine(slot_model, run=inline, shares_weights=False)


def vllm(model: Any, tokenizer: Any, dtype: str) -> Engine:
    from turnwise.engines.vllm.engine import VllmEngine
    from turnwise.engines.vllm.local import LocalSettings, LocalVllm
    from turnwise.weights.vllm_file import FileTransfer

    settings = LocalSettings(AT_START, dtype, "cpu", torch.get_num_threads(), cache=256, pass_tokens=2048)
    return VllmEngine(
        LocalVllm(partial(save_policy, model, tokenizer), settings),
        FileTransfer(DTYPES[dtype]),
        slots=AT_START,
        context=CONTEXT,
        vocabulary=vocabulary_of(model),
        end_tokens=(),
        tensors=model.state_dict(),
    )


ENGINES = {"slots": slots, "vllm": vllm}


async def sweep(check: WeightCheck, every: int, tied: str) -> tuple[int, list[Leaving], list[str]]:
    """(how many tensors there are, those that were caught, those that were not)"""
    learner, engine = check.learner, check.engine
    plain = await check.sample(0, "plain", AT_START)
    gap = (await check.difference(plain)).size
    check.limit = check.limit or max(EXACT, ROOM * gap)
    changes, moved = await check.changes(plain.turns)
    print(f"gap {gap:.4f}, limit {check.limit:.4f}, {len(changes)} changes, the last moves logprobs by {moved:.3f}")
    first = {name: tensor.clone() for name, tensor in learner.publish().items()}
    open_names = [name for name in first if name != tied][::every]
    caught: dict[str, Leaving] = {}
    for number, change in enumerate(changes):
        learner.disturb(change)
        try:
            changed = learner.publish()
            whole = await gap_after(check, changed, number)
            label = change.mirror or f"flips of every {change.stride}th number"
            print(f"{label}: gap {whole / check.limit:.2f} of the limit where nothing is left behind", flush=True)
            assert whole <= check.limit, "a load of every tensor is refused"
            for name in open_names:
                if name in caught or torch.equal(first[name], changed[name]):
                    continue
                began = time.perf_counter()
                times = await gap_after(check, {**changed, name: first[name]}, number) / check.limit
                if not times <= 1.0:
                    caught[name] = Leaving(name, label, times)
                said = f"{times:6.2f} {'' if name in caught else 'not '}caught, {time.perf_counter() - began:.1f} s"
                print(f"  {name}: {said}", flush=True)
        finally:
            learner.undisturb()
    await engine.close()
    return len(open_names), list(caught.values()), [name for name in open_names if name not in caught]


async def gap_after(check: WeightCheck, weights: dict[str, Any], number: int) -> float:
    """The difference between engine and learner, in the probes of a start, once the engine has loaded these."""
    await check.engine.load(weights, 0)
    await check.engine.forget()
    return (await check.difference(await check.sample(0, f"disturbed {number}", AT_START))).size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a model that `turnwise data` fetches, or a folder")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="slots")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth tensor")
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    began = time.monotonic()
    folder = model_folder(chosen.model)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    policy = Policy(model, dtype=DTYPES[chosen.dtype], temperature=1.0, layout=pack, longest=CONTEXT)
    learner = Learner(policy, OptimizerSettings(1e-6, (0.9, 0.999), 0.0, 1.0), schedule("constant", 0, 1))
    engine = ENGINES[chosen.engine](model, tokenizer, chosen.dtype)
    vocabulary = min(len(tokenizer), model.get_input_embeddings().num_embeddings)
    check = WeightCheck(
        engine,
        learner,
        lambda turns: pack(turns, 4096),
        inline,
        temperature=1.0,
        vocabulary=vocabulary,
        exact=chosen.dtype == "float32",
        longest=CONTEXT,
    )
    tied = "lm_head.weight" if chosen.engine == "vllm" and model.config.tie_word_embeddings else ""
    count, caught, missed = asyncio.run(sweep(check, chosen.every, tied))
    print(
        f"\n{chosen.model} in {chosen.dtype}, engine {chosen.engine}: {len(caught)} of {count} tensors caught", end=""
    )
    print(f", {(time.monotonic() - began) / 60:.0f} minutes")
    if caught:
        times = sorted(one.times_limit for one in caught)
        weakest = min(caught, key=lambda one: one.times_limit)
        print(f"times the limit: least {times[0]:.2f} ({weakest.name}), median {statistics.median(times):.2f}")
    for name in missed:
        print(f"NOT CAUGHT: {name}")
    if chosen.json:
        caught_rows = [{"name": one.name, "change": one.change, "times_limit": one.times_limit} for one in caught]
        chosen.json.write_text(json.dumps({"caught": caught_rows, "missed": missed}, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

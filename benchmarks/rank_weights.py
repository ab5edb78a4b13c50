"""Weights of a learner over processes of this machine, into a file that engines map: in parts, or gathered and pickled.

    python benchmarks/rank_weights.py [--ranks 2] [--repeats 3] [--megabytes 1000] [--lora] [--json FILE]

Prints, for all ways in the same run: seconds of CPU per GB of weights over all processes, how many plain copies of the
same bytes into the same memory that is, seconds that pass, GB per second, and bytes that ranks wrote per byte.

* gathered: every rank gets all of each tensor by gloo, the first one pickles them into a pipe, the run reads them from
  there and copies them into the file.
* in parts: every rank copies its part into the file.
* in parts, bfloat16: the same, rounded on the way, as vLLM gets them. A GB is one of float32 here too.
* a pipe: the peer, the same bytes pickled as arrays from one process to another, and nothing else.
* a copy: what the memory can do, the same bytes copied into a mapped file by one thread.

With `--lora` the learner has adapters, and every rank merges its own part.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

from turnwise.cluster.mesh import MeshShape
from turnwise.cluster.processes import ProcessRanks
from turnwise.cluster.ranked import RankedLearner
from turnwise.cluster.spread import Spread
from turnwise.learn.learner import Learner
from turnwise.learn.lora import Adapters, LoraSettings
from turnwise.learn.policy import Policy
from turnwise.learn.stepper import OptimizerSettings
from turnwise.plan.balance import Cost
from turnwise.weights.object_store import tensors_of_arrays
from turnwise.weights.parted import PartedWeights
from turnwise.weights.publisher import Publisher

TICKS = os.sysconf("SC_CLK_TCK")


def steady(update: int) -> float:
    return 1.0


def learner_of(folder: Path, lora: bool, spread: Spread) -> Learner:
    put = partial(Adapters, settings=LoraSettings(rank=16, alpha=32.0), base="", seed=0) if lora else None
    placed = spread.load(folder, computed_in=torch.float32, put_adapters=put)
    policy = Policy(
        placed.model,
        temperature=1.0,
        reach=(),  # nothing is computed here
        enter=placed.enter,
        shard=placed.shard,
        sync=placed.sync,
        context=placed.context,
    )
    return Learner(policy, OptimizerSettings(0.0, clip_norm=1e9), steady, {}, None, adapters=placed.adapters)


def save_model(folder: Path, megabytes: int) -> None:
    """A model of about so many megabytes of float32 weights."""
    hidden, layers = 1024, 12
    each = (4 * hidden * hidden + 3 * hidden * 3072) * layers
    vocabulary = max(1000, int((megabytes * 1e6 / 4 - each) / hidden))
    config = transformers.Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=3072,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


def cpu_seconds(ranks: ProcessRanks) -> float:
    """Of this process, of its children that have ended and of all ranks, so far."""
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    for process in ranks.processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


class Ways:
    """The ways, each of which moves all weights once and returns how many bytes ranks wrote, if it knows."""

    def __init__(self, learner: RankedLearner, ranks: ProcessRanks, stack: ExitStack) -> None:
        self.learner, self.ranks = learner, ranks
        self.publisher = stack.enter_context(closing(Publisher()))
        self.rounding = stack.enter_context(closing(Publisher(dtype=torch.bfloat16)))
        self.size = self.in_parts(0)
        found = self.publisher.newest
        assert found is not None
        self.arrays = {name: found[name].numpy().copy() for name in found.manifest.entries}

    def gathered(self, version: int) -> int:
        self.publisher.publish(tensors_of_arrays(self.learner.call("publish")[0]), version)
        return 0

    def in_parts(self, version: int) -> int:
        return self.published(self.publisher, version)

    def rounded(self, version: int) -> int:
        return self.published(self.rounding, version)

    def published(self, publisher: Publisher, version: int) -> int:
        """Have ranks write their parts."""
        written: list[int] = []

        def ask(method: str, *arguments: Any) -> list[int]:
            written.extend(self.learner.ask(method, *arguments))
            return written

        publisher.publish(PartedWeights(self.learner.outline, ask, dict), version)
        return sum(written)

    def through_a_pipe(self, version: int) -> int:
        """From a process that has the arrays to this one."""
        here, there = multiprocessing.get_context("fork").Pipe()
        if not (child := os.fork()):
            there.send(self.arrays)
            os._exit(0)
        there.close()
        here.recv()
        os.waitpid(child, 0)
        return 0

    def by_a_copy(self, version: int) -> int:
        self.publisher.publish({name: torch.from_numpy(array) for name, array in self.arrays.items()}, version)
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--lora", action="store_true", help="with adapters of rank 16 on all layers")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_model(Path(folder), chosen.megabytes)
        here = importlib.import_module(Path(__file__).stem)  # by a name that ranks can import
        make = partial(here.learner_of, Path(folder), chosen.lora)
        ranks = stack.enter_context(closing(ProcessRanks(MeshShape(fsdp=chosen.ranks), make)))
        made = Ways(RankedLearner(ranks, Cost(1.0, 0.0)), ranks, stack)
        ways = {
            "gathered, pickled into a pipe, copied": made.gathered,
            "in parts": made.in_parts,
            "in parts, bfloat16": made.rounded,
            "peer: a pipe": made.through_a_pipe,
            "peer: a copy": made.by_a_copy,
        }
        rows: dict[str, list[tuple[float, float, int]]] = {name: [] for name in ways}
        for repeat in range(chosen.repeats + 1):
            for name, way in ways.items():
                spent, began = cpu_seconds(ranks), time.perf_counter()
                written = way(repeat)
                if repeat:  # the first touches memory that later ones find
                    rows[name].append((cpu_seconds(ranks) - spent, time.perf_counter() - began, written))
        size = made.size
    print_table(rows, size, chosen.ranks, chosen.lora)
    if chosen.json:
        chosen.json.write_text(json.dumps({"bytes": size, "rows": rows}) + "\n")


def print_table(rows: dict[str, list[tuple[float, float, int]]], size: int, ranks: int, lora: bool) -> None:
    adapters = ", adapters merged" if lora else ""
    repeats = len(rows["in parts"])
    print(f"{size / 1e9:.2f} GB of float32 weights over {ranks} ranks{adapters}, median and range of {repeats}")
    print("| way | CPU seconds a GB | in plain copies | seconds | GB/s | bytes written per byte |")
    print("|---|---|---|---|---|---|")
    copied = statistics.median(cpu for cpu, _, _ in rows["peer: a copy"])
    for name, found in rows.items():
        cpu = [each / (size / 1e9) for each, _, _ in found]
        wall = [each for _, each, _ in found]
        written = f"{found[0][2] / size:.2f}" if found[0][2] else "-"
        print(
            f"| {name} | {statistics.median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f}) "
            f"| {statistics.median(cpu) * (size / 1e9) / copied:.1f} "
            f"| {statistics.median(wall):.2f} ({min(wall):.2f} to {max(wall):.2f}) "
            f"| {size / 1e9 / statistics.median(wall):.2f} | {written} |"
        )


if __name__ == "__main__":
    main()

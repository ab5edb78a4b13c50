"""Weights of a learner over processes of this machine, into a file that engines map: in parts, or gathered and pickled.

    python benchmarks/rank_weights.py [--ranks 2] [--repeats 3] [--megabytes 1000] [--json FILE]

Prints, for both ways in the same run: seconds of CPU per GB of weights over all processes, and seconds that pass.
Gathered: every rank gets all of each tensor by gloo, the first one pickles them into a pipe, the run reads them from
there and copies them into the file. In parts: every rank copies its part into the file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

from turnwise.cluster.mesh import MeshShape
from turnwise.cluster.processes import ProcessRanks
from turnwise.cluster.spread import Spread
from turnwise.learn.learner import Learner
from turnwise.learn.policy import Policy
from turnwise.learn.stepper import OptimizerSettings
from turnwise.weights.object_store import tensors_of_arrays
from turnwise.weights.publisher import Publisher

TICKS = os.sysconf("SC_CLK_TCK")


def steady(update: int) -> float:
    return 1.0


def learner_of(folder: Path, spread: Spread) -> Learner:
    placed = spread.load(folder, computed_in=torch.float32)
    policy = Policy(
        placed.model,
        temperature=1.0,
        reach=(),  # nothing is computed here
        enter=placed.enter,
        shard=placed.shard,
        sync=placed.sync,
        context=placed.context,
    )
    return Learner(policy, OptimizerSettings(0.0, clip_norm=1e9), steady, {}, None)


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
    """Of this process and of all ranks, so far."""
    total = time.process_time()
    for process in ranks.processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


def gathered(ranks: ProcessRanks, publisher: Publisher, version: int) -> None:
    publisher.publish(tensors_of_arrays(ranks.call("publish")[0]), version)


def in_parts(ranks: ProcessRanks, publisher: Publisher, version: int) -> None:
    publisher.publish(ranks.publish(), version)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    rows: dict[str, list[tuple[float, float]]] = {"gathered": [], "in parts": []}
    ways: dict[str, Any] = {"gathered": gathered, "in parts": in_parts}
    with tempfile.TemporaryDirectory() as folder, closing(Publisher()) as publisher:
        save_model(Path(folder), chosen.megabytes)
        here = importlib.import_module(Path(__file__).stem)  # by a name that ranks can import
        make = partial(here.learner_of, Path(folder))
        with closing(ProcessRanks(MeshShape(fsdp=chosen.ranks), make)) as ranks:
            for repeat in range(chosen.repeats + 1):
                for name, way in ways.items():
                    spent, began = cpu_seconds(ranks), time.perf_counter()
                    way(ranks, publisher, repeat)
                    if repeat:  # the first touches memory that later ones find
                        rows[name].append((cpu_seconds(ranks) - spent, time.perf_counter() - began))
            size = publisher.newest.path.stat().st_size if publisher.newest else 0
    print(f"{size / 1e9:.2f} GB of float32 weights over {chosen.ranks} ranks, median and range of {chosen.repeats}")
    print("| way | CPU seconds a GB | seconds |")
    print("|---|---|---|")
    for name, found in rows.items():
        cpu = [each / (size / 1e9) for each, _ in found]
        wall = [each for _, each in found]
        print(
            f"| {name} | {statistics.median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f}) "
            f"| {statistics.median(wall):.2f} ({min(wall):.2f} to {max(wall):.2f}) |"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps({"bytes": size, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()

"""Bytes and seconds of a weight load: from a learner's tensors through shared memory into engines of other processes.

    python benchmarks/weight_sync.py [--quick] [--replicas 2] [--json out.json]

For models of about 6M and 135M parameters (random, float32, tied): what is published, how long that takes, how long
each replica takes to copy it into its own weights, and what the memory of a replica grows by while it does: published
weights are mapped, not read into memory of its own. Replicas only have the weights; none samples.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from turnwise.weights.published import Published
from turnwise.weights.publisher import Publisher

SIZES = {"6M": (256, 6, 1024, 2048), "135M": (576, 30, 1536, 49152)}
"""Width, layers, width of the middle, vocabulary."""
LOADS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="6M only")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(size, given.replicas) for size in (["6M"] if given.quick else SIZES)]
    print(f"{given.replicas} replicas, median of {LOADS} loads, one thread each")
    print("| parameters | MB | publish s | load s (slowest) | memory of a replica, MB | while it loads, MB |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['parameters'] / 1e6:.1f}M | {row['bytes'] / 1e6:.1f} | {row['publish']:.4f} | {row['load']:.4f} "
            f"| {row['own']:.0f} | +{row['extra']:.0f} |"
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


def weights_of(size: str) -> dict[str, torch.Tensor]:
    """The weights of a Llama-like model with a tied head."""
    width, layers, middle, vocabulary = SIZES[size]
    key = width // 3
    found = {"embed": torch.randn(vocabulary, width)}
    for layer in range(layers):
        shapes = {"q": (width, width), "k": (key, width), "v": (key, width), "o": (width, width)}
        shapes |= {"gate": (middle, width), "up": (middle, width), "down": (width, middle)}
        found |= {f"{layer}.{name}": torch.randn(shape) for name, shape in shapes.items()}
        found |= {f"{layer}.{name}": torch.ones(width) for name in ("norm_in", "norm_out")}
    return {**found, "norm": torch.ones(width), "head": found["embed"]}


def measured(size: str, replicas: int) -> dict[str, float]:
    weights = weights_of(size)
    publisher = Publisher()
    spawning = multiprocessing.get_context("spawn")
    lines = []
    for _ in range(replicas):
        here, there = spawning.Pipe()
        spawning.Process(target=replica, args=(there, publisher.publish(weights, 0).path), daemon=True).start()
        here.recv()  # it has its own copy
        lines.append(here)
    publishing, loads, own, extra = [], [], 0.0, 0.0
    for version in range(1, LOADS + 1):
        weights["embed"].mul_(1.001)
        began = time.perf_counter()
        published = publisher.publish(weights, version)
        publishing.append(time.perf_counter() - began)
        for line in lines:
            line.send(published.path)
        answers: list[dict[str, Any]] = [line.recv() for line in lines]
        assert all(answer["check"] == float(weights["embed"].double().sum()) for answer in answers)
        loads.append(max(answer["seconds"] for answer in answers))
        own = max(answer["own"] for answer in answers)
        extra = max(extra, *(answer["extra"] for answer in answers))
    for line in lines:
        line.close()
    unique = {tensor.data_ptr(): tensor.numel() for tensor in weights.values()}
    size_of_file = published.path.stat().st_size
    publisher.close()
    return {
        "parameters": float(sum(unique.values())),
        "bytes": float(size_of_file),
        "publish": median(publishing),
        "load": median(loads),
        "own": own,
        "extra": extra,
    }


def replica(line: Connection, path: Path) -> None:
    """Keep a copy of the weights, and load what comes into it."""
    torch.set_num_threads(1)
    with Published(path) as first:
        mine = {name: tensor.clone() for name, tensor in first.items() if name != "head"}
    line.send(None)
    while True:
        try:
            path = line.recv()
        except EOFError:
            return
        before = private_megabytes()
        began = time.perf_counter()
        with Published(path) as weights:
            for name, tensor in mine.items():
                tensor.copy_(weights[name])
            seconds, during = time.perf_counter() - began, private_megabytes()
        check = float(mine["embed"].double().sum())
        line.send({"seconds": seconds, "own": before, "extra": during - before, "check": check})


def private_megabytes() -> float:
    """Memory that this process shares with nobody and no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e3


if __name__ == "__main__":
    main()

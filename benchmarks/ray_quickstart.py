"""The quick start on a Ray cluster of two nodes on this machine, beside the same run in one process.

    python benchmarks/ray_quickstart.py [--out runs/ray-quickstart] [--ways alone split shared] [key=value ...]

split: two learner ranks on one node, two engine replicas on the other; shared: a rank and a replica at each of two
places. Each way is a run folder below --out; one that is finished is not run again. Prints held-out success before and
after, the largest gap between the logprobs of engines and learner, CPU seconds of all processes, those of Ray included,
and what the stages of a step take: the median over steps, in seconds and as a share of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray_nodes import QUICK_CHECKS, patiently, variables
from trial import children

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"
SPREAD = ["cluster.fsdp=2", "cluster.replicas=2"]
WAYS = {
    "alone": ("one process", []),
    "split": ("split", ["cluster.placement=separate_nodes", *SPREAD]),
    "shared": ("shared", ["cluster.placement=colocated", "cluster.cpus=0.5", *SPREAD]),
}
STAGES = ("wait_for_groups", "score", "forward_backward", "optimizer", "load", "load/write", "load/swap", "load/check")
POLL = 2.0
"""Seconds between two looks at the CPU time of processes."""
NICENESS = {"RAY_worker_niceness": QUICK_CHECKS["RAY_worker_niceness"]}


class CpuTime:
    """CPU seconds of all processes that this one has started, and of theirs, those that ended included."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def look(self) -> None:
        tick = os.sysconf("SC_CLK_TCK")
        for pid in children(os.getpid()):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            self.seconds[pid] = (int(fields[11]) + int(fields[12])) / tick

    def watch(self) -> None:
        while not self.ended.wait(POLL):
            self.look()

    def __enter__(self) -> CpuTime:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.thread.join()


@contextmanager
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes of two CPUs."""
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 2, "object_store_memory": 200 << 20}
    with variables(NICENESS):
        made = patiently(lambda: Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False}))
        try:
            patiently(lambda: made.add_node(**size))
            yield made.address
        finally:
            made.shutdown()


def trained(way: str, out: Path, overrides: Sequence[str]) -> None:
    """One run in a process of its own."""
    settings = [*WAYS[way][1], "model.threads=1", f"out={out}", *overrides]

    def train(*more: str) -> None:
        command = [sys.executable, "-m", "turnwise.cli", "train", str(RECIPE), *settings, *more]
        subprocess.run(command, check=True)

    with CpuTime() as cpu:
        if way == "alone":
            train()
        else:
            with cluster() as address:
                train(f"cluster.address={address}")
    (out / "cpu_seconds").write_text(f"{sum(cpu.seconds.values()):.0f}\n")


def read(out: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "seconds/step" in line]
    typical = lambda name: statistics.median(line.get(f"seconds/{name}", 0.0) for line in steps)
    return {
        **json.loads((out / "summary.json").read_text()),
        "gap": max(line["gap/max"] for line in lines if "gap/max" in line),
        "cpu": int((out / "cpu_seconds").read_text()),
        "stages": {name: typical(name) for name in ("step", *STAGES)},
    }


def row(name: str, cells: Sequence[str]) -> None:
    print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/ray-quickstart", type=Path)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    chosen = parser.parse_args()
    found = {}
    for way in chosen.ways:
        out = chosen.out / way
        if not (out / "cpu_seconds").exists():
            trained(way, out, chosen.overrides)
        found[WAYS[way][0]] = read(out)
    runs = list(found.values())
    row("", list(found))
    print(f"|---|{'---|' * len(found)}")
    for how in ("sampled", "greedy"):
        row(f"success, {how}", [f"{run['before'][how]:.3f} -> {run['after'][how]:.3f}" for run in runs])
    row("updates", [str(run["updates"]) for run in runs])
    row("largest gap of logprobs", [f"{run['gap']:.1e}" for run in runs])
    row("CPU seconds, all processes", [str(run["cpu"]) for run in runs])
    row("a step, seconds", [f"{run['stages']['step']:.2f}" for run in runs])
    for name in STAGES:
        cells = [(run["stages"][name], run["stages"][name] / run["stages"]["step"]) for run in runs]
        row(f"of it {name}", [f"{seconds:.3f} ({share:.0%})" for seconds, share in cells])


if __name__ == "__main__":
    main()

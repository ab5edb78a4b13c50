"""The quick start on a Ray cluster of two nodes on this machine: two learner ranks on one, two replicas on the other.

Prints held-out success before and after, minutes, and the largest gap between the logprobs of engines and learner.

    python benchmarks/ray_quickstart.py --out runs/ray-quickstart [key=value ...]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path

from turnwise.assemble import run
from turnwise.cli.terminal import open_screen
from turnwise.recipe.parse import load_recipe
from turnwise.runs.folder import RunFolder
from turnwise.runs.tracker import read_metrics

RECIPE = Path(__file__).parent.parent / "recipes" / "hops.toml"
SPREAD = ["cluster.placement=separate_nodes", "cluster.fsdp=2", "cluster.replicas=2", "model.threads=1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/ray-quickstart")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    chosen = parser.parse_args()
    recipe = load_recipe(RECIPE, [*SPREAD, f"out={chosen.out}", *chosen.overrides])

    import ray
    from ray.cluster_utils import Cluster

    os.environ.update(RAY_worker_niceness="0")
    size = {"num_cpus": 2, "object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    cluster.add_node(**size)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    began = time.perf_counter()
    try:
        summary = asyncio.run(run.start(recipe, open_screen(), asyncio.Event()))
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert summary is not None
    lines = read_metrics(RunFolder.open(recipe.out).metrics)
    gaps = [line["gap/max"] for line in lines if "gap/max" in line]
    print(f"success {summary['before']} -> {summary['after']}")
    print(
        f"{summary['updates']} updates, {(time.perf_counter() - began) / 60:.1f} minutes in all, "
        f"{summary['seconds']['train'] / 60:.1f} of them training; largest gap of logprobs {max(gaps):.1e}"
    )


if __name__ == "__main__":
    main()

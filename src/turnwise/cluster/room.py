"""The room that a run needs on a Ray cluster, and whether the cluster has it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Bundle = dict[str, float]
"""What is reserved together on one node, by kind: CPU, GPU."""
PATIENCE = 0.5
"""Seconds between two looks at the nodes."""


@dataclass(frozen=True)
class Room:
    """What ranks and replicas need, in bundles of Ray.

    GPUs follow from what runs: a rank has one, and a replica as many as share its model. Colocated, a replica has the
    GPUs of the ranks beside it.

    Example:
        Room("disaggregated", ranks=4, replicas=2, cpus=1.0, gpus_per_rank=1, gpus_per_replica=2)
    """

    placement: Literal["colocated", "disaggregated", "separate_nodes"]
    ranks: int
    replicas: int
    cpus: float
    """Of each rank and of each replica."""
    gpus_per_rank: int = 0
    gpus_per_replica: int = 0

    @property
    def is_shared(self) -> bool:
        return self.placement == "colocated"

    @property
    def ranks_per_bundle(self) -> int:
        """Ranks beside one replica."""
        return max(1, self.gpus_per_replica) if self.is_shared else 1

    @cached_property
    def of_ranks(self) -> list[Bundle]:
        """The bundles of ranks, and of replicas too where they share GPUs."""
        if not self.is_shared:
            return [bundle(self.cpus, self.gpus_per_rank)] * self.ranks
        each = self.ranks_per_bundle
        count = max(-(-self.ranks // each), self.replicas)
        return [bundle((each + 1) * self.cpus, each * self.gpus_per_rank)] * count

    @cached_property
    def of_replicas(self) -> list[Bundle]:
        """The bundles of replicas alone."""
        return [] if self.is_shared else [bundle(self.cpus, self.gpus_per_replica)] * self.replicas

    def fits(self, nodes: Sequence[Bundle]) -> bool:
        """Whether the bundles fit into nodes, the largest first, each on the first node with room for it."""
        free = [dict(node) for node in nodes]
        used = take(self.of_ranks, free)
        if used is None:
            return False
        left = [node for at, node in enumerate(free) if self.placement != "separate_nodes" or at not in used]
        return take(self.of_replicas, left) is not None

    def __str__(self) -> str:
        wanted = [f"{len(each)} x {text(each[0])}" for each in (self.of_ranks, self.of_replicas) if each]
        return " and ".join(wanted) + (" on other nodes" if self.placement == "separate_nodes" else "")

    def wait_for(self, seconds: float) -> None:
        """Return when the nodes of the cluster are large enough; ValueError where they are not after so many seconds.
        Nodes may still be joining."""
        end = time.monotonic() + seconds
        while not self.fits(nodes := nodes_of_cluster()):
            if time.monotonic() >= end:
                raise ValueError(f"no room for {self}; {there_is(nodes)}; {ADVICE}")
            time.sleep(PATIENCE)


ADVICE = "add nodes, or lower cluster.fsdp, cluster.replicas, cluster.cpus or engine.vllm.tensor_parallel_size"


def bundle(cpus: float, gpus: float) -> Bundle:
    return {kind: count for kind, count in (("CPU", float(cpus)), ("GPU", float(gpus))) if count}


def take(bundles: Sequence[Bundle], free: list[Bundle]) -> set[int] | None:
    """Take bundles from what is free on nodes: the nodes used, or None where one has no place."""
    used = set()
    for wanted in bundles:
        place = next((at for at, node in enumerate(free) if all(node.get(k, 0) >= v for k, v in wanted.items())), None)
        if place is None:
            return None
        used.add(place)
        for kind, count in wanted.items():
            free[place][kind] -= count
    return used


def text(resources: Bundle) -> str:
    """Example: "2 CPUs, 1 GPU"."""
    words = [f"{count:g} {kind}{'' if count == 1 else 's'}" for kind, count in resources.items()]
    return ", ".join(words) or "nothing"


def nodes_of_cluster() -> list[Bundle]:
    """What each node of the cluster has in all, whoever uses it."""
    import ray

    return [
        {kind: node["Resources"].get(kind, 0.0) for kind in ("CPU", "GPU")} for node in ray.nodes() if node["Alive"]
    ]


def there_is(nodes: Sequence[Bundle]) -> str:
    kinds = [text({kind: count for kind, count in node.items() if count}) for node in nodes]
    counts = [f"{kinds.count(kind)} x ({kind})" for kind in dict.fromkeys(kinds)]
    return f"the cluster has {', '.join(counts) or 'no node'}"

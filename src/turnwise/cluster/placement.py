"""The site: the part of a Ray cluster that is reserved for a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from turnwise.cluster.room import ADVICE, Bundle, Room, nodes_of_cluster, there_is
from turnwise.recipe.cluster import ClusterConfig

NODE = "ray.io/node-id"
"""A label that Ray gives to every node."""
ARRANGING_SECONDS = 20.0
"""How long replicas wait for a node without a rank before the ranks are placed anew."""


def connect(address: str) -> None:
    """Join the Ray cluster at an address, unless this process has joined one."""
    import ray

    if not ray.is_initialized():
        ray.init(address=address or None, log_to_driver=False, logging_level="warning")


def check_room(config: ClusterConfig, room: Room) -> None:
    """Refuse a run that the cluster is too small for, before anything of it starts."""
    connect(config.address)
    room.wait_for(config.placement_seconds)


class Site:
    """Reserved CPUs and GPUs for learner ranks and engine replicas, until `close`.

    Colocated: a replica is told the GPUs of the ranks beside it. Disaggregated: it has GPUs of its own, on any node.
    On separate nodes: no replica is on a node with a rank.

    Example:
        Site(recipe.cluster, Room("disaggregated", ranks=2, replicas=2, cpus=1.0))
    """

    def __init__(self, config: ClusterConfig, room: Room) -> None:
        from ray.exceptions import GetTimeoutError

        connect(config.address)
        self.config = config
        self.room = room
        self.groups: list[Any] = []
        """Placement groups of Ray."""
        self.rank_gpus: list[Sequence[str]] = []
        """The GPUs of each rank on its node, once ranks have started."""
        try:
            until = time.monotonic() + config.placement_seconds
            if room.placement == "separate_nodes" and room.of_replicas:
                self.of_ranks, self.of_replicas = self.apart(until)
            else:
                self.of_ranks = self.of_replicas = self.group(room.of_ranks, until)
                if room.of_replicas:
                    self.of_replicas = self.group(room.of_replicas, until)
        except GetTimeoutError:
            self.close()
            raise ValueError(
                f"after {config.placement_seconds:g} s there is no room for {room}; {there_is(nodes_of_cluster())}, "
                f"which others may use; {ADVICE}"
            ) from None
        except BaseException:
            self.close()
            raise

    def apart(self, until: float) -> tuple[Any, Any]:
        """Groups for ranks and for replicas without a node in common. Ranks take what is free, here and there where
        others leave a cluster only now, and so may have a part of every node: then they are placed anew."""
        from ray.exceptions import GetTimeoutError

        while True:
            of_ranks = self.group(self.room.of_ranks, until)
            where = {NODE: f"!in({','.join(sorted(set(nodes_of(of_ranks))))})"}
            try:
                return of_ranks, self.group(
                    self.room.of_replicas, min(until, time.monotonic() + ARRANGING_SECONDS), where
                )
            except GetTimeoutError:
                if time.monotonic() >= until:
                    raise
                self.close()

    def group(self, bundles: Sequence[Bundle], until: float, where: dict[str, str] | None = None) -> Any:
        """A placement group of Ray on as few nodes as possible; returns when it is ready."""
        import ray
        from ray.util import placement_group

        labels = None if where is None else [where] * len(bundles)
        group = placement_group(list(bundles), strategy="PACK", bundle_label_selector=labels)
        self.groups.append(group)
        ray.get(group.ready(), timeout=max(0.0, until - time.monotonic()))
        return group

    def rank_options(self, rank: int) -> dict[str, Any]:
        """Options that place the actor of a rank."""
        bundle = rank // self.room.ranks_per_bundle
        return self.options(self.of_ranks, bundle, self.room.gpus_per_rank)

    def replica_options(self, number: int) -> dict[str, Any]:
        """Options that place the actor of a replica. Where it shares GPUs, Ray counts them for the ranks alone."""
        return self.options(self.of_replicas, number, 0 if self.room.is_shared else self.room.gpus_per_replica)

    def options(self, group: Any, bundle: int, gpus: int) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": self.room.cpus,
            "num_gpus": gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        }

    def shared_gpus(self, number: int) -> list[str] | None:
        """The GPUs that a replica shares with ranks; None where it has its own or none."""
        if not self.room.is_shared or not self.room.gpus_per_replica:
            return None
        first = number * self.room.ranks_per_bundle
        return [gpu for gpus in self.rank_gpus[first : first + self.room.ranks_per_bundle] for gpu in gpus]

    def close(self) -> None:
        from ray.util import remove_placement_group

        for group in self.groups:
            remove_placement_group(group)
        self.groups = []


def nodes_of(group: Any) -> list[str]:
    """The node of every bundle of a group."""
    from ray.util import placement_group_table

    node_of_bundle = placement_group_table(group)["bundles_to_node_id"]
    return [node_of_bundle[bundle] for bundle in sorted(node_of_bundle)]

"""The site: the part of a Ray cluster that is reserved for a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.cluster.room import ADVICE, Bundle, Room, nodes_of_cluster, there_is
from turnwise.recipe.cluster import ClusterConfig

NODE = "ray.io/node-id"
"""A label that Ray gives to every node."""


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
        connect(config.address)
        self.config = config
        self.room = room
        self.groups: list[Any] = []
        """Placement groups of Ray."""
        self.rank_gpus: list[Sequence[str]] = []
        """The GPUs of each rank on its node, once ranks have started."""
        try:
            self.of_ranks = self.of_replicas = self.group(room.of_ranks)
            if room.of_replicas:
                where = None
                if room.placement == "separate_nodes":
                    where = {NODE: f"!in({','.join(sorted(set(nodes_of(self.of_ranks))))})"}
                self.of_replicas = self.group(room.of_replicas, where)
        except BaseException:
            self.close()
            raise

    def group(self, bundles: Sequence[Bundle], where: dict[str, str] | None = None) -> Any:
        """A placement group of Ray on as few nodes as possible; returns when it is ready."""
        import ray
        from ray.exceptions import GetTimeoutError
        from ray.util import placement_group

        labels = None if where is None else [where] * len(bundles)
        group = placement_group(list(bundles), strategy="PACK", bundle_label_selector=labels)
        self.groups.append(group)
        seconds = self.config.placement_seconds
        try:
            ray.get(group.ready(), timeout=seconds)
        except GetTimeoutError:
            raise ValueError(
                f"after {seconds:g} s there is no room for {self.room}; {there_is(nodes_of_cluster())}, which others "
                f"may use; {ADVICE}"
            ) from None
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

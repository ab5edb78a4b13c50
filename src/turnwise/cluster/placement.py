"""The site: the part of a Ray cluster that a run has for itself."""

from __future__ import annotations

from typing import Any

from turnwise.recipe.cluster import ClusterConfig

NODE = "ray.io/node-id"
"""A label that Ray gives to every node."""


def connect(own: ClusterConfig) -> None:
    """Join the Ray cluster that a recipe names, unless this process has joined one."""
    import ray

    if not ray.is_initialized():
        ray.init(address=own.address or None, log_to_driver=False, logging_level="warning")


class Site:
    """Places for learner ranks and engine replicas, each with its CPUs and GPUs, held until `close`.

    Colocated, a rank and a replica share a place and its GPUs. Disaggregated, no replica is on a node that has a rank.

    Example:
        Site(ClusterConfig(placement="disaggregated", ranks=2, replicas=2))
    """

    def __init__(self, own: ClusterConfig) -> None:
        connect(own)
        self.own = own
        self.groups: list[Any] = []
        """Placement groups of Ray."""
        try:
            self.reserve()
        except BaseException:
            self.close()
            raise

    def reserve(self) -> None:
        own = self.own
        if own.placement == "colocated":
            both = {"CPU": 2.0 * own.cpus, "GPU": own.gpus}
            group = self.group([both] * max(own.ranks, own.replicas))
            self.of_ranks = self.of_replicas = group
            return
        each = {"CPU": own.cpus, "GPU": own.gpus}
        self.of_ranks = self.group([each] * own.ranks)
        taken = ",".join(sorted(set(nodes_of(self.of_ranks))))
        self.of_replicas = self.group([each] * own.replicas, {NODE: f"!in({taken})"})

    def group(self, bundles: list[dict[str, float]], where: dict[str, str] | None = None) -> Any:
        """A placement group of Ray, on as few nodes as have room, once it is there."""
        import ray
        from ray.exceptions import GetTimeoutError
        from ray.util import placement_group

        wanted = [{kind: count for kind, count in bundle.items() if count} for bundle in bundles]
        labels = None if where is None else [where] * len(bundles)
        found = placement_group(wanted, strategy="PACK", bundle_label_selector=labels)
        self.groups.append(found)
        try:
            ray.get(found.ready(), timeout=self.own.placement_seconds)
        except GetTimeoutError:
            apart = " on nodes without a rank" if where else ""
            raise ValueError(
                f"after {self.own.placement_seconds:g} s the cluster has no room for {len(bundles)} times "
                f"{wanted[0]}{apart}; "
                "add nodes, or lower cluster.ranks, cluster.replicas or cluster.cpus"
            ) from None
        return found

    def options(self, group: Any, place: int) -> dict[str, Any]:
        """How an actor gets to a place of a group; where two share it, each has half of its GPUs."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = 0.5 if self.own.placement == "colocated" else 1.0
        return {
            "num_cpus": self.own.cpus,
            "num_gpus": share * self.own.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
        }

    def close(self) -> None:
        from ray.util import remove_placement_group

        for group in self.groups:
            remove_placement_group(group)
        self.groups = []


def nodes_of(group: Any) -> list[str]:
    """The node of every place of a group."""
    from ray.util import placement_group_table

    found = placement_group_table(group)["bundles_to_node_id"]
    return [found[place] for place in sorted(found)]

"""The site: the part of a Ray cluster that is reserved for a run."""

from __future__ import annotations

from typing import Any

from turnwise.recipe.cluster import ClusterConfig

NODE = "ray.io/node-id"
"""A label that Ray gives to every node."""


def connect(config: ClusterConfig) -> None:
    """Join the Ray cluster that a recipe names, unless this process has joined one."""
    import ray

    if not ray.is_initialized():
        ray.init(address=config.address or None, log_to_driver=False, logging_level="warning")


class Site:
    """Reserved CPUs and GPUs for learner ranks and engine replicas, until `close`.

    Colocated: a rank and a replica share a bundle and its GPUs. Disaggregated: no replica is on a node with a rank.

    Example:
        Site(ClusterConfig(placement="disaggregated", fsdp=2, replicas=2))
    """

    def __init__(self, config: ClusterConfig) -> None:
        connect(config)
        self.config = config
        self.groups: list[Any] = []
        """Placement groups of Ray."""
        try:
            self.reserve()
        except BaseException:
            self.close()
            raise

    def reserve(self) -> None:
        config = self.config
        if config.placement == "colocated":
            both = {"CPU": 2.0 * config.cpus, "GPU": config.gpus}
            group = self.group([both] * max(config.ranks, config.replicas))
            self.of_ranks = self.of_replicas = group
            return
        each = {"CPU": config.cpus, "GPU": config.gpus}
        self.of_ranks = self.group([each] * config.ranks)
        taken = ",".join(sorted(set(nodes_of(self.of_ranks))))
        self.of_replicas = self.group([each] * config.replicas, {NODE: f"!in({taken})"})

    def group(self, bundles: list[dict[str, float]], where: dict[str, str] | None = None) -> Any:
        """A placement group of Ray on as few nodes as possible; returns when it is ready."""
        import ray
        from ray.exceptions import GetTimeoutError
        from ray.util import placement_group

        wanted = [{kind: count for kind, count in bundle.items() if count} for bundle in bundles]
        labels = None if where is None else [where] * len(bundles)
        group = placement_group(wanted, strategy="PACK", bundle_label_selector=labels)
        self.groups.append(group)
        try:
            ray.get(group.ready(), timeout=self.config.placement_seconds)
        except GetTimeoutError:
            apart = " on nodes without a rank" if where else ""
            raise ValueError(
                f"after {self.config.placement_seconds:g} s the cluster has no room for {len(bundles)} times "
                f"{wanted[0]}{apart}; "
                "add nodes, or lower cluster.fsdp, cluster.replicas or cluster.cpus"
            ) from None
        return group

    def options(self, group: Any, bundle: int) -> dict[str, Any]:
        """Options that place an actor on a bundle of a group. Two actors on one bundle get half of its GPUs each."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = 0.5 if self.config.placement == "colocated" else 1.0
        return {
            "num_cpus": self.config.cpus,
            "num_gpus": share * self.config.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        }

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

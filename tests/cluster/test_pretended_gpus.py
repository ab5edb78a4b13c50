"""Placements on a Ray cluster whose nodes say that they have GPUs: who sees which."""

import os
import threading
from contextlib import closing

import pytest

from support.ray_nodes import two_nodes
from turnwise.cluster.actors import RankActor
from turnwise.cluster.placement import Site
from turnwise.cluster.replica import ReplicaActor
from turnwise.cluster.room import Room
from turnwise.recipe.cluster import ClusterConfig

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    """Two nodes that say they have four GPUs each."""
    with two_nodes(num_cpus=16, num_gpus=4, object_store_memory=80 << 20) as made:
        yield made


def seen():
    """(node, GPUs) that this process may use."""
    return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "")


class SeeingRank(RankActor):
    def seen(self):
        return seen()


class SeeingReplica(ReplicaActor):
    def __init__(self, gpus):
        super().__init__(lambda: None, gpus)

    async def seen(self):
        return seen()


def cards(found):
    return {(node, card) for node, text in found for card in text.split(",") if card}


def placed(room):
    """(what each rank sees, what each replica sees)."""
    config = ClusterConfig(placement=room.placement, placement_seconds=60.0)
    with closing(Site(config, room)) as site:
        ranks = [ray.remote(SeeingRank).options(**site.rank_options(rank)).remote() for rank in range(room.ranks)]
        site.rank_gpus = ray.get([rank.gpus.remote() for rank in ranks])
        replicas = [
            ray.remote(SeeingReplica).options(**site.replica_options(number)).remote(site.shared_gpus(number))
            for number in range(room.replicas)
        ]
        found = ray.get([rank.seen.remote() for rank in ranks]), ray.get([each.seen.remote() for each in replicas])
        for actor in (*ranks, *replicas):
            ray.kill(actor)
    return found


def test_split_on_one_node(cluster):
    ranks, replicas = placed(Room("disaggregated", 2, 1, 1.0, 1, 2))
    assert len(cards(ranks)) == 2
    assert len(cards(replicas)) == 2
    assert cards(ranks).isdisjoint(cards(replicas))


@pytest.mark.parametrize("placement", ["disaggregated", "separate_nodes"])
def test_four_and_four(cluster, placement):
    ranks, replicas = placed(Room(placement, 4, 2, 1.0, 1, 2))
    assert [len(cards([each])) for each in replicas] == [2, 2]
    assert len(cards(ranks)) == len(cards(replicas)) == 4
    assert cards(ranks).isdisjoint(cards(replicas))
    if placement == "separate_nodes":
        assert {node for node, _ in ranks}.isdisjoint({node for node, _ in replicas})


@pytest.mark.parametrize(("replicas", "each"), [(8, 1), (4, 2), (2, 4)])
def test_shared_by_both(cluster, replicas, each):
    ranks, found = placed(Room("colocated", 8, replicas, 0.5, 1, each))
    assert len(cards(ranks)) == 8
    assert cards(found) == cards(ranks)
    for number, replica in enumerate(found):
        assert cards([replica]) == cards(ranks[number * each : (number + 1) * each])


def test_what_cannot_be_placed(cluster):
    with pytest.raises(ValueError, match=r"no room for 8 x 1 CPU, 1 GPU and 1 x 1 CPU, 1 GPU; the cluster has 2 x"):
        Room("disaggregated", 8, 1, 1.0, 1, 1).wait_for(0.0)


def test_ranks_that_took_a_part_of_each_node_are_placed_anew(cluster, monkeypatch):
    """As where another run leaves the cluster while this one starts."""
    from ray.util import placement_group, remove_placement_group

    from turnwise.cluster import placement

    monkeypatch.setattr(placement, "ARRANGING_SECONDS", 3.0)
    others = placement_group([{"CPU": 10.0}] * 2, strategy="STRICT_SPREAD")
    ray.get(others.ready(), timeout=60)
    leaves = threading.Timer(5.0, remove_placement_group, [others])
    leaves.start()
    config = ClusterConfig(placement="separate_nodes", fsdp=4, replicas=2, placement_seconds=60.0)
    with closing(Site(config, Room("separate_nodes", 4, 2, 3.0))) as site:
        leaves.join()
        assert len(set(placement.nodes_of(site.of_ranks))) == 1
        assert set(placement.nodes_of(site.of_ranks)).isdisjoint(placement.nodes_of(site.of_replicas))

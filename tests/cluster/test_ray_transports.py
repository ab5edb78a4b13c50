"""Weights of ranks into replicas, all of them actors of a Ray cluster of two nodes: the suite of every transport."""

from contextlib import closing
from dataclasses import asdict
from functools import partial

import pytest

from cluster.pool import COST
from cluster.test_transports import SECONDS, step
from support.acting import run
from support.ray_nodes import two_nodes
from turnwise.cluster import actors
from turnwise.cluster.actors import ActorRanks, RankActor
from turnwise.cluster.placement import Site, nodes_of
from turnwise.cluster.ranked import RankedLearner
from turnwise.cluster.replica import open_replicas
from turnwise.cluster.room import Room
from turnwise.recipe.cluster import ClusterConfig
from weights.conformance import CONTEXT, LEARNERS, in_process, leave_behind, left_unnoticed, remember

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

REPLICAS = 2


class LaggingRank(RankActor):
    """A rank that can leave a tensor behind."""

    def remember(self):
        remember(self.rank)

    def leave(self, name):
        leave_behind(self.rank, name)


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of four CPUs each."""
    with two_nodes(num_cpus=4, object_store_memory=100 << 20) as made:
        yield made


@pytest.fixture
def site(cluster, learner):
    """Ranks on one node, replicas on the other."""
    shape = LEARNERS[learner].shape
    named = {"placement": "separate_nodes", "replicas": REPLICAS, "placement_seconds": 120.0}
    config, room = ClusterConfig(**named, **asdict(shape)), Room("separate_nodes", shape.ranks, REPLICAS, 1.0)
    with closing(Site(config, room)) as made:
        assert set(nodes_of(made.of_ranks)).isdisjoint(nodes_of(made.of_replicas))
        yield made


@pytest.fixture
def spread(site, learner, dtype, monkeypatch):
    """The learner over actors."""
    monkeypatch.setattr(actors, "RankActor", LaggingRank)
    made = RankedLearner(ActorRanks(site, LEARNERS[learner].made(dtype), device="cpu", threads=1), COST)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("learner", LEARNERS)
def test_loads_arrive_whole_and_what_is_left_behind_is_caught(spread, site, learner, dtype):
    def in_ranks(work, *arguments):
        ray.get([getattr(actor, work).remote(*arguments) for actor in spread.ranks.actors])

    def replicas():
        make = partial(in_process, LEARNERS[learner].model(), None, dtype)
        engine = open_replicas(site, make, context=CONTEXT)
        assert len(engine.copies()) == REPLICAS
        return engine

    suite = left_unnoticed(
        replicas, spread, dtype, step=step, remember=partial(in_ranks, "remember"), leave=partial(in_ranks, "leave")
    )
    assert run(suite, SECONDS) == []

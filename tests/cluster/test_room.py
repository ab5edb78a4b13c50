"""What a run asks of a Ray cluster, and what it says where there is too little."""

import pytest

from support.running import micro_recipe
from turnwise.assemble.learner import room_of
from turnwise.cluster import room as rooms
from turnwise.cluster.room import Room

EIGHT = [{"CPU": 64.0, "GPU": 8.0}]
TWO_OF_FOUR = [{"CPU": 32.0, "GPU": 4.0}] * 2


def room(placement, ranks, replicas, gpus_per_replica, cpus=1.0):
    return Room(placement, ranks, replicas, cpus, 1, gpus_per_replica)


@pytest.mark.parametrize(
    ("wanted", "nodes", "fits"),
    [
        (room("disaggregated", 4, 2, 2), EIGHT, True),
        (room("disaggregated", 4, 2, 2), TWO_OF_FOUR, True),
        (room("disaggregated", 4, 4, 2), EIGHT, False),
        (room("disaggregated", 6, 1, 2), TWO_OF_FOUR, True),
        (room("disaggregated", 3, 1, 5), EIGHT, True),
        (room("disaggregated", 3, 1, 5), TWO_OF_FOUR, False),
        (room("separate_nodes", 4, 2, 2), EIGHT, False),
        (room("separate_nodes", 4, 2, 2), TWO_OF_FOUR, True),
        (room("colocated", 8, 4, 2), EIGHT, True),
        (room("colocated", 8, 2, 4), TWO_OF_FOUR, True),
        (room("colocated", 8, 1, 8), TWO_OF_FOUR, False),
        (room("colocated", 8, 8, 1, cpus=5.0), EIGHT, False),
    ],
)
def test_what_fits(wanted, nodes, fits):
    assert wanted.fits(nodes) is fits


def test_a_recipe_says_what_its_run_needs(tmp_path):
    vllm = ["engine.name=vllm", "engine.vllm.tensor_parallel_size=2", "model.device=cuda"]
    both = [*vllm, "cluster.fsdp=4", "cluster.replicas=2"]
    split = room_of(micro_recipe(tmp_path, *both, "cluster.placement=disaggregated"))
    assert split == room("disaggregated", 4, 2, 2)
    assert split.of_ranks == [{"CPU": 1.0, "GPU": 1.0}] * 4
    assert split.of_replicas == [{"CPU": 1.0, "GPU": 2.0}] * 2
    shared = room_of(micro_recipe(tmp_path, *both, "cluster.placement=colocated"))
    assert shared.of_ranks == [{"CPU": 3.0, "GPU": 2.0}] * 2
    assert shared.of_replicas == []
    on_cpus = room_of(micro_recipe(tmp_path, "cluster.placement=colocated", "cluster.fsdp=2", "model.device=cpu"))
    assert on_cpus.of_ranks == [{"CPU": 2.0}] * 2


def test_a_cluster_that_is_too_small_is_told_what_was_asked_and_what_there_is(monkeypatch):
    monkeypatch.setattr(rooms, "nodes_of_cluster", lambda: TWO_OF_FOUR)
    with pytest.raises(ValueError) as error:
        room("separate_nodes", 6, 2, 4).wait_for(0.0)
    assert str(error.value) == (
        "no room for 6 x 1 CPU, 1 GPU and 2 x 1 CPU, 4 GPUs on other nodes; the cluster has 2 x (32 CPUs, 4 GPUs); "
        "add nodes, or lower cluster.fsdp, cluster.replicas, cluster.cpus or engine.vllm.tensor_parallel_size"
    )


def test_nodes_that_join_are_waited_for(monkeypatch):
    looks = iter([[], EIGHT])
    monkeypatch.setattr(rooms, "nodes_of_cluster", lambda: next(looks))
    monkeypatch.setattr("turnwise.cluster.room.time.sleep", lambda seconds: None)
    room("colocated", 8, 4, 2).wait_for(60.0)

"""A rank that reads a model from a folder never has more than its share and a little besides."""

import pytest
import torch
from transformers import Qwen3ForCausalLM

from turnwise.cluster.mesh import Mesh, MeshShape
from turnwise.cluster.spread import Spread
from turnwise.learn.tiny import tiny_config
from turnwise.preflight.operation_counter import OperationCounter
from turnwise.preflight.share_guard import LoadGuard, OverShareError
from turnwise.preflight.stand_ins import world

RANKS = 4


@pytest.fixture
def saved(tmp_path):
    """(a folder with a model, the bytes of its weights, those of its largest tensor)."""
    model = Qwen3ForCausalLM(tiny_config(512, 128, 4, 512))
    model.save_pretrained(tmp_path)
    sizes = [each.numel() * 4 for each in model.parameters()]
    return tmp_path, sum(sizes), max(sizes)


def loaded(folder, share, besides):
    counter = OperationCounter()
    counter.watch = LoadGuard(counter.memory, share, besides)
    with world(RANKS):
        spread = Spread(Mesh(MeshShape(fsdp=RANKS), "cpu"))
        with counter:
            placed = spread.load(folder, computed_in=torch.float32)
    return counter, placed


def test_a_rank_loads_its_share_and_one_tensor_at_a_time(saved):
    folder, whole, largest = saved
    counter, placed = loaded(folder, 2 * whole / RANKS, largest)
    have = sum(each.to_local().numel() * 4 for each in placed.model.parameters())
    assert have == pytest.approx(whole / RANKS, rel=0.05)
    assert have <= counter.memory.peak < 0.75 * whole


def test_the_guard_fails_on_less(saved):
    folder, whole, _ = saved
    with pytest.raises(OverShareError, match="while it loads"):
        loaded(folder, 0.2 * whole / RANKS, 0)

"""Weights that every rank writes its part of: all of them, once, bit for bit."""

import pytest
import torch

from cluster.pool import OPEN, Made
from cluster.test_meshes import EVERY, name_of
from cluster.test_ranked import MOVING, Batch
from properties.test_tree_layout import WORKLOADS
from support.making import make_model
from turnwise.cluster.mesh import MeshShape
from turnwise.learn.lora import LoraSettings
from turnwise.learn.stepper import OptimizerSettings
from turnwise.plan.pack import pack
from turnwise.weights.object_store import AssembledWeights, stored_parts
from turnwise.weights.parted import PartedWeights
from turnwise.weights.publisher import Publisher

QUICK = {("qwen3", MeshShape(tp=2)), ("qwen3_moe", MeshShape(fsdp=2, ep=2))}


@pytest.fixture
def processes(request, shape):
    return request.getfixturevalue("pool" if shape.ranks == 2 else "four")


@pytest.fixture
def publisher(tmp_path):
    made = Publisher(tmp_path)
    yield made
    made.close()


def parted(spread, written):
    """The weights of a learner in parts; `written` gets the bytes that each rank wrote."""
    [outline, *others] = spread.ranks.call("outline")
    assert all(other == outline for other in others)

    def ask(method, *arguments):
        written.extend(answers := spread.ask(method, *arguments))
        return answers

    return PartedWeights(outline, ask, dict)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        pytest.param(*each, id=f"{each[0]}-{name_of(each[1])}", marks=() if each in QUICK else pytest.mark.slow)
        for each in EVERY
    ],
)
def test_all_weights_are_written_and_hardly_any_twice(processes, publisher, kind, shape):
    spread = processes.learner(Made(make_model(kind), settings=MOVING), shape)
    gathered, written = spread.publish(), []
    found = publisher.publish(parted(spread, written), 3)
    assert found.keys() == gathered.keys()
    assert all(torch.equal(found[name], gathered[name]) for name in gathered)
    entries = found.manifest.entries.values()
    size = sum(entry.end - entry.start for entry in entries)
    # What ranks that compute layers together each have whole, the norms, is written by each of them.
    assert size <= sum(written) <= (1.05 if shape.tp > 1 or shape.ep > 1 else 1.0) * size
    if shape == MeshShape(fsdp=shape.ranks):  # nothing but the shape of the tensors keeps parts from being equal
        assert max(written) < 1.2 * sum(written) / shape.ranks
    spread.close()


def stored(number, dtype):
    """What a rank would put into the object store."""
    return stored_parts(OPEN[number].share(), dtype)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_replica_puts_together_what_ranks_have_stored(pool, dtype):
    spread = pool.learner(Made(make_model("qwen3", tie_word_embeddings=True), settings=MOVING), MeshShape(tp=2))
    gathered, outline = spread.publish(), spread.outline.served_in(dtype)
    parts = pool.run(stored, [spread.ranks.number] * 2, [dtype] * 2)
    found = AssembledWeights(outline, parts)
    assert found.keys() == gathered.keys()
    assert all(torch.equal(found[name], tensor.to(dtype or tensor.dtype)) for name, tensor in gathered.items())
    with pytest.raises(
        ValueError, match=r"1024 of the 2048 numbers of model.embed_tokens.weight are there; a rank put"
    ):
        AssembledWeights(outline, parts[:1])
    spread.close()


def test_tied_weights_are_written_once(pool, publisher):
    spread, written = pool.learner(Made(make_model(tie_word_embeddings=True))), []
    weights = parted(spread, written)
    found = publisher.publish(weights, 0)
    assert set(found) == set(weights) == set(spread.publish())
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
    assert all(torch.equal(found[name], tensor) for name, tensor in spread.publish().items())
    spread.close()


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        pytest.param("qwen3", MeshShape(fsdp=2), id="dense-fsdp2"),
        pytest.param("qwen3_moe", MeshShape(fsdp=2), id="mixture-fsdp2", marks=pytest.mark.slow),
        pytest.param("qwen3", MeshShape(replicate=2, fsdp=2), id="dense-replicate2-fsdp2", marks=pytest.mark.slow),
        pytest.param("qwen3", MeshShape(fsdp=2, cp=2), id="dense-fsdp2-cp2", marks=pytest.mark.slow),
    ],
)
def test_every_rank_merges_adapters_into_its_part_bit_for_bit(processes, publisher, kind, shape):
    """As if one process had merged whole weights."""
    how = {"lora": LoraSettings(rank=4, alpha=8.0), "settings": OptimizerSettings(1e-2, clip_norm=1e9)}
    model = make_model(kind, tie_word_embeddings=False)
    spread = processes.learner(Made(model, **how), shape)
    batch = Batch(WORKLOADS["edges"]())
    batch.update(spread, pack(batch.turns, 256))
    gathered = dict(spread.publish())
    found = publisher.publish(parted(spread, []), 3)
    assert found.keys() == gathered.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], gathered[name]) for name in gathered)
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(found[name], tensor)}
    assert {name.rpartition("layers.")[2][2:] for name in moved} >= {
        "self_attn.q_proj.weight",
        "self_attn.o_proj.weight",
    }
    spread.close()

"""Weights that every rank writes its part of: all of them, once, bit for bit."""

import pytest
import torch

from cluster.pool import Made
from cluster.test_meshes import EVERY, name_of
from cluster.test_ranked import MOVING
from support.making import make_model
from turnwise.cluster.mesh import MeshShape
from turnwise.learn.lora import LoraSettings
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
    size = spread.ranks.size
    [outline, *others] = spread.ranks.call("outline")
    assert all(other == outline for other in others)
    return PartedWeights(outline, lambda path: written.extend(spread.ranks.call("write", [path] * size)), dict)


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


def test_tied_weights_are_written_once(pool, publisher):
    spread, written = pool.learner(Made(make_model(tie_word_embeddings=True))), []
    weights = parted(spread, written)
    found = publisher.publish(weights, 0)
    assert set(found) == set(weights) == set(spread.publish())
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
    assert all(torch.equal(found[name], tensor) for name, tensor in spread.publish().items())
    spread.close()


def test_merged_adapters_need_whole_weights(pool):
    spread = pool.learner(Made(make_model(), lora=LoraSettings(rank=4, alpha=8.0), settings=MOVING))
    assert spread.ranks.call("outline") == [None, None]
    spread.close()

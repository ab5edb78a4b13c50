"""Every shape of the mesh computes what one process computes: real arithmetic over gloo, in as many processes."""

import copy

import numpy as np
import pytest
import torch

from cluster.pool import Made, learner
from cluster.test_ranked import MOVING, Batch, assert_same, updates
from properties.test_tree_layout import HANDED_OVER, PARTS, WHOLE, WORKLOADS
from support.acting import byte_tokenizer
from support.making import gradients, make_model
from turnwise.cluster.mesh import MeshShape
from turnwise.learn.policy import load_model
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack

LAYOUTS = {"packed": (pack, PARTS), "tree": (cut, WHOLE), "cut": (cut, HANDED_OVER)}
DENSE = [
    MeshShape(fsdp=2),
    MeshShape(tp=2),
    MeshShape(replicate=2),
    MeshShape(fsdp=2, tp=2),
    MeshShape(replicate=2, fsdp=2),
    MeshShape(replicate=2, tp=2),
    MeshShape(cp=2),
    MeshShape(cp=4),
    MeshShape(fsdp=2, cp=2),
    MeshShape(cp=2, tp=2),
    MeshShape(replicate=2, cp=2),
]
MIXTURE = [
    MeshShape(fsdp=2),
    MeshShape(fsdp=2, ep=2),
    MeshShape(tp=2, ep=2),
    MeshShape(fsdp=2, tp=2, ep=2),
    MeshShape(fsdp=4, ep=2),
    MeshShape(fsdp=2, tp=2, ep=4),
    MeshShape(replicate=2, fsdp=2, ep=2),
    MeshShape(cp=2),
    MeshShape(fsdp=2, cp=2),
    MeshShape(cp=2, ep=2),
    MeshShape(fsdp=2, cp=2, ep=4),
    MeshShape(cp=2, tp=2, ep=4),
]
QUICK = {("qwen3", MeshShape(tp=2)), ("qwen3_moe", MeshShape(fsdp=2, ep=2))}
EVERY = [("qwen3", shape) for shape in DENSE] + [("qwen3_moe", shape) for shape in MIXTURE]


def name_of(shape):
    return "-".join(
        f"{name}{size}" for name in ("replicate", "fsdp", "cp", "tp", "ep") if (size := getattr(shape, name)) > 1
    )


def marked(kind, shape):
    marks = () if (kind, shape) in QUICK else pytest.mark.slow
    return pytest.param(kind, shape, marks=marks, id=f"{kind}-{name_of(shape)}")


@pytest.fixture
def processes(request, shape):
    """As many processes as a shape has."""
    return request.getfixturevalue("pool" if shape.ranks == 2 else "four")


@pytest.mark.parametrize(("kind", "shape"), [marked(kind, shape) for kind, shape in EVERY])
def test_a_mesh_has_the_gradient_of_one_process(processes, kind, shape):
    """For trees, packed turns and plans of several passes. In float64 to rounding; mixtures in float32, because their
    routers and kernels know no other."""
    is_exact = kind == "qwen3"
    model, tolerance = make_model(kind, dtype="float64" if is_exact else "float32"), 1e-12 if is_exact else 5e-6
    how = {"dtype": torch.float64 if is_exact else torch.float32}
    one, spread = learner(copy.deepcopy(model), **how), processes.learner(Made(model, **how), shape)
    batch = Batch(WORKLOADS["edges"]())
    for layout, budget in LAYOUTS.values():
        plans = layout(batch.turns, budget)
        (metrics, logprobs), (wanted_metrics, wanted) = batch.update(spread, plans), batch.update(one, plans)
        assert metrics == pytest.approx(wanted_metrics, rel=tolerance, abs=tolerance)
        np.testing.assert_allclose(np.concatenate(logprobs), np.concatenate(wanted), rtol=tolerance, atol=tolerance)
        assert_same(spread.gradients(), gradients(one.policy.model), tolerance)
    spread.close()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape"), [pytest.param(*each, id=f"{each[0]}-{name_of(each[1])}") for each in EVERY])
def test_updates_on_a_mesh_are_those_of_one_process(processes, kind, shape, tmp_path):
    """In float32, with the gradient clipped by its norm over all ranks, momentum and a critic; and a checkpoint of any
    shape goes on in one process."""
    model, beside = make_model(kind), make_model(kind, seed=2)
    how = {"critic": beside, "settings": MOVING}
    one, spread = learner(copy.deepcopy(model), **copy.deepcopy(how)), processes.learner(Made(model, **how), shape)
    batch = Batch(WORKLOADS["growing"]())
    for mine, theirs in zip(updates(spread, batch), updates(one, batch), strict=True):
        assert theirs["gradient_norm"] > MOVING.clip_norm
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert_same(spread.publish(), one.publish(), 1e-4)
    spread.save(tmp_path, byte_tokenizer())
    again = learner(load_model(tmp_path), **copy.deepcopy(how))
    assert_same(again.publish(), spread.publish(), 0.0)
    again.restore(tmp_path)
    [next_of_spread], [next_of_one] = updates(spread, batch, count=1, start=3), updates(again, batch, count=1, start=3)
    assert next_of_one == pytest.approx(next_of_spread, rel=1e-4, abs=1e-5)
    spread.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("qwen3", MeshShape(fsdp=2)),
        ("qwen3", MeshShape(replicate=2, fsdp=2)),
        ("qwen3", MeshShape(fsdp=2, tp=2)),
        ("qwen3_moe", MeshShape(fsdp=4, ep=2)),
    ],
)
def test_gradients_that_are_added_up_once_are_the_same(processes, kind, shape):
    model = make_model(kind)
    one, spread = learner(copy.deepcopy(model)), processes.learner(Made(model, sync_each_pass=False), shape)
    batch = Batch(WORKLOADS["edges"]())
    for layout, budget in LAYOUTS.values():
        plans = layout(batch.turns, budget)
        (metrics, _), (wanted, _) = batch.update(spread, plans), batch.update(one, plans)
        assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert_same(spread.gradients(), gradients(one.policy.model), 5e-6)
    spread.close()


def test_ranks_that_compute_layers_together_get_the_same_plans():
    shape = MeshShape(replicate=2, fsdp=3, tp=2)
    assert (shape.ranks, shape.hands, shape.same_plans) == (12, 6, 2)
    assert [shape.hand_of(rank) for rank in range(12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    shape = MeshShape(fsdp=2, cp=2, tp=2)
    assert (shape.ranks, shape.hands, shape.same_plans, shape.num_shards) == (8, 2, 4, 4)

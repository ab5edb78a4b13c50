"""Every shape of the mesh computes what one process computes: real arithmetic over gloo, in as many processes."""

import copy

import numpy as np
import pytest
import torch

from cluster.pool import Made, learner
from cluster.test_ranked import MOVING, Batch, assert_same, together, updates
from properties.test_tree_layout import HANDED_OVER, PARTS, WHOLE, WORKLOADS
from support.acting import byte_tokenizer
from support.exact import make_exact
from support.making import distance, gradients, make_model, of_usual_size
from support.mixture import with_random_routes
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


def named(kind, shape, marks=()):
    return pytest.param(kind, shape, marks=marks, id=f"{kind}-{name_of(shape)}")


def marked(kind, shape):
    return named(kind, shape, () if (kind, shape) in QUICK else pytest.mark.slow)


@pytest.fixture
def processes(request, shape):
    """As many processes as a shape has."""
    return request.getfixturevalue("pool" if shape.ranks == 2 else "four")


@pytest.mark.parametrize(("kind", "shape"), [marked(kind, shape) for kind, shape in EVERY])
def test_a_mesh_has_the_gradient_of_one_process(processes, kind, shape):
    """To the rounding of float64, for trees, packed turns and plans of several passes."""
    how, model = {"dtype": torch.float64}, make_model(kind, dtype="float64")
    one, spread = learner(copy.deepcopy(model), **how), processes.learner(Made(model, **how), shape)
    batch = Batch(WORKLOADS["edges"]())
    for layout, budget in LAYOUTS.values():
        plans = layout(batch.turns, budget)
        (metrics, logprobs), (wanted_metrics, wanted) = batch.update(spread, plans), batch.update(one, plans)
        assert metrics == pytest.approx(wanted_metrics, rel=1e-12, abs=1e-12)
        assert distance(np.concatenate(logprobs), np.concatenate(wanted)) <= 1e-12
        assert_same(spread.gradients(), gradients(one.policy.model), 1e-12)
    spread.close()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape"), [named(kind, shape) for kind, shape in EVERY])
def test_a_mesh_in_float32_is_within_a_millionth_of_one_process(processes, kind, shape):
    """Logprobs by their largest difference, the gradient relative to its norm. Experts are multiplied by the kernel of
    PyTorch here, which has no float64. Printed (`-rP`) beside it: how far both are from float64."""
    model = of_usual_size(make_model(kind))
    exact = copy.deepcopy(model).double()
    make_exact(exact)
    truth, one = learner(exact, dtype=torch.float64), learner(copy.deepcopy(model))
    spread, batch = processes.learner(Made(model), shape), Batch(WORKLOADS["edges"]())
    for name, (layout, budget) in LAYOUTS.items():
        plans = layout(batch.turns, budget)
        logprobs = [np.concatenate(batch.update(each, plans)[1]) for each in (spread, one, truth)]
        of_one, of_truth = (gradients(each.policy.model) for each in (one, truth))
        whole = [together(values) for values in (spread.gradients(), of_one, of_truth)]
        print(f"{kind} {name_of(shape)} {name}", *pairs_of(largest, logprobs), *pairs_of(distance, whole))
        assert largest(logprobs[0], logprobs[1]) <= 1e-6
        assert distance(whole[0], whole[1]) <= 1e-6
    spread.close()


def largest(one, other):
    return float(np.abs(one - other).max())


def pairs_of(far, values):
    """For a table: how far a mesh is from one process, and how far each of them is from float64."""
    mesh, one, truth = values
    return (f"{far(*pair):.1e}" for pair in ((mesh, one), (mesh, truth), (one, truth)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [pytest.param(shape, id=name_of(shape)) for shape in MIXTURE])
def test_a_mesh_replays_routes_as_one_process_does(processes, shape):
    """Some turns name experts for all their tokens, some for a part of them, some for none."""
    how, model = {"dtype": torch.float64, "replay": True}, make_model("qwen3_moe", dtype="float64")
    one, spread = learner(copy.deepcopy(model), **how), processes.learner(Made(model, **how), shape)
    batch = Batch(with_random_routes(WORKLOADS["edges"]()))
    for layout, budget in LAYOUTS.values():
        plans = layout(batch.turns, budget)
        assert any(plan.routes is not None for plan in plans)
        (_, logprobs), (_, wanted) = batch.update(spread, plans), batch.update(one, plans)
        assert distance(np.concatenate(logprobs), np.concatenate(wanted)) <= 1e-12
        assert_same(spread.gradients(), gradients(one.policy.model), 1e-12)
    spread.close()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape"), [named(kind, shape) for kind, shape in EVERY])
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


UNEVEN = 67
"""Rows of embeddings: some ranks have one more than others."""


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=() if shape.ranks == 2 else pytest.mark.slow, id=name_of(shape))
        for shape in (MeshShape(fsdp=2), MeshShape(fsdp=4), MeshShape(fsdp=2, tp=2), MeshShape(cp=2, tp=2))
    ],
)
def test_tied_embeddings_whose_rows_are_divided_unevenly_learn_as_in_one_process(processes, shape):
    model, how = make_model("qwen3", vocab_size=UNEVEN), {"settings": MOVING}
    one, spread = learner(copy.deepcopy(model), **how), processes.learner(Made(model, **how), shape)
    batch = Batch(WORKLOADS["growing"]())
    for _ in range(2):
        plans = cut(batch.turns, WHOLE)
        (mine, _), (theirs, _) = batch.update(spread, plans), batch.update(one, plans)
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert_same(spread.publish(), one.publish(), 1e-4)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        named("qwen3", MeshShape(fsdp=2)),
        named("qwen3", MeshShape(replicate=2, fsdp=2)),
        named("qwen3", MeshShape(fsdp=2, tp=2)),
        named("qwen3", MeshShape(fsdp=2, cp=2)),
        named("qwen3_moe", MeshShape(fsdp=2, ep=2)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_on_the_host_change_no_bit(processes, kind, shape, dtype, tmp_path):
    """Nor do they in a checkpoint, from which others go on as they would."""
    batch, found = Batch(WORKLOADS["growing"]()), []
    for offload in (False, True):
        how = {"critic": make_model(kind, seed=2), "settings": MOVING, "offload": offload, "dtype": dtype}
        spread = processes.learner(Made(make_model(kind), **how), shape)
        metrics = updates(spread, batch, count=2)
        spread.save(tmp_path / str(offload), byte_tokenizer())
        found.append((metrics, {name: tensor.clone() for name, tensor in spread.publish().items()}))
        spread.close()
    (metrics, weights), (of_host, weights_of_host) = found
    assert metrics == of_host
    assert all(torch.equal(weights[name], weights_of_host[name]) for name in weights)
    how = {"critic": make_model(kind, seed=2), "settings": MOVING, "dtype": dtype}
    again = []
    for wrote, reads in ((False, True), (True, False)):
        made = Made(load_model(tmp_path / str(wrote)), **how, offload=reads)
        spread = processes.learner(made, shape)
        spread.restore(tmp_path / str(wrote))
        again.append(updates(spread, batch, count=1, start=2))
        spread.close()
    assert again[0] == again[1]


def test_ranks_that_compute_layers_together_get_the_same_plans():
    shape = MeshShape(replicate=2, fsdp=3, tp=2)
    assert (shape.ranks, shape.hands, shape.same_plans) == (12, 6, 2)
    assert [shape.hand_of(rank) for rank in range(12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    shape = MeshShape(fsdp=2, cp=2, tp=2)
    assert (shape.ranks, shape.hands, shape.same_plans, shape.num_shards) == (8, 2, 4, 4)

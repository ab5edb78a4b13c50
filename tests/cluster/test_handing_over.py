"""A checkpoint of every shape goes on in every other one, and in one process."""

import copy

import pytest

from cluster.pool import Made, learner
from cluster.test_meshes import name_of
from cluster.test_ranked import MOVING, Batch, assert_same
from properties.test_tree_layout import HANDED_OVER, PARTS, WHOLE, WORKLOADS
from support.acting import byte_tokenizer
from support.making import make_model
from turnwise.cluster.mesh import MeshShape
from turnwise.learn.policy import load_model
from turnwise.plan.cut import cut

ONE = MeshShape()
SHAPES = {
    "qwen3": [
        ONE,
        MeshShape(fsdp=2),
        MeshShape(replicate=2),
        MeshShape(tp=2),
        MeshShape(cp=2),
        MeshShape(fsdp=2, tp=2),
        MeshShape(fsdp=2, cp=2),
        MeshShape(replicate=2, fsdp=2),
        MeshShape(replicate=2, tp=2),
        MeshShape(cp=2, tp=2),
    ],
    "qwen3_moe": [
        ONE,
        MeshShape(fsdp=2),
        MeshShape(fsdp=2, ep=2),
        MeshShape(tp=2, ep=2),
        MeshShape(cp=2, ep=2),
        MeshShape(fsdp=4, ep=2),
        MeshShape(fsdp=2, tp=2, ep=4),
        MeshShape(replicate=2, fsdp=2, ep=2),
    ],
}
CASES = [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes]
DONE = 2
"""Updates before the checkpoint."""


class Written:
    """Checkpoints of all shapes after some updates, with the update that comes next on the shape that wrote it. Each is
    made when it is first asked for."""

    def __init__(self, folder, pools):
        self.folder, self.pools = folder, pools
        self.batch = Batch(WORKLOADS["single turns"]())
        self.found = {}

    def learner(self, kind, shape, folder=None):
        """One that has just been made of a model, or of the folder of a checkpoint, which it has restored."""
        model = make_model(kind) if folder is None else load_model(folder)
        how = {"settings": MOVING}
        made = learner(model, **how) if shape == ONE else self.pools[shape.ranks].learner(Made(model, **how), shape)
        if folder is not None:
            made.restore(folder)
        return made

    def of(self, kind, shape):
        """(folder, weights in it, metrics of the next update, weights after it)"""
        if (kind, shape) not in self.found:
            folder = self.folder / f"{kind}-{name_of(shape)}"
            own = self.learner(kind, shape)
            for place in range(DONE):
                self.update(own, place)
            own.save(folder, byte_tokenizer())
            self.found[kind, shape] = folder, copied(own), *self.next(own)
            own.close()
        return self.found[kind, shape]

    def next(self, own):
        """(metrics of the next update, weights after it)"""
        return self.update(own, DONE), copied(own)

    def update(self, own, place):
        metrics, _ = self.batch.update(own, cut(self.batch.turns, (WHOLE, PARTS, HANDED_OVER)[place % 3]))
        return metrics


def copied(own):
    return {name: copy.copy(tensor.detach().numpy()) for name, tensor in own.publish().items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory, pool, four):
    return Written(tmp_path_factory.mktemp("shapes"), {2: pool, 4: four})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"), [pytest.param(*case, id=f"{case[0]}-{name_of(case[1]) or 'one'}") for case in CASES]
)
def test_a_shape_goes_on_from_every_other(written, kind, shape):
    """It has every bit of their weights, and its next update is theirs."""
    for other in SHAPES[kind]:
        if other == shape:
            continue
        folder, weights, wanted, moved = written.of(kind, other)
        own = written.learner(kind, shape, folder)
        assert all((tensor.numpy() == weights[name]).all() for name, tensor in own.publish().items()), other
        metrics, after = written.next(own)
        assert wanted["gradient_norm"] > MOVING.clip_norm
        assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-5), other
        mine, theirs = ({name: each[name] - weights[name] for name in weights} for each in (after, moved))
        assert_same(mine, theirs, 1e-3)
        own.close()

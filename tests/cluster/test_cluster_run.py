"""Whole runs whose learner is spread over processes: the same curve in every shape."""

import asyncio

import pytest

from cluster.pool import PoolRanks, open_rank
from cluster.test_meshes import name_of
from support.assembling import warm_model
from support.mixture import mixture_folder
from support.running import SilentScreen, micro_recipe, train, untimed
from turnwise.assemble import learner, run
from turnwise.cluster.mesh import MeshShape
from turnwise.runs.folder import RunFolder

FEW = [
    "entropy=0.1",
    "sft.updates=0",
    "steps=2",
    "evaluation.every=0",
    "evaluation.final_tasks=4",
    "checkpoints.every=1",
]
LAID_OUT = {"passes", "tokens/planned"}
"""What a layout for several ranks changes."""


async def stopped_after_a_step(recipe):
    """Ask a run to stop as soon as it has begun: it ends after a whole step, or before the first."""
    stop = asyncio.Event()
    stop.set()
    return await run.start(recipe, SilentScreen(), stop)


def assert_same_curve(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        assert theirs.get("gradient_norm", 1.0) > 0
        shared = theirs.keys() - LAID_OUT
        assert {k: mine[k] for k in shared} == pytest.approx({k: theirs[k] for k in shared}, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_run_over_two_ranks_is_that_of_one_process_and_goes_on_as_one(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = micro_recipe(tmp_path / "one", *FEW), micro_recipe(tmp_path / "two", *FEW, "cluster.fsdp=2")
    train(one)
    assert asyncio.run(stopped_after_a_step(two)) is None
    folder = RunFolder.open(two.out)
    elsewhere = run.resume(folder.path, SilentScreen(), asyncio.Event(), overrides=["cluster.fsdp=1"])
    assert asyncio.run(elsewhere) is not None
    found, wanted = untimed(folder.metrics), untimed(RunFolder.open(one.out).metrics)
    assert len(found) == 3
    assert_same_curve(found, wanted)


@pytest.mark.slow
def test_warm_start_and_critic_learn_over_two_ranks_too(tmp_path):
    recipe = micro_recipe(tmp_path, *FEW, "steps=1", "cluster.fsdp=2", "credit.name=gae", "sft.updates=1")
    train(recipe)
    [_, line] = untimed(RunFolder.open(recipe.out).metrics)
    assert line["critic/skipped"] == line["skipped"] == 0.0
    assert line["gap/mean"] < 1e-4


# ---------------------------------------------------------------- every shape, in processes that are there already


TASKS = ["env.0.tasks.links=[2,3]", "env.0.tasks.count=16", "rollout.max_turns=6"]
CURVE = [
    *TASKS,
    "model.hidden=",
    "model.layers=",
    "sft.updates=0",
    "steps=4",
    "evaluation.every=2",
    "optimizer.learning_rate=3e-4",
]
SHAPES = {
    "dense": [
        MeshShape(fsdp=2),
        MeshShape(replicate=2),
        MeshShape(tp=2),
        MeshShape(cp=2),
        MeshShape(replicate=2, fsdp=2),
        MeshShape(fsdp=2, tp=2),
        MeshShape(cp=2, tp=2),
    ],
    "mixture": [MeshShape(fsdp=2, ep=2), MeshShape(tp=2, ep=2), MeshShape(cp=2, ep=2), MeshShape(fsdp=4, ep=2)],
}
CASES = [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes]


def on_pools(*pools):
    """What starts the ranks of a run: a pool has them already."""

    def start(shape, make, **how):
        [pool] = (each for each in pools if each.size == shape.ranks)
        pool.made += 1
        pool.run(open_rank, *([value] * pool.size for value in (pool.made, shape, make)))
        return PoolRanks(pool, pool.made, shape)

    return start


def keys_of(shape):
    return [f"cluster.{name}={getattr(shape, name)}" for name in ("replicate", "fsdp", "cp", "tp", "ep")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folders that runs begin from: a model that a warm start has taught to win now and then, and a mixture.

    After a longer one it would win every attempt, no group would differ, and nothing would be trained.
    """
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_CACHE", str(folder / "cache"))
        taught = ["sft.updates=20", "sft.batch=16", "sft.optimizer.learning_rate=3e-3"]
        recipe = micro_recipe(folder, *TASKS, *taught, "model.hidden=128", "model.layers=2")
        model, tokenizer = asyncio.run(warm_model(recipe))
    for part in (model, tokenizer):
        part.save_pretrained(folder / "dense")
    return {"dense": folder / "dense", "mixture": mixture_folder(folder / "mixture")}


@pytest.fixture(scope="module")
def curves(tmp_path_factory, models):
    """The metrics of a run in one process, by kind."""
    found = {}
    for kind in SHAPES:
        recipe = micro_recipe(tmp_path_factory.mktemp(kind), *of_kind(kind, models))
        train(recipe)
        found[kind] = untimed(RunFolder.open(recipe.out).metrics)
    return found


def of_kind(kind, models):
    """A mixture is not taught before, so it is rewarded for its entropy."""
    return [*CURVE, f"model.path={models[kind]}", *(["entropy=0.1"] if kind == "mixture" else [])]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape"), [pytest.param(*case, id=f"{case[0]}-{name_of(case[1])}") for case in CASES])
def test_a_run_over_a_mesh_has_the_curve_of_one_process(tmp_path, monkeypatch, pool, four, models, curves, kind, shape):
    """Rewards are equal; losses, norms of gradients and all other metrics to rounding."""
    monkeypatch.setattr(learner, "ProcessRanks", on_pools(pool, four))
    recipe = micro_recipe(tmp_path, *of_kind(kind, models), *keys_of(shape))
    train(recipe)
    found, wanted = untimed(RunFolder.open(recipe.out).metrics), curves[kind]
    assert_same_curve(found, wanted)
    rewards = [line["reward/mean"] for line in wanted if line["step"]]
    assert [line["reward/mean"] for line in found if line["step"]] == rewards
    assert kind == "mixture" or len(set(rewards)) > 1

"""Checkpoints over ranks: every rank has and writes its part, and trains on meanwhile."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from cluster.pool import OPEN, Made, learner
from cluster.test_ranked import MOVING, TIED, Batch, updates
from properties.test_tree_layout import WORKLOADS
from support.acting import byte_tokenizer
from support.making import make_model
from turnwise.cluster.mesh import MeshShape
from turnwise.learn import export, snapshot
from turnwise.learn.lora import LoraSettings
from turnwise.learn.policy import load_model
from turnwise.learn.staged import Staged
from turnwise.plan.cut import cut

WRITE, SAVE_FILE = Staged.write, snapshot.save_file  # type: ignore[attr-defined]


def for_both(value):
    return [value, value]


# ---------------------------------------------------------------- what is done in the processes of the pool


def hold(path):
    """Let this process write once a file is there."""

    def write(staged, *arguments):
        while not Path(path).exists():
            time.sleep(0.01)
        WRITE(staged, *arguments)

    Staged.write = write


def fill_disk(where):
    """Have the disk of the second rank be full: for its parts of a snapshot, or for its files of the export."""

    def full(*arguments, **how):
        raise OSError(28, os.strerror(28))

    if OPEN["place"].rank == 1:
        (snapshot if where == "snapshot" else export).save_file = full  # type: ignore[attr-defined]


def small_files():
    export.SMALLEST = 1


def as_before():
    Staged.write, snapshot.save_file, export.save_file, export.SMALLEST = WRITE, SAVE_FILE, SAVE_FILE, 10**9  # type: ignore[attr-defined]


def sizes(number):
    """Bytes that this rank has staged: (of the export, of the largest tensor in it, of the snapshots)."""
    staged = OPEN[number].staged
    tensors = [tensor for file in staged.export.files.values() for tensor in file.values()]
    parts = [part for tensors in staged.snapshots.values() for part in tensors.values()]
    local = [part.to_local() if hasattr(part, "to_local") else part for part in parts]
    return sum(tensor.nbytes for tensor in tensors), sum(part.nbytes for part in local)


@pytest.fixture
def restored_pool(pool):
    yield pool
    pool.run(as_before)


# ---------------------------------------------------------------- tests


def train(learner, batch, count):
    for _ in range(count):
        batch.update(learner, cut(batch.turns, 1000))


def test_ranks_train_on_while_they_write_what_was_staged(restored_pool, tmp_path):
    pool, gate = restored_pool, tmp_path / "gate"
    batch = Batch(WORKLOADS["single turns"]())
    two = pool.learner(Made(make_model(), settings=MOVING))
    train(two, batch, 1)
    before = {name: tensor.clone() for name, tensor in two.publish().items()}
    pool.run(hold, for_both(gate))
    staged = two.stage(byte_tokenizer())
    writer = threading.Thread(target=staged.write, args=(tmp_path / "saved",))
    writer.start()
    train(two, batch, 2)
    assert writer.is_alive()
    assert not (tmp_path / "saved").exists()
    gate.touch()
    writer.join(60)
    assert not writer.is_alive()
    one = learner(load_model(tmp_path / "saved"), settings=MOVING)
    one.restore(tmp_path / "saved")
    assert one.num_updates == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.publish().items())
    assert not all(torch.equal(tensor, before[name]) for name, tensor in two.publish().items())
    two.close()


@pytest.mark.parametrize("where", ["snapshot", pytest.param("export", marks=pytest.mark.slow)])
def test_a_disk_that_is_full_for_one_rank_ends_no_rank(restored_pool, tmp_path, where):
    pool = restored_pool
    two = pool.learner(Made(make_model(), settings=MOVING))
    pool.run(small_files)
    pool.run(fill_disk, for_both(where))
    with pytest.raises(OSError, match="No space left") as failed:
        two.save(tmp_path / "full", byte_tokenizer())
    assert failed.value.errno == 28
    pool.run(as_before)
    two.save(tmp_path / "room", byte_tokenizer())
    found = load_model(tmp_path / "room").state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in two.publish().items())
    two.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rank_stages_more_than_its_share(restored_pool, tmp_path, dtype):
    pool = restored_pool
    model = make_model("llama")
    two = pool.learner(Made(model, settings=MOVING, dtype=dtype))
    train(two, Batch(WORKLOADS["single turns"]()), 1)
    pool.run(small_files)
    two.stage(byte_tokenizer())
    exported, kept = zip(*pool.run(sizes, for_both(pool.made)), strict=True)
    number = sum(parameter.numel() for parameter in model.parameters())
    largest = max(parameter.numel() for parameter in model.parameters())
    assert sum(exported) == number * dtype.itemsize
    assert max(exported) <= (number / 2 + largest) * dtype.itemsize
    tensors = 3 if dtype == torch.bfloat16 else 2  # moments, and weights that the export rounds
    scalars = 20_000  # counts, and the state of the random generator
    assert tensors * number * 4 <= sum(kept) <= tensors * number * 4 + 2 * scalars
    assert max(kept) <= tensors * number * 4 * 0.55 + scalars
    two.save(tmp_path, byte_tokenizer())
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3
    found = load_model(tmp_path).state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in two.publish().items())
    two.close()


# ---------------------------------------------------------------- other numbers of ranks


HOW = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "adapters": {"lora": LoraSettings(rank=4, alpha=8.0)},
}


def state_of(one):
    """All that a learner of this process has: weights, moments, counts, and those of its critic."""
    found = {f"weight/{name}": tensor.clone() for name, tensor in one.policy.model.state_dict().items()}
    found |= {name: torch.as_tensor(tensor).clone() for name, tensor in one.stepper.state().items()}
    return found | {f"critic/{name}": tensor.detach().clone() for name, tensor in one.critic.state().items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize("how", HOW)
def test_one_two_four_and_one_rank_hand_over_every_bit(pool, four, tmp_path, how, kind):
    """Each restores what the one before wrote and writes it again; the last has what the first had."""
    batch, shared = Batch(WORKLOADS["single turns"]()), {"settings": MOVING, **HOW[how]}
    start = make_model(kind)
    made = lambda model: Made(model, critic=make_model(kind, seed=2), **shared)
    load = lambda folder: make_model(kind) if how == "adapters" else load_model(folder)
    one = learner(start, **made(start).how)
    updates(one, batch, count=2)
    one.save(tmp_path / "one", byte_tokenizer())
    wanted = state_of(one)
    before = tmp_path / "one"
    for name, ranks in (("two", pool), ("four", four)):
        spread = ranks.learner(made(load(before)))
        spread.restore(before)
        before = tmp_path / name
        spread.save(before, byte_tokenizer())
        spread.close()
    model = load(before)
    last = learner(model, **made(model).how)
    last.restore(before)
    found = state_of(last)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert (updates(last, batch, count=1, start=2), state_of(last).keys()) == (
        updates(one, batch, count=1, start=2),
        wanted.keys(),
    )


SHAPES = {
    "qwen3": (MeshShape(fsdp=2), MeshShape(fsdp=2, tp=2), MeshShape(replicate=2, fsdp=2), MeshShape(tp=2)),
    "qwen3_moe": (MeshShape(fsdp=2, ep=2), MeshShape(fsdp=2, tp=2, ep=4), MeshShape(replicate=2, fsdp=2, ep=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_every_shape_hands_over_every_bit(pool, four, tmp_path, kind, dtype):
    """From one process over meshes of several dimensions to one process."""
    how = {"settings": MOVING, "dtype": dtype}
    made = lambda model: Made(model, critic=make_model(kind, seed=2), **how)
    batch, start = Batch(WORKLOADS["single turns"]()), make_model(kind)
    one = learner(start, critic=make_model(kind, seed=2), **how)
    updates(one, batch, count=2)
    before, wanted = tmp_path / "start", state_of(one)
    one.save(before, byte_tokenizer())
    for number, shape in enumerate(SHAPES[kind]):
        spread = (pool if shape.ranks == 2 else four).learner(made(load_model(before)), shape)
        spread.restore(before)
        before = tmp_path / str(number)
        spread.save(before, byte_tokenizer())
        spread.close()
        last = learner(load_model(before), critic=make_model(kind, seed=2), **how)
        last.restore(before)
        found = state_of(last)
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == [], shape

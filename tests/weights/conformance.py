"""What every transport is held to: weights of a learner over ranks reach an engine, all of them; less is noticed.

A transport is an entry in a dict of ways (`WAYS` here): how an engine is started that gets weights by it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from cluster.pool import Made
from engines.remote.processes import start_router
from support.acting import inline, slot_engine
from support.making import VOCABULARY, make_model
from training.checking import DTYPES
from turnwise.cluster.mesh import MeshShape
from turnwise.learn.attention import NAME, register
from turnwise.learn.lora import LoraSettings
from turnwise.learn.stepper import OptimizerSettings
from turnwise.plan.pack import pack
from turnwise.training.weight_check import AT_START, EXACT, ROOM, WeightCheck
from turnwise.weights.share import WeightShare

CONTEXT = 96
SIZES = {"hidden_size": 64, "head_dim": 32}
"""A model that vLLM has kernels for too."""
MIXED = {"moe_intermediate_size": 32}
"""On a CPU vLLM loads no weights again into experts that it had to pad."""


@dataclass(frozen=True)
class Learned:
    """A learner to take weights from."""

    kind: str
    shape: MeshShape
    more: dict[str, Any] = field(default_factory=dict)

    def model(self):
        sizes = SIZES | (MIXED if self.kind == "qwen3_moe" else {})
        return make_model(self.kind, tie_word_embeddings=not self.more, **sizes)

    def made(self, dtype):
        settings = OptimizerSettings(1e-2, clip_norm=1e9)
        return Made(self.model(), settings=settings, dtype=DTYPES[dtype], **self.more)


LORA = {"lora": LoraSettings(rank=4, alpha=8.0)}
LEARNERS = {
    "dense-fsdp2": Learned("qwen3", MeshShape(fsdp=2)),
    "dense-tp2": Learned("qwen3", MeshShape(tp=2)),
    "dense-fsdp2-tp2": Learned("qwen3", MeshShape(fsdp=2, tp=2)),
    "mixture-fsdp2": Learned("qwen3_moe", MeshShape(fsdp=2)),
    "mixture-fsdp2-tp2-ep2": Learned("qwen3_moe", MeshShape(fsdp=2, tp=2, ep=2)),
    "mixture-fsdp4-ep2": Learned("qwen3_moe", MeshShape(fsdp=4, ep=2)),
    "lora-fsdp2": Learned("qwen3", MeshShape(fsdp=2), LORA),
    "lora-fsdp4": Learned("qwen3", MeshShape(fsdp=4), LORA),
}


# ---------------------------------------------------------------- ways


def in_process(model, folder, dtype):
    """The engine of this process, which maps what the ranks wrote."""
    own = copy.deepcopy(model)
    register()
    own.set_attn_implementation(NAME)
    return slot_engine(own, slots=AT_START, context=CONTEXT, dtype=DTYPES[dtype])


def in_processes(model, folder, dtype):
    """Two engines in processes of their own, which read one file."""
    return start_router(model, folder, context=CONTEXT, slots=AT_START, dtype=DTYPES[dtype])


WAYS = {"in_process": in_process, "processes": in_processes}


# ---------------------------------------------------------------- what is asked


def check_of(engine, learner, dtype):
    return WeightCheck(
        engine,
        learner,
        lambda turns: pack(turns, 4096),
        inline,
        temperature=1.0,
        vocabulary=VOCABULARY,
        exact=dtype == "float32",
        longest=CONTEXT,
    )


async def arrives(check, step):
    """Loads are found to arrive: at the start, disturbed and restored, and after a step of the learner."""
    engine, learner = check.engine, check.learner
    await engine.load(learner.publish(), 0)  # a learner with adapters begins as its model does
    found = [await check.begin(0)]
    step(learner)
    await engine.load(learner.publish(), 1)
    found.append(await check.arrived(1))
    return found


def assert_at_floor(check, found, dtype):
    start, later = found
    assert start.problem == later.problem == ""
    assert later.metrics["weight_check/gap"] <= check.limit
    assert dtype == "bfloat16" or check.limit == EXACT
    assert later.metrics["weight_check/moved"] > later.metrics["weight_check/gap"]


async def left_unnoticed(make_engine, learner, dtype, *, step, remember, leave):
    """The suite of a transport: loads arrive whole, and then the names of which one tensor could be left behind without
    anybody noticing. `remember` and `leave` are called in every rank."""
    engine = make_engine()
    try:
        check = check_of(engine, learner, dtype)
        assert_at_floor(check, await arrives(check, step), dtype)
        remember()
        names = some_of(learner.outline.shapes)
        assert len(names) > 10
        return await not_caught(check, leave, names)
    finally:
        await engine.close()


async def not_caught(check, leave, names):
    """The tensors that a load of every change may leave behind without being noticed. `leave` has the ranks hand on a
    tensor as it was at first, or none."""
    learner, limit = check.learner, check.limit
    plain = await check.sample(0, "plain", AT_START)
    check.limit = limit = limit or max(EXACT, ROOM * (await check.difference(plain)).size)
    changes, _ = await check.changes(plain.turns)
    left = list(names)
    for number, change in enumerate(changes):
        learner.disturb(change)
        try:
            leave(None)
            assert await gap_after(check, number) <= limit, "a whole load is refused"
            for name in list(left):
                leave(name)
                if not await gap_after(check, number) <= limit:
                    left.remove(name)
        finally:
            leave(None)
            learner.undisturb()
    return left


async def gap_after(check, number):
    await check.engine.load(check.learner.publish(), 0)
    await check.engine.forget()
    return (await check.difference(await check.sample(0, f"disturbed {number}", AT_START))).size


# ---------------------------------------------------------------- in a rank


class LaggingShare(WeightShare):
    """A share of which one tensor stays as it was, whatever way it takes."""

    def __init__(self, share, first, name):
        super().__init__(share.tensors, share.added)
        self.first, self.name = first, name

    def parts(self):
        for part in super().parts():
            yield self.first[0][part.name] if part.name == self.name else part

    def whole(self, dtype):
        for name, tensor in super().whole(dtype):
            yield name, self.first[1][name].to(dtype) if name == self.name else tensor


def remember(rank):
    """Keep all weights as they are, as parts and whole."""
    share = rank.share()
    parts = {part.name: type(part)(part.name, part.place, part.values.clone()) for part in share.parts()}
    rank.first = parts, {name: tensor.clone() for name, tensor in share.whole(torch.float32)}
    rank.plain_share = rank.share


def leave_behind(rank, name):
    """Hand on the tensor of a name as it was when all were remembered; none where the name is None."""
    plain = rank.plain_share
    rank.share = plain if name is None else lambda: LaggingShare(plain(), rank.first, name)


def some_of(names):
    """The names of all kinds of tensors: of the last layer, and outside of layers."""
    return [name for name in names if ".layers." not in name or ".layers.1." in name]

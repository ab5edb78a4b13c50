"""A learner, an engine with weights of its own, and the check of one against the other."""

from __future__ import annotations

import copy

import torch

from support.acting import VOCABULARY, inline, tiny_model
from turnwise.engines.slots.engine import SlotEngine
from turnwise.engines.slots.model import SlotModel
from turnwise.learn.learner import Learner
from turnwise.learn.policy import Policy
from turnwise.learn.schedules import schedule
from turnwise.learn.stepper import OptimizerSettings
from turnwise.plan.pack import pack
from turnwise.training.weight_check import WeightCheck

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def learner_of(model, dtype="float32", temperature=1.0):
    policy = Policy(model, dtype=DTYPES[dtype], temperature=temperature, layout=pack, longest=200)
    return Learner(policy, OptimizerSettings(1e-6, (0.9, 0.999), 0.0, 1.0), schedule("constant", 0, 10))


def untied(model):
    """The model with an output layer of its own, equal to its embedding."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    return model


class Lazy(SlotModel):
    """Leaves some tensors as they were, whatever it is told to load."""

    stale: tuple[str, ...] = ()

    def load(self, weights, version):
        own = self.model.state_dict()
        super().load({**weights, **{name: own[name].clone() for name in self.stale}}, version)


def lazy_engine(model, *stale, dtype="float32", **settings):
    slots = Lazy(
        untied(copy.deepcopy(model)),
        slots=8,
        context=96,
        end_tokens=(),
        decode=str,
        dtype=DTYPES[dtype],
        **settings,
    )
    slots.stale = stale
    return SlotEngine(slots, run=inline, shares_weights=False)


def check_of(engine, learner, dtype="float32", **settings):
    given = {"temperature": 1.0, "vocabulary": VOCABULARY, "exact": dtype == "float32", **settings}
    return WeightCheck(engine, learner, lambda turns: pack(turns, 4096), inline, **given)


def pair(*stale, dtype="float32", tied=True, **settings):
    """(learner, engine, check)"""
    model = tiny_model(tied=tied)
    learner = learner_of(model, dtype)
    engine = lazy_engine(model, *stale, dtype=dtype, **settings)
    return learner, engine, check_of(engine, learner, dtype)

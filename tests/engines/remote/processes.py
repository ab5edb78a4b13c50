"""Engines in processes of their own, for tests."""

from __future__ import annotations

from functools import partial

import torch

from support.acting import CONTEXT, slot_engine
from turnwise.engines.remote.process import ProcessEngine
from turnwise.engines.remote.router import Router
from turnwise.learn.attention import NAME, register
from turnwise.schedule.workers import in_own_thread
from turnwise.weights.publisher import Publisher
from turnwise.weights.skeleton import skeleton_of


def make_slots(model, version, **settings):
    """A slot engine on a model; called in the other process."""
    torch.set_num_threads(1)
    register()
    model.set_attn_implementation(NAME)
    return slot_engine(model, run=in_own_thread("engine"), version=version, **settings)


def start_process(model, folder, name="engine", context=CONTEXT, **settings):
    publisher = Publisher(folder)
    publisher.publish(model.state_dict(), 0)
    make = partial(make_slots, context=context, **settings)
    return ProcessEngine(make, skeleton_of(model), publisher, context=context, name=name)


def start_router(model, folder, replicas=2, context=CONTEXT, check_seconds=0.2, **settings):
    publisher = Publisher(folder)
    publisher.publish(model.state_dict(), 0)
    make, skeleton = partial(make_slots, context=context, **settings), skeleton_of(model)

    def start(number):
        return ProcessEngine(make, skeleton, publisher, context=context, name=f"replica {number}")

    return Router(start, replicas, publisher, check_seconds=check_seconds)

"""What is replayed exactly: a mixture whose routers are of no known kind is refused before anything is sampled."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.learn.attention import NAME, attention_of, register, states_of
from turnwise.learn.model_checks import ROWS, short_turns
from turnwise.learn.model_cut import cut_of
from turnwise.learn.routers import RecordedRoutes, ReplayedRoutes, Routers
from turnwise.plan.pack import pack
from turnwise.plan.plan import Plan
from turnwise.pretrained import CausalLM


def routers_by_config(model: CausalLM) -> Routers:
    """The routers of a model that is not whole here, once those of its first layers were shown to be known."""
    routers, choice = Routers(model), known_routers(cut_of(model)).choice
    for tap in routers.taps:
        tap.choice = choice
    return routers


@torch.no_grad()
def known_routers(model: CausalLM) -> Routers:
    """The routers of a model, once a few short turns have shown that they take what they are told, and that their own
    routes change no bit. ValueError in one line where not."""
    routers = Routers(model)
    if all(tap.choice is not None for tap in routers.taps):
        return routers  # shown before, on the same modules or on those they were copied from
    register()
    model.set_attn_implementation(NAME)
    [plan] = pack(short_turns(model.config.get_text_config().vocab_size), ROWS.size)
    compute = partial(small_pass, model, plan)
    routers.learn_choice(compute)
    own, heard = RecordedRoutes(), Listener()
    plain = compute(own)
    routes = torch.from_numpy(own.array(routers.num_experts).astype(np.int64)).to(plain.device)
    if not torch.equal(plain, compute(ReplayedRoutes(routes, None))):
        raise routers.unknown("their own routes change what they compute")
    heard.told = ReplayedRoutes((routes + 1) % routers.num_experts, None)
    other = compute(heard)
    if len(heard.taken_by) != len(routers.taps) or torch.equal(plain, other) or not other.isfinite().all():
        raise routers.unknown("they do not take the experts that they are told")
    return routers


def small_pass(model: CausalLM, plan: Plan, routes: Any) -> Tensor:
    stretch = plan.stretches[0]
    return states_of(model, plan, stretch, attention_of(plan, stretch, model.device.type), routes)


class Listener:
    """Replays, and notes which routers asked."""

    def __init__(self) -> None:
        self.told: ReplayedRoutes | None = None
        self.taken_by: set[int] = set()

    def taken(self, layer: int, scores: Tensor, own: Any) -> Any:
        assert self.told is not None
        self.taken_by.add(layer)
        return self.told.taken(layer, scores, own)

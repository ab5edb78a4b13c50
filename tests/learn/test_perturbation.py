"""Mirrors of mixtures: what a model says stays, while its router and all of its experts turn."""

import pytest
import torch

from support.mixture import KINDS, tiny_mixture
from turnwise.learn.perturbation import Change, Disturbance

TOKENS = torch.arange(24).view(2, 12) % 20


def says(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def turned_by(model, *mirrors):
    """The names of the tensors that a mirror turns without changing what the model says by more than rounding."""
    before, turned = says(model), set()
    for name in mirrors:
        disturbance = Disturbance(model, Change(name))
        try:
            if torch.allclose(says(model), before, atol=1e-5, rtol=0):
                turned |= disturbance.names
        finally:
            disturbance.undo()
    assert torch.equal(says(model), before)
    return turned


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "minimax_m2"])
def test_mirrors_turn_routers_and_experts_and_leave_what_a_mixture_says(kind):
    model = tiny_mixture(kind)
    turned = turned_by(model, "stream", "layers")
    routed = {name for name, _ in model.named_parameters() if ".mlp." in name and not name.endswith("bias")}
    assert len(routed) >= 6
    assert routed <= turned


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_router_that_is_left_behind_changes_what_a_mixture_says(kind):
    model = tiny_mixture(kind)
    routers = {
        name: tensor.detach().clone()
        for name, tensor in model.named_parameters()
        if name.split(".")[-2] in ("gate", "router") and name.endswith("weight")
    }
    before = says(model)
    disturbance = Disturbance(model, Change("layers"))
    if not torch.allclose(says(model), before, atol=1e-5, rtol=0):
        pytest.skip("no mirror for this architecture: its router is changed by flips")
    assert routers
    for name, first in routers.items():
        parameter = model.get_parameter(name)
        turned = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(first)
            assert (says(model) - before).abs().mean() > 0.05
            parameter.copy_(turned)
    disturbance.undo()

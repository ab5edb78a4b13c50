"""Routers of every kind: what is tapped, what is refused, and who does not replay."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from properties.test_tree_layout import WHOLE, WORKLOADS
from support.making import VOCABULARY, make_model, make_turn
from support.mixture import KINDS, NUM_EXPERTS, OwnRoutes, tiny_mixture, with_own_routes, with_random_routes
from turnwise.learn.policy import Policy
from turnwise.learn.router_checks import known_routers
from turnwise.learn.routers import ReplayedRoutes, Routers, Tap
from turnwise.plan.cut import cut


def scores(policy, plan):
    with torch.no_grad():
        return np.concatenate([logprobs.numpy() for _, logprobs, _ in policy.passes(plan)])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_routers_of_every_kind_are_known(kind):
    model = tiny_mixture(kind)
    routers = known_routers(model)
    assert (routers.choice.num_experts, routers.choice.k) == (NUM_EXPERTS, 2)
    has_dense = getattr(model.config, "first_k_dense_replace", 0) or kind == "ernie4_5_moe"
    assert routers.layers == ([1] if has_dense else [0, 1])


def test_a_model_without_routers_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^Qwen3ForCausalLM has no routers .* remove model.router_replay$"):
        Policy(make_model(), replay=True)


def test_a_router_of_no_known_kind_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^the routers of PhimoeForCausalLM are of no known kind .* = false$"):
        known_routers(tiny_mixture("phimoe"))


def test_groups_that_take_an_experts_weight_away_are_refused():
    """DeepSeek-V2's scores are zero outside of the best groups, so a replayed expert there would count for nothing."""
    model = tiny_mixture(
        "deepseek_v2",
        topk_method="group_limited_greedy",
        n_group=2,
        topk_group=1,
        first_k_dense_replace=0,
        n_shared_experts=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    with pytest.raises(ValueError, match="group_limited_greedy"):
        Routers(model)


def test_a_bias_only_chooses():
    """GLM's weights are made of probabilities without the bias that balances experts."""
    model = tiny_mixture("glm4_moe")
    router = model.model.layers[1].mlp.gate
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        router.e_score_correction_bias.normal_(0, 5.0)
    routers = known_routers(model)
    told = torch.arange(5 * 2).view(5, 1, 2) % NUM_EXPERTS
    routers.taps[0].routes = ReplayedRoutes(told, None)
    _, weights, experts = router(hidden)
    routers.taps[0].routes = None
    probabilities = (hidden @ router.weight.T).sigmoid().gather(1, told[:, 0])
    wanted = probabilities / probabilities.sum(-1, keepdim=True) * router.routed_scaling_factor
    assert torch.equal(experts, told[:, 0])
    torch.testing.assert_close(weights, wanted)


def test_a_copy_of_a_model_has_taps_of_its_own():
    model = tiny_mixture()
    known_routers(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        taps = Routers(other).taps
        assert all(tap.choice is not None for tap in taps)
        assert not {id(tap) for tap in taps} & {id(tap) for tap in Routers(model).taps}
    hooks = model.model.layers[0].mlp.gate._forward_pre_hooks.values()
    assert sum(isinstance(getattr(hook, "__self__", None), Tap) for hook in hooks) == 1, "tapped once"


def test_a_pass_without_routes_chooses_for_itself_after_one_with():
    model = tiny_mixture()
    turns = with_random_routes(WORKLOADS["growing"]())
    [plan] = cut(turns, WHOLE)
    own = replace(plan, routes=None)
    policy = Policy(model, replay=True)
    before = scores(policy, own)
    assert (scores(policy, plan) != before).any()
    np.testing.assert_array_equal(scores(policy, own), before)


def test_a_failed_pass_leaves_no_tap_open():
    model = tiny_mixture()
    [plan] = cut(with_own_routes(model, WORKLOADS["growing"]()), WHOLE)
    policy = Policy(model, replay=True)
    wanted = scores(policy, plan)
    model.model.layers[1].mlp.experts.register_forward_pre_hook(fail := Failing())
    with pytest.raises(RuntimeError, match="on purpose"):
        scores(policy, plan)
    fail.armed = False
    assert torch.topk(torch.arange(float(NUM_EXPERTS))[None], 2).indices.tolist() == [[7, 6]]
    np.testing.assert_array_equal(scores(policy, plan), wanted)


class Failing:
    armed = True

    def __call__(self, *_):
        if self.armed:
            raise RuntimeError("on purpose")


@pytest.mark.parametrize("wrong", [np.zeros((1, 3, 2)), np.zeros((1, 2, 1)), np.full((1, 2, 2), NUM_EXPERTS)])
def test_routes_of_another_model_are_refused(wrong):
    [plan] = cut([make_turn([1], [2], routes=wrong.astype(np.uint8))], WHOLE)
    with pytest.raises(ValueError, match="another model sampled them"):
        scores(Policy(tiny_mixture(), replay=True), plan)


def test_more_than_256_experts_are_replayed():
    model = tiny_mixture(num_experts=300, num_local_experts=300)
    turns = with_own_routes(model, [make_turn(np.arange(30), np.arange(30, VOCABULARY))])
    assert turns[0].routes.dtype == np.uint16
    [plan] = cut(turns, WHOLE)
    np.testing.assert_array_equal(scores(Policy(model, replay=True), plan), scores(Policy(model), plan))


def test_bfloat16_takes_the_recorded_experts():
    model = tiny_mixture()
    turns = with_random_routes(WORKLOADS["growing"]())
    [plan] = cut(turns, WHOLE)
    exact, rounded = (
        scores(Policy(model, dtype=dtype, replay=True), plan) for dtype in (torch.float32, torch.bfloat16)
    )
    own = scores(Policy(model), plan)
    assert np.abs(exact - rounded).mean() < 0.2 * np.abs(exact - own).mean()


def test_a_model_without_its_adapters_chooses_for_itself():
    pytest.importorskip("peft")
    from turnwise.learn.lora import Adapters, LoraSettings, WithoutAdapters

    model = tiny_mixture()
    [plan] = cut(with_random_routes(WORKLOADS["growing"]()), WHOLE)
    wanted = scores(Policy(copy.deepcopy(model)), plan)
    adapters = Adapters(model, LoraSettings(2, 4.0, ("q_proj",)), base="", seed=0)
    policy = Policy(model, replay=True)
    assert (scores(policy, plan) != wanted).any()
    np.testing.assert_array_equal(scores(WithoutAdapters(policy, adapters), plan), wanted)


def test_own_routes_of_a_turn_are_of_all_its_tokens():
    turn = make_turn([1, 2, 3], [4, 5])
    assert OwnRoutes(tiny_mixture()).of(turn).shape == (5, 2, 2)

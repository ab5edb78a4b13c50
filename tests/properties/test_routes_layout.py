"""Replayed routes: in every layout the same, against one turn at a time with the router's formula written out."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from properties.test_tree_layout import HANDED_OVER, PARTS, WHOLE, WORKLOADS, together
from support.making import distance, gradients, make_learner
from support.mixture import KINDS, tiny_mixture, with_own_routes, with_random_routes
from turnwise.learn.policy import Policy
from turnwise.learn.transformers_reference import in_float64, stock_attention, stock_passes
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.routes import NO_ROUTE, settle_routes
from turnwise.plan.rows import merge

EXACT = 1e-12


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


LAYOUTS = {
    "tree": lambda turns: cut(turns, WHOLE),
    "tree, cut": lambda turns: cut(turns, PARTS),
    "stretches": lambda turns: cut(turns, HANDED_OVER),
    "packed": lambda turns: pack(turns, WHOLE),
    "merged": lambda turns: merge(turns, WHOLE),
}


def chosen(router, hidden):
    """What Qwen3's router does, in the dtype that it is given: transformers goes through float32."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    weights, experts = torch.topk(logits.softmax(-1), router.top_k, dim=-1)
    return logits, weights / weights.sum(-1, keepdim=True), experts


@pytest.fixture
def exact(monkeypatch):
    """A Qwen3 mixture that computes in float64 throughout."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", chosen)
    model = tiny_mixture().double()
    in_float64(model)
    return model


def told(turns):
    """Per turn [tokens, layers, k]: the experts of each of its tokens, -1 where the router chooses."""
    settled = settle_routes(turns)
    found = []
    for place in range(len(turns)):
        rows = settled.rows[place]
        experts = settled.table[np.maximum(rows, 0)].astype(np.int64)
        experts[rows == NO_ROUTE] = -1
        found.append(experts)
    return found


def reference(model, turns):
    """Loss and gradient by one forward pass of transformers per turn, whose routers are told each token's experts."""
    model = copy.deepcopy(model)
    routers = [layer.mlp.gate for layer in model.model.layers]
    loss = torch.zeros((), dtype=torch.float64)
    for turn, experts in zip(turns, told(turns), strict=True):
        if not len(turn.action):
            continue
        for layer, router in enumerate(routers):
            router.forward = formula(router, torch.from_numpy(experts[:, layer]))
        tokens = torch.from_numpy(np.concatenate([turn.prompt, turn.action]).astype(np.int64))[None]
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(turn.prompt) - 1 : -1].log_softmax(-1)
        logprobs = logits.gather(1, tokens[0, len(turn.prompt) :, None])[:, 0]
        loss = loss - logprobs.sum()
    loss.backward()
    return float(loss.detach()), gradients(model)


def formula(router, experts):
    def forward(hidden):
        probabilities = (hidden.reshape(-1, router.hidden_dim) @ router.weight.T).softmax(-1)
        taken = torch.where(experts < 0, probabilities.topk(router.top_k).indices, experts)
        weights = probabilities[torch.arange(len(taken))[:, None], taken]
        return None, weights / weights.sum(-1, keepdim=True), taken

    return forward


def minus_logprobs(logprobs, entropies, old, credit, reference):
    return -logprobs, {}


def replayed(model, plans, turns, **policy):
    """(loss, gradient) of all action tokens, each with weight 1."""
    model = copy.deepcopy(model)
    learner = make_learner(model, learning_rate=0.0, clip_norm=1e9, dtype=next(model.parameters()).dtype, **policy)
    ones = [np.ones(len(turn.action)) for turn in turns]
    _, logprobs = learner.update(plans, ones, ones, {}, minus_logprobs)
    total = -sum(float(values.astype(np.float64).sum()) for values in logprobs)
    return total, gradients(model), logprobs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workload", [slow("growing"), "edges"])
def test_every_layout_takes_the_experts_that_it_is_told(exact, workload, layout):
    """Turns disagree, and some have no routes or only the last ones."""
    turns = with_random_routes(WORKLOADS[workload]())
    loss, wanted = reference(exact, turns)
    found, gradient, _ = replayed(exact, LAYOUTS[layout](turns), turns, replay=True)
    assert abs(found - loss) <= EXACT * abs(loss)
    assert distance(together(gradient), together(wanted)) <= EXACT


def test_padded_rows_take_the_same_experts(exact):
    """What `turnwise verify` compares plans with."""
    turns = [turn for turn in with_random_routes(WORKLOADS["growing"]()) if len(turn.action)]
    loss, wanted = reference(exact, turns)
    policy = Policy(copy.deepcopy(exact), dtype=torch.float64, replay=True)
    found = 0.0
    with stock_attention(policy.model):
        for _, logprobs, _, _ in stock_passes(policy.model, turns, 200, 1.0, policy.routers):
            (-logprobs.sum()).backward()
            found -= float(logprobs.detach().sum())
    assert abs(found - loss) <= EXACT * abs(loss)
    assert distance(together(gradients(policy.model)), together(wanted)) <= EXACT


def test_a_learner_that_ignores_routes_fails_by_far(exact):
    turns = with_random_routes(WORKLOADS["growing"]())
    loss, wanted = reference(exact, turns)
    found, gradient, _ = replayed(exact, LAYOUTS["tree"](turns), turns, replay=False)
    assert abs(found - loss) > 1e-2 * abs(loss)
    assert distance(together(gradient), together(wanted)) > 0.1


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layout", ["tree", slow("stretches"), slow("packed")])
@pytest.mark.parametrize("kind", ["qwen3_moe", slow("glm4_moe"), slow("gpt_oss"), slow("granitemoe")])
def test_own_routes_change_no_bit(kind, layout, checkpointing):
    model = tiny_mixture(kind)
    turns = with_own_routes(model, WORKLOADS["growing"]())
    how = {"checkpointing": checkpointing}
    _, plain, logprobs = replayed(model, LAYOUTS[layout]([replace(turn, routes=None) for turn in turns]), turns, **how)
    _, gradient, again = replayed(model, LAYOUTS[layout](turns), turns, replay=True, **how)
    for one, other in zip(logprobs, again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert plain.keys() == gradient.keys()
    for name in plain:
        np.testing.assert_array_equal(plain[name], gradient[name])


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "glm4_moe", *map(slow, sorted(KINDS.keys() - {"qwen3_moe", "glm4_moe"}))]
)
def test_a_router_that_has_changed_takes_the_recorded_experts(kind):
    model = tiny_mixture(kind)
    turns = with_own_routes(model, WORKLOADS["growing"]())
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    [plan] = cut(turns, WHOLE)
    taken = {replay: experts_taken(changed, plan, replay) for replay in (True, False)}
    known = plan.routes.rows != NO_ROUTE
    recorded = plan.routes.table[plan.routes.rows[known]]
    assert known.mean() > 0.8
    np.testing.assert_array_equal(taken[True][known], recorded)
    assert (np.sort(taken[False][known]) != np.sort(recorded)).any(-1).mean() > 0.05


def experts_taken(model, plan, replay):
    """[N, layers, k] what arrives at the experts, which know nothing of routes."""
    model = copy.deepcopy(model)
    policy = Policy(model, replay=replay)
    seen = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda module, args: seen.append(args[1].detach().numpy()))
    with torch.no_grad():
        list(policy.passes(plan))
    return np.stack(seen, axis=1)

"""The divergence from a teacher is the same in every layout, against whole distributions of one padded row per turn."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.tries import shared_turns
from properties.test_tree_layout import HANDED_OVER, PARTS, WHOLE, WORKLOADS, together
from support.making import distance, gradients, make_model
from turnwise.learn.learner import Learner
from turnwise.learn.losses import ppo_clip
from turnwise.learn.objective import Objective
from turnwise.learn.policy import Policy
from turnwise.learn.stepper import OptimizerSettings
from turnwise.learn.teacher import DIRECTIONS, Teacher
from turnwise.learn.transformers_reference import stock_attention, stock_passes
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack

TOP_K, COEFFICIENT, TEMPERATURE = 5, 0.7, 0.9
LAYOUTS = {
    "packed": lambda turns: pack(turns, WHOLE),
    "packed, cut": lambda turns: pack(turns, PARTS),
    "tree": lambda turns: cut(turns, WHOLE),
    "tree, cut": lambda turns: cut(turns, PARTS),
    "stretches": lambda turns: cut(turns, HANDED_OVER),
    "short stretches": lambda turns: cut(turns, 5),
}


def tables(model, turns):
    """[tokens, vocabulary] logprobs in the places of all actions, turn after turn, and of the actions themselves."""
    found, chosen = [torch.zeros(0)] * len(turns), [torch.zeros(0)] * len(turns)
    with stock_attention(model):
        [(rows, logprobs, _, table)] = stock_passes(model, turns, WHOLE, TEMPERATURE)
    sizes = [len(turns[turn].action) for turn in rows.turns]
    for turn, part, own in zip(rows.turns, table.split(sizes), logprobs.split(sizes), strict=True):
        found[turn], chosen[turn] = part, own
    return torch.cat([part for part in found if len(part)]), torch.cat(chosen)


def apart_by_definition(own, told, direction):
    """[tokens] of whole distributions: the teacher's likeliest tokens, and the sum of all others' chances."""
    likely = told.topk(TOP_K, -1).indices
    chances = []
    for table in (own, told):
        rest = (table.exp() * torch.ones_like(table).scatter(1, likely, 0.0)).sum(-1, keepdim=True)
        chances.append(torch.cat([table.gather(1, likely).exp(), rest], 1))
    one, other = chances if direction == "reverse" else chances[::-1]
    return (one * (one / other).log()).sum(-1)


class Truth:
    """Loss, divergence and gradient of an update, by padded rows; credit and weights differ for every token."""

    def __init__(self, model, beside, turns, direction):
        random = np.random.default_rng(0)
        self.turns = turns
        self.credit = [random.normal(0, 1, len(turn.action)) for turn in turns]
        self.weights = [random.uniform(0.2, 1, len(turn.action)) / 40 for turn in turns]
        self.objective = Objective(ppo_clip, distill=COEFFICIENT, direction=DIRECTIONS[direction])
        model.zero_grad()
        with torch.no_grad():
            told, _ = tables(beside, turns)
        own, logprobs = tables(model, turns)
        apart = apart_by_definition(own, told, direction)
        credit, weight = (torch.from_numpy(np.concatenate(x)) for x in (self.credit, self.weights))
        policy = -credit * (logprobs - logprobs.detach()).exp()
        total = ((policy + COEFFICIENT * apart) * weight).sum()
        with stock_attention(model):
            total.backward()
        self.loss, self.apart = float(total.detach()), float((apart * weight).sum().detach())
        self.gradient = gradients(model)
        model.zero_grad()


def learner_of(model, beside):
    """Of a copy, with a learning rate of nothing and gradients as they come."""
    how = {"dtype": torch.float64, "temperature": TEMPERATURE}
    policy = Policy(copy.deepcopy(model), **how)
    frozen = {"buckets": Teacher(Policy(copy.deepcopy(beside), **how), TOP_K, len(policy.output))}
    return Learner(policy, OptimizerSettings(0.0, clip_norm=1e9), lambda update: 1.0, frozen)


def assert_equal(learner, plans, truth):
    scores = {"buckets": learner.score(plans, len(truth.turns), "buckets")}
    metrics, _ = learner.update(plans, truth.credit, truth.weights, scores, truth.objective)
    assert metrics["loss"] == pytest.approx(truth.loss, rel=1e-12, abs=1e-12)
    assert metrics["distill"] == pytest.approx(truth.apart / sum(map(np.sum, truth.weights)), rel=1e-12)
    found = gradients(learner.policy.model)
    assert distance(together(found), together(truth.gradient)) <= 1e-12


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_layout_equals_whole_distributions_of_padded_rows(workload, direction):
    model, beside = make_model("qwen3", dtype="float64"), make_model("llama", dtype="float64", seed=1)
    turns = [turn for turn in WORKLOADS[workload]() if len(turn.action)]
    truth, learner = Truth(model, beside, turns, direction), learner_of(model, beside)
    assert truth.apart > 1e-2
    for layout in LAYOUTS.values():
        assert_equal(learner, layout(turns), truth)


def test_the_layouts_above_are_different_ones():
    turns = WORKLOADS["growing"]()
    made = {name: layout(turns) for name, layout in LAYOUTS.items()}
    sizes = {name: [sum(plan.num_tokens for plan in plans), len(plans)] for name, plans in made.items()}
    assert sizes["tree"] < sizes["packed"]
    assert min(sizes["packed, cut"][1], sizes["tree, cut"][1]) > 1
    assert all(max(plan.num_stretches for plan in made[name]) > 1 for name in ("stretches", "short stretches"))


@settings(max_examples=25, deadline=None)
@given(turns=shared_turns(min_turns=1, max_turns=6, min_action=1), budget=st.integers(2, 40), data=st.data())
def test_any_trie_under_any_budget_equals_padded_rows(turns, budget, data):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = make_model("qwen3", dtype="float64", head_dim=4, **sizes)
    beside = make_model("llama", dtype="float64", seed=1, **sizes)
    truth = Truth(model, beside, turns, data.draw(st.sampled_from(sorted(DIRECTIONS))))
    learner = learner_of(model, beside)
    for tokens_per_pass in (budget, WHOLE):
        assert_equal(learner, cut(turns, tokens_per_pass), truth)


def test_the_teacher_of_another_place_would_be_noticed():
    """Buckets that move by one token change the gradient."""
    model, beside = make_model("qwen3", dtype="float64"), make_model("llama", dtype="float64", seed=1)
    turns = WORKLOADS["growing"]()
    truth, learner = Truth(model, beside, turns, "reverse"), learner_of(model, beside)
    plans = cut(turns, WHOLE)
    scores = {"buckets": [np.roll(b, 1, axis=0) for b in learner.score(plans, len(turns), "buckets")]}
    learner.update(plans, truth.credit, truth.weights, scores, truth.objective)
    assert distance(together(gradients(learner.policy.model)), together(truth.gradient)) > 1e-2

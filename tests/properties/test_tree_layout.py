"""A tree of shared prefixes is a layout and nothing else, against one padded row per turn by transformers itself."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learn.test_policy import padded
from plan.tries import shared_turns, trained
from support.making import VOCABULARY, distance, gradients, make_learner, make_model, make_turn
from turnwise.learn.learner import Learner
from turnwise.learn.losses import ppo_clip
from turnwise.learn.objective import Objective
from turnwise.learn.policy import DTYPES, Policy
from turnwise.learn.stepper import OptimizerSettings
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack

KINDS = ("qwen3", "qwen2", "llama")
TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
OBJECTIVE = Objective(ppo_clip, entropy=0.1)
WHOLE, PARTS, HANDED_OVER = 100_000, 60, 17
"""Budgets: everything in one pass, cut into plans, and below one path."""


# ---------------------------------------------------------------- workloads


def attempts(history):
    """Three attempts of four turns at one task; `history` makes the next prompt of (task, turns and answers so far)."""
    random = np.random.default_rng(0)
    task = random.integers(3, VOCABULARY, 12)
    turns = []
    for _ in range(3):
        past = []
        for _ in range(4):
            action, answer = (random.integers(3, VOCABULARY, random.integers(3, 8)) for _ in range(2))
            turns.append(make_turn(np.concatenate([task, *history(past)]), action))
            past.append((action, answer))
    return turns


def growing(past):
    return [part for pair in past for part in pair]


def stripped(past):
    """Only the end of an action stays in later prompts: its thinking does not."""
    return [part for action, answer in past for part in (action[-2:], answer)]


def windowed(past):
    return growing(past[-1:])


def single_turns():
    random = np.random.default_rng(1)
    tasks = [random.integers(3, VOCABULARY, 15) for _ in range(2)]
    return [make_turn(tasks[place % 2], random.integers(3, VOCABULARY, 6)) for place in range(8)]


def edges():
    """Everything a layout may get wrong at once."""
    stem = np.random.default_rng(2).integers(3, VOCABULARY, 20)
    return [
        make_turn(stem[:10], stem[10:16]),
        make_turn(stem[:10], stem[10:16]),  # a duplicate
        make_turn(stem[:8], stem[8:13]),  # a prefix of it, and other tokens are the action
        make_turn(stem[:12], [*stem[12:16], 5, 6]),  # begins with the same action tokens
        make_turn(stem[:16], []),
        make_turn([9], [8, 7]),  # another root, with a prompt of one token
        make_turn([9], [8, 7, 6]),
        make_turn([8], [9]),
        make_turn(stem, [1]),
    ]


WORKLOADS = {
    "growing": lambda: attempts(growing),
    "stripped": lambda: attempts(stripped),
    "windowed": lambda: attempts(windowed),
    "single turns": single_turns,
    "edges": edges,
}


class Rows:
    """One padded row per turn through a stock model: the truth of a workload. Credit, weights and old logprobs are
    different for every token of every turn, duplicates too."""

    def __init__(self, model, turns):
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation("sdpa")
        self.turns = turns
        random, sizes = np.random.default_rng(0), [len(turn.action) for turn in turns]
        self.credit = [random.normal(0, 1, size) for size in sizes]
        self.weights = [random.uniform(0.2, 1, size) / sum(sizes) for size in sizes]
        self.splits = np.cumsum(sizes)[:-1]
        logprobs, entropies = padded(self.model, turns, 1.0)
        noise = random.normal(0, 0.6, len(logprobs))  # about a third of the terms are clipped
        self.logprobs = self.per_turn(logprobs.detach().numpy())
        self.old = self.per_turn(logprobs.detach().numpy() + noise)
        as_tensor = lambda values: torch.from_numpy(np.concatenate(values)).to(logprobs.dtype)
        terms, measured = OBJECTIVE(logprobs, entropies, as_tensor(self.old), as_tensor(self.credit), None)
        total = (terms * as_tensor(self.weights)).sum()
        total.backward()
        self.loss = float(total.detach())
        self.clipped = measured["clipped"]
        self.gradients = gradients(self.model)

    def per_turn(self, values):
        return np.split(values, self.splits)


def learner_of(model):
    """Of a copy, with a learning rate of nothing and gradients as they come."""
    dtype = next(model.parameters()).dtype
    return make_learner(copy.deepcopy(model), learning_rate=0.0, clip_norm=1e9, dtype=dtype)


def update(learner, plans, rows):
    """(loss, gradients, logprobs per turn) of one update."""
    metrics, now = learner.update(plans, rows.credit, rows.weights, {"old": rows.old}, OBJECTIVE)
    assert metrics["skipped"] == 0.0
    return metrics["loss"], gradients(learner.policy.model), now


def together(gradient):
    return np.concatenate([gradient[name].ravel() for name in sorted(gradient)])


def assert_equal(found, rows, tolerance):
    loss, gradient, logprobs = found
    assert loss == pytest.approx(rows.loss, rel=tolerance, abs=tolerance)
    assert gradient.keys() == rows.gradients.keys()
    assert distance(together(gradient), together(rows.gradients)) <= tolerance
    for one, other in zip(logprobs, rows.logprobs, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def truths():
    """The rows of every model and workload, made once."""
    made = {}

    def truth(kind, dtype, workload):
        key = kind, dtype, workload
        if key not in made:
            model = make_model(kind, dtype=dtype)
            made[key] = model, Rows(model, WORKLOADS[workload]())
        return made[key]

    return truth


# ---------------------------------------------------------------- against padded rows


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_trees_equal_padded_rows(truths, kind, dtype, workload):
    model, rows = truths(kind, dtype, workload)
    learner = learner_of(model)
    for budget in (WHOLE, PARTS, HANDED_OVER):
        found = update(learner, cut(rows.turns, budget), rows)
        assert_equal(found, rows, TOLERANCES[dtype])
        of_each = {name: distance(values, rows.gradients[name]) for name, values in found[1].items()}
        assert max(of_each.values()) <= TOLERANCES[dtype]


def test_the_budgets_above_do_what_they_are_for():
    for workload, make in WORKLOADS.items():
        turns = make()
        whole, parts, handed = (cut(turns, budget) for budget in (WHOLE, PARTS, HANDED_OVER))
        [packed] = pack(turns, WHOLE)
        assert len(whole) == 1
        assert whole[0].num_tokens < packed.num_tokens
        assert len(parts) > 1 or workload == "edges"
        assert all(plan.num_stretches == 1 for plan in parts)
        assert max(plan.num_stretches for plan in handed) > 1
        assert any(len(stretch.picked) == 0 for plan in cut(turns, 3) for stretch in plan.stretches)


def test_the_rows_above_have_something_to_tell_apart(truths):
    """Clipped and unclipped tokens at the same nodes, with different credit; and credit that moves is noticed."""
    model, rows = truths("qwen3", "float64", "edges")
    one, other = np.split(rows.clipped.numpy(), rows.splits)[:2]
    assert 0.2 < float(rows.clipped.mean()) < 0.5
    assert (one != other).any()
    assert not np.allclose(rows.credit[0], rows.credit[1])
    rows = copy.copy(rows)
    rows.credit = [rows.credit[1], rows.credit[0], *rows.credit[2:]]
    with pytest.raises(AssertionError):
        assert_equal(update(learner_of(model), cut(rows.turns, WHOLE), rows), rows, 1e-6)


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 13, 21, 22, 23, 40])
def test_any_budget_gives_the_same_gradient(truths, budget):
    model, rows = truths("qwen3", "float64", "edges")
    assert_equal(update(learner_of(model), cut(rows.turns, budget), rows), rows, 1e-12)


@pytest.fixture(scope="module")
def small():
    """A model of few parameters, for many examples."""
    return make_model(
        "qwen3",
        dtype="float64",
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )


@settings(max_examples=40, deadline=None)
@given(turns=shared_turns(min_turns=1, max_turns=7, min_action=1), budget=st.integers(2, 40))
def test_any_trie_under_any_budget_equals_padded_rows(small, turns, budget):
    rows, learner = Rows(small, turns), learner_of(small)
    assert trained(turns)
    for tokens_per_pass in (budget, WHOLE):
        assert_equal(update(learner, cut(turns, tokens_per_pass), rows), rows, 1e-12)


def test_bfloat16_is_no_further_from_the_truth_than_packed_turns_are(truths):
    """Without old scores, so that no rounding decides which tokens are clipped; over all workloads, as one rounding
    more or less decides in any."""
    mine, theirs = [], []
    for workload in WORKLOADS:
        model, rows = truths("qwen3", "float32", workload)

        def gradient(dtype, plans, model=model, rows=rows):
            learner = make_learner(copy.deepcopy(model), learning_rate=0.0, clip_norm=1e9, dtype=dtype)
            learner.update(plans, rows.credit, rows.weights, {}, OBJECTIVE)
            assert {parameter.grad.dtype for parameter in learner.policy.model.parameters()} == {torch.float32}
            return together(gradients(learner.policy.model))

        truth = gradient(torch.float32, pack(rows.turns, WHOLE))
        theirs.append(distance(gradient(torch.bfloat16, pack(rows.turns, WHOLE)), truth))
        for budget in (WHOLE, PARTS, HANDED_OVER):
            mine.append(distance(gradient(torch.bfloat16, cut(rows.turns, budget)), truth))
    assert 1e-4 < np.mean(theirs) < 0.1
    assert np.mean(mine) <= 1.2 * np.mean(theirs)


# ---------------------------------------------------------------- checkpointing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [WHOLE, PARTS, HANDED_OVER])
def test_gradient_checkpointing_changes_no_bit(truths, kind, budget):
    model, rows = truths(kind, "float32", "stripped")
    plans = cut(rows.turns, budget)
    plain, checkpointed = learner_of(model), learner_of(model)
    checkpointed.policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls = []
    layer = checkpointed.policy.model.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    one, other = (update(learner, plans, rows) for learner in (plain, checkpointed))
    passes, relayed = sum(len(p.stretches) for p in plans), sum(len(p.stretches) - 1 for p in plans)
    assert len(calls) == 2 * passes + relayed, "every pass is computed again"
    assert one[0] == other[0]
    assert all(np.array_equal(one[1][name], other[1][name]) for name in one[1])


# ---------------------------------------------------------------- scores


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("budget", [WHOLE, PARTS, HANDED_OVER, 6])
def test_scores_are_bit_for_bit_what_the_update_computes(truths, dtype, budget):
    """Also where the update goes through the stretches the other way round: the first ratio of a step is 1."""
    model, rows = truths("qwen3", "float64" if dtype == "float64" else "float32", "stripped")
    learner = make_learner(copy.deepcopy(model), learning_rate=0.0, dtype=DTYPES[dtype])
    plans = cut(rows.turns, budget)
    scores = learner.score(plans, len(rows.turns))
    metrics, now = learner.update(plans, rows.credit, rows.weights, {"old": scores}, OBJECTIVE)
    assert all(np.array_equal(one, other) for one, other in zip(scores, now, strict=True))
    assert metrics["ratio"] == pytest.approx(1.0, rel=1e-6)
    assert metrics["clipped"] == 0.0


@pytest.mark.parametrize("workload", WORKLOADS)
def test_frozen_models_score_with_the_same_plans(truths, workload):
    model, rows = truths("llama", "float64", workload)
    beside = make_model("llama", dtype="float64", seed=1)
    wanted = Rows(beside, rows.turns)
    frozen = {"reference": Policy(beside.requires_grad_(False), dtype=torch.float64)}
    learner = Learner(learner_of(model).policy, OptimizerSettings(0.0, clip_norm=1e9), lambda update: 1.0, frozen)
    for budget in (WHOLE, PARTS, HANDED_OVER):
        plans = cut(rows.turns, budget)
        for name, truth in (("old", rows), ("reference", wanted)):
            for one, other in zip(learner.score(plans, len(rows.turns), name), truth.logprobs, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    assert all(parameter.grad is None for parameter in learner.policy.model.parameters())


def test_a_reference_pulls_the_same_in_every_layout(truths):
    model, rows = truths("qwen3", "float64", "growing")
    reference = [values - 0.5 for values in rows.logprobs]
    found = []
    for plans in (pack(rows.turns, WHOLE), cut(rows.turns, WHOLE), cut(rows.turns, HANDED_OVER)):
        learner = learner_of(model)
        scores = {"old": rows.old, "reference": reference}
        metrics, _ = learner.update(plans, rows.credit, rows.weights, scores, Objective(ppo_clip, kl=0.3))
        found.append((metrics, gradients(learner.policy.model)))
    assert found[0][0]["kl"] > 0.01
    for metrics, gradient in found[1:]:
        assert metrics == pytest.approx(found[0][0], rel=1e-12)
        assert max(distance(gradient[name], found[0][1][name]) for name in gradient) < 1e-12


# ---------------------------------------------------------------- nothing to do


def test_plans_without_turns_change_nothing(truths):
    """As ranks with less to do get them."""
    from turnwise.plan.tree import tree

    model, rows = truths("qwen3", "float64", "edges")
    plans = [tree([]), *cut(rows.turns, PARTS), tree([])]
    learner = learner_of(model)
    assert_equal(update(learner, plans, rows), rows, 1e-12)
    scores = learner.score(plans, len(rows.turns))
    assert [len(values) for values in scores] == [len(turn.action) for turn in rows.turns]
    assert learner.score([tree([])], 2)[1].shape == (0,)

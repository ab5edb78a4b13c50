"""Two ranks that hold a model together compute what one process computes."""

import copy

import numpy as np
import pytest
import torch

from cluster.pool import Made, learner
from properties.test_tree_layout import HANDED_OVER, OBJECTIVE, PARTS, WHOLE, WORKLOADS
from support.acting import byte_tokenizer
from support.making import distance, gradients, make_model, parameters
from turnwise.learn.lora import LoraSettings
from turnwise.learn.stepper import OptimizerSettings
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.schedule.stopping import LearnerLost, RunStopped

TIED = {"qwen3": True, "llama": False}


class Batch:
    """The turns of a workload with credit, weights and old logprobs that differ for every token."""

    def __init__(self, turns):
        self.turns = turns
        random, sizes = np.random.default_rng(0), [len(turn.action) for turn in turns]
        self.credit = [random.normal(0, 1, size) for size in sizes]
        self.weights = [random.uniform(0.2, 1, size) / sum(sizes) for size in sizes]
        self.old = [turn.logprobs + random.normal(0, 0.3, len(turn.logprobs)) for turn in turns]

    def update(self, learner, plans):
        return learner.update(plans, self.credit, self.weights, {"old": self.old}, OBJECTIVE)


def one_and_two(pool, kind="qwen3", **how):
    """The same learner in this process and over two ranks."""
    model = make_model(kind, tie_word_embeddings=TIED[kind])
    return learner(copy.deepcopy(model), **copy.deepcopy(how)), pool.learner(Made(model, **how))


def together(values):
    return np.concatenate([np.asarray(values[name], np.float64).ravel() for name in sorted(values)])


def assert_same(found, wanted, tolerance=1e-5):
    assert found.keys() == wanted.keys()
    assert distance(together(found), together(wanted)) <= tolerance
    for name in wanted:
        assert distance(found[name], wanted[name]) <= tolerance, name


def assert_same_update(one, two, batch, plans):
    (metrics, logprobs), (wanted_metrics, wanted) = batch.update(two, plans), batch.update(one, plans)
    assert metrics == pytest.approx(wanted_metrics, rel=1e-5, abs=1e-6)
    for mine, theirs in zip(logprobs, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    assert_same(two.gradients(), gradients(one.policy.model))


QUICK = ("edges", "qwen3")


@pytest.mark.parametrize(
    ("workload", "kind"),
    [
        pytest.param(workload, kind, marks=() if (workload, kind) == QUICK else pytest.mark.slow)
        for workload in WORKLOADS
        for kind in TIED
    ],
)
def test_two_ranks_have_the_gradient_of_one(pool, kind, workload):
    one, two = one_and_two(pool, kind)
    assert ("lm_head.weight" in dict(one.policy.model.named_parameters())) != TIED[kind]
    batch = Batch(WORKLOADS[workload]())
    for layout, budget in ((pack, WHOLE), (pack, PARTS), (cut, WHOLE), (cut, PARTS), (cut, HANDED_OVER)):
        assert_same_update(one, two, batch, layout(batch.turns, budget))
    two.close()


def test_a_rank_without_any_turn_takes_part(pool):
    """One turn and two ranks; and no plan at all."""
    one, two = one_and_two(pool)
    batch = Batch(WORKLOADS["growing"]()[:1])
    assert_same_update(one, two, batch, pack(batch.turns, WHOLE))
    metrics, logprobs = two.update([], [], [], {}, OBJECTIVE)
    assert metrics["idle"] == 1.0
    assert logprobs == []
    two.close()


@pytest.mark.slow
def test_recomputed_layers_have_the_same_gradient(pool):
    one, two = one_and_two(pool, checkpointing=True)
    batch = Batch(WORKLOADS["stripped"]())
    for budget in (WHOLE, HANDED_OVER):
        assert_same_update(one, two, batch, cut(batch.turns, budget))
    two.close()


@pytest.mark.slow
def test_bfloat16_is_as_near_as_its_rounding(pool):
    one, two = one_and_two(pool, dtype=torch.bfloat16)
    truth = learner(copy.deepcopy(one.policy.model))
    batch = Batch(WORKLOADS["growing"]())
    plans = cut(batch.turns, PARTS)
    for each in (one, two, truth):
        batch.update(each, plans)
    wanted = together(gradients(truth.policy.model))
    assert 1e-3 < distance(together(two.gradients()), wanted) < 5e-2
    assert distance(together(gradients(one.policy.model)), wanted) < 5e-2
    two.close()


@pytest.mark.slow
def test_scores_of_all_models_are_gathered(pool):
    beside = {"reference": make_model("llama", seed=1)}
    one, two = one_and_two(pool, "llama", frozen=beside, critic=make_model("llama", seed=2))
    turns = WORKLOADS["edges"]()
    for name in ("old", "reference", "values"):
        for budget in (PARTS, HANDED_OVER):
            plans = cut(turns, budget)
            found, wanted = (learner.score(plans, len(turns), name) for learner in (two, one))
            assert [len(values) for values in found] == [len(turn.action) for turn in turns]
            for mine, theirs in zip(found, wanted, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    two.close()


MOVING = OptimizerSettings(1e-2, weight_decay=0.01, clip_norm=0.05)


def updates(learner, batch, *, count=3, start=0):
    """Metrics of some updates of policy and critic, each with another layout."""
    found = []
    for place in range(start, start + count):
        plans = cut(batch.turns, (WHOLE, PARTS, HANDED_OVER)[place % 3])
        metrics, _ = batch.update(learner, plans)
        values = learner.score(plans, len(batch.turns), "values")
        found.append(metrics | learner.update_critic(plans, batch.credit, batch.weights, values))
    return found


@pytest.mark.slow
def test_updates_are_those_of_one_process(pool):
    """Clipped by the norm over all ranks, with momentum, of the policy and of the critic."""
    one, two = one_and_two(pool, critic=make_model(seed=2), settings=MOVING)
    batch = Batch(WORKLOADS["growing"]())
    start, found, wanted = parameters(one.policy.model), updates(two, batch), updates(one, batch)
    assert wanted[0]["gradient_norm"] > 2 * MOVING.clip_norm
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    published = two.publish()
    assert published.keys() == one.publish().keys()
    assert_same(published, one.publish(), 1e-4)
    moved = parameters(one.policy.model)
    assert all(distance(moved[name], start[name]) > 1e-3 for name in start)
    assert two.seconds["forward_backward"] > 0
    two.close()


def test_zero_weights_move_nothing_and_all_ranks_skip_a_loss_that_is_not_finite(pool):
    _, two = one_and_two(pool, settings=MOVING)
    batch = Batch(WORKLOADS["single turns"]())
    plans = pack(batch.turns, PARTS)
    batch.update(two, plans)
    before = {name: tensor.clone() for name, tensor in two.publish().items()}
    zero = [weight * 0.0 for weight in batch.weights]
    metrics, _ = two.update(plans, batch.credit, zero, {"old": batch.old}, OBJECTIVE)
    assert (metrics["idle"], metrics["skipped"]) == (1.0, 0.0)
    broken = [values * (np.nan if place == 0 else 1.0) for place, values in enumerate(batch.credit)]
    metrics, _ = two.update(plans, broken, batch.weights, {"old": batch.old}, OBJECTIVE)
    assert (metrics["idle"], metrics["skipped"], two.num_skipped_in_a_row) == (0.0, 1.0, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in two.publish().items())
    two.close()


@pytest.mark.slow
def test_adapters_over_two_ranks_are_those_of_one_process(pool, tmp_path):
    one, two = one_and_two(pool, lora=LoraSettings(rank=4, alpha=8.0), settings=MOVING)
    batch = Batch(WORKLOADS["stripped"]())
    plans = cut(batch.turns, PARTS)
    for _ in range(2):
        assert_same_update(one, two, batch, plans)
    assert_same(two.publish(), dict(one.publish()), 1e-4)
    for name in ("old", "reference"):
        for mine, theirs in zip(*(lrn.score(plans, len(batch.turns), name) for lrn in (two, one)), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    two.save(tmp_path, byte_tokenizer())
    again = learner(make_model(), lora=LoraSettings(rank=4, alpha=8.0), settings=MOVING)
    again.restore(tmp_path)
    assert_same(dict(again.publish()), two.publish())
    two.close()


def test_a_lost_learner_is_one_line_and_its_traceback_is_in_the_log(caplog):
    lost = LearnerLost.by(1, "Traceback (most recent call last):\n  File ...\nValueError: no room\n")
    assert isinstance(lost, RunStopped)
    assert str(lost) == "rank 1 of the learner failed: ValueError: no room"
    assert "most recent call last" in caplog.text
    assert str(LearnerLost.by(0, "its process has ended")) == "rank 0 of the learner failed: its process has ended"

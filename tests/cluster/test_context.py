"""Ranks that share the nodes of every pass compute what one process computes."""

import copy
import runpy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cluster.pool import learner
from cluster.test_meshes import largest
from cluster.test_ranked import Batch
from properties.test_tree_layout import HANDED_OVER, PARTS, WHOLE, WORKLOADS
from support.exact import Wide
from support.making import VOCABULARY, distance, gradients, make_model, make_turn, of_usual_size
from support.paths import DOCS
from turnwise.learn.losses import ppo_clip
from turnwise.learn.objective import Objective
from turnwise.learn.policy import DTYPES, Policy
from turnwise.learn.teacher import Teacher
from turnwise.learn.ulysses import Ulysses
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack

TOLERANCES = {"float64": 1e-12, "float32": 1e-6}
"""From what one process has: of the largest difference of logprobs, and of the gradient, relative to its norm."""
LAYOUTS = ((pack, WHOLE), (cut, WHOLE), (cut, PARTS), (cut, HANDED_OVER))
"""Rows of their own, a tree, a tree cut into plans, and paths that are handed from pass to pass."""


# ---------------------------------------------------------------- in a process of the pool


def shared(policy):
    policy.context = Ulysses(dist.group.WORLD)
    return policy


def added_up(sums):
    numbers = torch.tensor([sums[name] for name in sorted(sums)], dtype=torch.float64)
    dist.all_reduce(numbers)
    return dict(zip(sorted(sums), numbers.tolist(), strict=True))


def update(model, how, batch, all_plans, in_groups=True):
    """(metrics, logprobs, gradient) of an update for each of several lists of plans; by all processes together, which
    add up what each of them has of the gradient."""
    ways = (shared, added_up) if in_groups else (lambda policy: policy, None)
    own = learner(model, *ways, **how)
    found = []
    with Wide() if model.dtype == torch.float64 else nullcontext():
        for plans in all_plans:
            metrics, logprobs = batch.update(own, plans)
            if in_groups:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    dist.all_reduce(parameter.grad)
            found.append((metrics, logprobs, gradients(model)))
    return found


def score(model, how, turns, plans, names, in_groups=True):
    own = learner(model, *((shared, added_up) if in_groups else ()), **how)
    scores = [own.score(plans, len(turns), name) for name in names]
    assert [len(values) for values in scores[0]] == [len(turn.action) for turn in turns]
    return [np.concatenate([values for values in of_model if len(values)]) for of_model in scores]


def taught(model, teaching, critic, batch, plans, in_groups=True):
    """Metrics of an update towards a teacher and of one of the critic."""
    prepare, *reduce = (shared, added_up) if in_groups else (lambda policy: policy,)
    own = learner(model, prepare, *reduce, critic=critic)
    own.models["buckets"] = Teacher(prepare(Policy(teaching)), 4, VOCABULARY)
    buckets, values = (own.score(plans, len(batch.turns), name) for name in ("buckets", "values"))
    objective = Objective(ppo_clip, distill=1.0)
    metrics, _ = own.update(plans, batch.credit, batch.weights, {"old": batch.old, "buckets": buckets}, objective)
    return metrics | own.update_critic(plans, batch.credit, batch.weights, values)


# ---------------------------------------------------------------- against one process


def assert_same(pool, model, turns, layouts=LAYOUTS, dtype="float32", **how):
    how = {"dtype": DTYPES[dtype], **how}
    batch = Batch(turns)
    all_plans = [layout(turns, budget) for layout, budget in layouts]
    given = [[value] * pool.size for value in (model, how, batch, all_plans)]
    everyone = pool.run(update, *given)
    wanted = update(copy.deepcopy(model), how, batch, all_plans, in_groups=False)
    for found in everyone:
        for mine, one in zip(found, wanted, strict=True):
            assert mine[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-5, abs=1e-6)
            (logprobs, gradient), (wanted_logprobs, wanted_gradient) = compared(mine, one), compared(one, one)
            off = largest(logprobs, wanted_logprobs), distance(gradient, wanted_gradient)
            print(f"{model.config.model_type} cp{pool.size} {dtype}: {off[0]:.1e} {off[1]:.1e}")
            assert max(off) <= TOLERANCES[dtype]


def compared(result, one):
    """(logprobs, gradient) of an update, of the weights that one process has a gradient of."""
    _, logprobs, gradient = result
    return np.concatenate(logprobs), np.concatenate([np.ravel(gradient[name]) for name in sorted(one[2])])


def exact(model):
    """The same weights in float64."""
    wider = copy.deepcopy(model).double()
    if wider._can_set_experts_implementation():
        wider.set_experts_implementation("eager")
    return wider


def small(name, dtype="float32", **changes):
    """A small model of any architecture."""
    model = runpy.run_path(str(DOCS / "make_models.py"))["small_model"](name, **changes)
    return exact(model) if dtype == "float64" else of_usual_size(model)


def test_two_ranks_have_the_gradient_of_one(pool):
    """In all layouts, of a dense model with one key for all heads: both ranks need it."""
    model = make_model(num_key_value_heads=1).double()
    assert_same(pool, model, WORKLOADS["edges"](), dtype="float64")


def test_a_plan_of_fewer_nodes_than_ranks(pool):
    assert_same(pool, of_usual_size(make_model()), [make_turn([3], [4])], [(cut, WHOLE), (cut, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_four_ranks_have_the_gradient_of_one(four, workload, dtype):
    """With fewer keys than ranks, and with one per rank."""
    for keys in (2, 4):
        model = of_usual_size(make_model("llama", num_key_value_heads=keys)).to(DTYPES[dtype])
        assert_same(four, model, WORKLOADS[workload](), dtype=dtype)


SHAPES = {
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {"sliding_window": 5},  # sinks, windows and experts
    "deepseek_v3": {},  # values narrower than keys
    "gemma3_text": {"sliding_window": 8},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 3},  # no part of them is like another
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", SHAPES)
def test_models_of_other_shapes(four, pool, name, dtype):
    for ranks in (pool, four):
        assert_same(ranks, small(name, dtype, **SHAPES[name]), WORKLOADS["edges"](), dtype=dtype)


@pytest.mark.slow
def test_recomputed_layers_exchange_again(pool):
    assert_same(pool, of_usual_size(make_model()), WORKLOADS["stripped"](), checkpointing=True)


@pytest.mark.slow
def test_scores_of_all_models_are_whole_on_every_rank(four):
    turns = WORKLOADS["edges"]()
    how = {"frozen": {"reference": make_model(seed=1)}, "critic": make_model(seed=2)}
    names = ["old", "reference", "values", "inspection"]
    for budget in (WHOLE, HANDED_OVER):
        given = (make_model(), how, turns, cut(turns, budget), names)
        wanted = score(*copy.deepcopy(given), in_groups=False)
        for found in four.run(score, *([value] * 4 for value in given)):
            for mine, theirs in zip(found, wanted, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_teachers_and_critics_share_passes_too(pool):
    batch = Batch(WORKLOADS["stripped"]())
    for budget in (WHOLE, HANDED_OVER):
        given = (make_model(), make_model(seed=1), make_model(seed=2), batch, cut(batch.turns, budget))
        wanted = taught(*copy.deepcopy(given), in_groups=False)
        for found in pool.run(taught, *([value] * pool.size for value in given)):
            names = found.keys() - {
                "gradient_norm",
                "critic/gradient_norm",
            }  # here each rank has a part of the gradient
            assert {name: found[name] for name in names} == pytest.approx(
                {name: wanted[name] for name in names}, rel=1e-5, abs=1e-6
            )


def refused(model):
    try:
        learner(model, shared, added_up).score(cut(WORKLOADS["edges"](), WHOLE), 9)
    except ValueError as error:
        return str(error)


def test_more_ranks_than_heads_are_refused(pool):
    model = make_model(num_attention_heads=1, num_key_value_heads=1)
    assert {text[:16] for text in pool.run(refused, [model] * pool.size)} == {"cluster.cp = 2 i"}

import math

import numpy as np
import pytest
import torch

from support.making import VOCABULARY, distance, gradients, make_learner, make_model, make_turns, parameters
from turnwise.learn import head, teacher
from turnwise.learn.head import bucket_logprobs, likeliest
from turnwise.learn.learner import Learner
from turnwise.learn.losses import ppo_clip
from turnwise.learn.objective import Objective
from turnwise.learn.policy import Policy
from turnwise.learn.stepper import OptimizerSettings
from turnwise.learn.teacher import DIRECTIONS, OTHERS, Teacher, forward, make_buckets, reverse
from turnwise.learn.transformers_reference import stock_attention, stock_passes
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.plan import Plan

TOKENS, WIDTH, SIZE = 9, 5, 13
TURNS = [
    *make_turns([(5, 3), (2, 1), (4, 4)], seed=1),
    *make_turns([(7, 2), (3, 5)], growing=False, seed=2),
    *make_turns([(3, 0), (1, 2)], seed=3),
]


# ---------------------------------------------------------------- directions


def pair(seed=0):
    """(hidden, weight) of a policy and of its teacher, who differ."""
    random = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)
    return (make(TOKENS, WIDTH).requires_grad_(), make(SIZE, WIDTH).requires_grad_()), (
        make(TOKENS, WIDTH),
        make(SIZE, WIDTH),
    )


def by_head(direction, policy, teaching, top_k):
    """The divergence as it is trained: through the head, in buckets."""
    hidden, weight = teaching
    tokens, told = likeliest(hidden, weight, 0.8, top_k, SIZE)
    targets = torch.zeros(TOKENS, dtype=torch.long)
    hidden, weight = policy
    return DIRECTIONS[direction](bucket_logprobs(hidden, weight, targets, 0.8, tokens)[2], told)


def by_definition(direction, policy, teaching, top_k):
    """The divergence of whole distributions whose unlikelier tokens were added up."""
    own, told = ((hidden @ weight.T / 0.8).softmax(-1) for hidden, weight in (policy, teaching))
    order = told.argsort(-1, descending=True)
    own, told = own.gather(1, order), told.gather(1, order)
    if top_k < SIZE:
        own, told = (torch.cat([x[:, :top_k], x[:, top_k:].sum(-1, keepdim=True)], 1) for x in (own, told))
    first, second = (own, told) if direction == "reverse" else (told, own)
    return (first * (first.log() - second.log())).sum(-1)


@pytest.mark.parametrize("chunk_elements", [1, 1 << 22])
@pytest.mark.parametrize("top_k", [1, 2, 6, SIZE - 1, SIZE])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_divergence_and_gradient_are_those_of_the_definition(monkeypatch, direction, top_k, chunk_elements):
    """With every token in a bucket of its own that is the whole KL divergence."""
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", chunk_elements)
    policy, teaching = pair()
    weights = torch.linspace(0.1, 1.0, TOKENS, dtype=torch.float64)
    found, wanted = (f(direction, policy, teaching, top_k) for f in (by_head, by_definition))
    assert distance(found.detach(), wanted.detach()) < 1e-12
    one, other = (torch.autograd.grad((x * weights).sum(), policy) for x in (found, wanted))
    assert max(distance(mine, yours) for mine, yours in zip(one, other, strict=True)) < 1e-12


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients_pass_the_finite_difference_check(direction):
    policy, teaching = pair()
    assert torch.autograd.gradcheck(lambda h, w: by_head(direction, (h, w), teaching, 3), policy, atol=1e-8)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_more_buckets_never_tell_less(direction):
    """From zero up to the whole divergence."""
    policy, teaching = pair(seed=2)
    found = torch.stack([by_head(direction, policy, teaching, top_k) for top_k in range(1, SIZE + 1)]).detach()
    assert (found > 0).all()
    assert (found.diff(dim=0) >= -1e-14).all()
    assert (found[-1] > found[0] + 1e-3).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("top_k", [3, SIZE])
def test_who_agrees_with_the_teacher_is_not_moved(direction, top_k, dtype):
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in pair()[0])
    apart = by_head(direction, (hidden, weight), (hidden.detach(), weight.detach()), top_k)
    assert apart.tolist() == [0.0] * TOKENS
    scale = 1e-14 if dtype == torch.float64 else 1e-5
    assert max(x.abs().max() for x in torch.autograd.grad(apart.sum(), (hidden, weight))) < scale


def test_the_directions_are_what_they_are_called():
    own, told = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert float(reverse(own, told)) == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert float(forward(own, told)) == pytest.approx(0.5 * math.log(1 / 1.8) + 0.5 * math.log(5.0))


def test_teachers_that_are_sure_give_finite_terms_and_gradients():
    """In float32, where the rest of either is beyond what a chance can be: e^-300."""
    logits = torch.tensor([[0.0, -300.0, -301.0]])
    states = torch.ones(1, 1)
    for own, told in ((logits, logits.roll(1, 1)), (logits, torch.zeros(1, 3)), (torch.zeros(1, 3), logits)):
        for direction in DIRECTIONS.values():
            weight = own.T.clone().requires_grad_()
            tokens, buckets = likeliest(states, told.T, 1.0, 1, 3)
            apart = direction(bucket_logprobs(states, weight, torch.tensor([0]), 1.0, tokens)[2], buckets)
            apart.sum().backward()
            assert float(apart.detach()) > 0.5
            assert weight.grad.isfinite().all()
            assert weight.grad.abs().max() > 0.05 or direction is reverse


# ---------------------------------------------------------------- asking


def taught(policy, teaching, top_k=4, **settings):
    """A learner in float64 with a teacher beside it."""
    frozen = {"buckets": Teacher(Policy(teaching, dtype=torch.float64), top_k, len(policy.output))}
    optimizer = OptimizerSettings(**{"learning_rate": 0.0, "clip_norm": 1e9, **settings})
    return Learner(policy, optimizer, lambda update: 1.0, frozen)


def models(**changes):
    """(a policy, a teacher's model), in float64."""
    policy = Policy(make_model(dtype="float64"), dtype=torch.float64)
    return policy, make_model("llama", dtype="float64", seed=1, **changes)


def table_of(model, turns):
    """[V] logprobs in the place of every action token, one array per turn, from padded rows."""
    found = [None] * len(turns)
    with torch.no_grad(), stock_attention(model):
        for rows, *_, table in stock_passes(model, turns, 10_000, 1.0):
            parts = table.split([len(turns[turn].action) for turn in rows.turns])
            for turn, part in zip(rows.turns, parts, strict=True):
                found[turn] = part.numpy()
    return found


@pytest.mark.parametrize("budget", [6, 19, 1000])
def test_a_teacher_is_asked_for_its_likeliest_tokens_turn_by_turn(budget):
    policy, teaching = models()
    turns = [turn for turn in TURNS if len(turn.action)]
    scores = taught(policy, teaching).score(cut(turns, budget), len(turns), "buckets")
    for buckets, table in zip(scores, table_of(teaching, turns), strict=True):
        assert buckets.shape == (len(table), 5)
        assert buckets["token"][:, :-1].tolist() == np.argsort(-table)[:, :4].tolist()
        assert (buckets["token"][:, -1] == OTHERS).all()
        np.testing.assert_allclose(buckets["logprob"][:, :-1], -np.sort(-table)[:, :4], atol=1e-12)
        np.testing.assert_allclose(np.exp(buckets["logprob"]).sum(-1), 1.0, atol=1e-12)


def test_turns_without_actions_have_no_buckets():
    policy, teaching = models()
    scores = taught(policy, teaching).score(pack(TURNS, 1000), len(TURNS), "buckets")
    assert [len(values) for values in scores] == [len(turn.action) for turn in TURNS]


@pytest.mark.parametrize("rows", [VOCABULARY - 8, VOCABULARY + 8])
def test_padding_of_the_vocabulary_is_among_the_others(rows):
    """Models of one family often have output layers of different sizes for the same tokens."""
    policy, teaching = models(vocab_size=rows)
    short = [turn for turn in TURNS if max(*turn.prompt, *turn.action, 0) < VOCABULARY - 8]
    most = min(rows, VOCABULARY) - 1
    learner = taught(policy, teaching, top_k=most)
    scores = learner.score(pack(short, 1000), len(short), "buckets")
    assert all(values["token"].max() <= most for values in scores if len(values))
    weights = [np.ones(len(turn.action)) for turn in short]
    for direction in DIRECTIONS.values():
        objective = Objective(ppo_clip, distill=1.0, direction=direction)
        metrics, _ = learner.update(
            pack(short, 1000), [0 * w for w in weights], weights, {"buckets": scores}, objective
        )
        assert metrics["distill"] > 0
        assert metrics["skipped"] == 0.0


@pytest.mark.parametrize(
    ("top_k", "most", "rows"), [(VOCABULARY + 1, VOCABULARY, VOCABULARY), (0, 64, 64), (64, 63, 70)]
)
def test_more_tokens_than_there_are_cannot_be_asked_for(top_k, most, rows):
    policy, teaching = models(vocab_size=rows)
    says = rf"^distill\.top_k = {top_k} must be from 1 to {most}, the tokens that both models know$"
    with pytest.raises(ValueError, match=says):
        taught(policy, teaching, top_k=top_k)


def test_buckets_are_one_array():
    found = make_buckets(np.array([[3, 1]]), np.log([[0.5, 0.25, 0.25]]))
    assert found["token"].tolist() == [[3, 1, OTHERS]]
    assert found["logprob"].tolist() == np.log([[0.5, 0.25, 0.25]]).tolist()


# ---------------------------------------------------------------- learning


def zeros_and_shares(turns):
    """(credit, weights) of a step that has nothing to learn but from the teacher."""
    total = sum(len(turn.action) for turn in turns)
    return [np.zeros(len(turn.action)) for turn in turns], [np.full(len(turn.action), 1 / total) for turn in turns]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_updates_draw_the_policy_to_the_teacher(direction):
    policy, teaching = models()
    learner = taught(policy, teaching, learning_rate=3e-3)
    plans, (credit, weights) = cut(TURNS, 1000), zeros_and_shares(TURNS)
    scores = {"buckets": learner.score(plans, len(TURNS), "buckets")}
    objective = Objective(ppo_clip, distill=1.0, direction=DIRECTIONS[direction])
    before = parameters(teaching)
    apart = [learner.update(plans, credit, weights, scores, objective)[0]["distill"] for _ in range(30)]
    assert apart[-1] < apart[0] / 4
    assert all(np.array_equal(values, before[name]) for name, values in parameters(teaching).items())


def test_the_term_is_added_under_the_same_weights():
    policy, teaching = models()
    learner = taught(policy, teaching)
    plans, (_, weights) = cut(TURNS, 1000), zeros_and_shares(TURNS)
    credit = [np.sin(1.0 + np.arange(len(turn.action))) for turn in TURNS]
    scores = {"buckets": learner.score(plans, len(TURNS), "buckets")}
    found = {}
    for name, coefficient, scored in (("off", 0.0, {}), ("one", 1.0, scores), ("three", 3.0, scores)):
        metrics, _ = learner.update(plans, credit, weights, scored, Objective(ppo_clip, distill=coefficient))
        found[name] = metrics, gradients(policy.model)
    assert "distill" not in found["off"][0]
    loss = {name: metrics["loss"] for name, (metrics, _) in found.items()}
    apart = found["one"][0]["distill"]
    assert loss["one"] == pytest.approx(loss["off"] + apart, rel=1e-12)
    assert loss["three"] == pytest.approx(loss["off"] + 3 * apart, rel=1e-12)
    for name, off in found["off"][1].items():
        one, three = found["one"][1][name], found["three"][1][name]
        assert distance(three - off, 3 * (one - off)) < 1e-9


def test_a_shared_node_is_compared_once(monkeypatch):
    """However many turns have it."""
    policy, teaching = models()
    learner = taught(policy, teaching)
    turns = [*TURNS, *TURNS]
    [plan], (credit, weights) = cut(turns, 1000), zeros_and_shares(turns)
    rows = []
    original = bucket_logprobs
    counted = lambda states, *rest: rows.append(len(states)) or original(states, *rest)
    monkeypatch.setattr(teacher, "bucket_logprobs", counted)
    scores = {"buckets": learner.score([plan], len(turns), "buckets")}
    learner.update([plan], credit, weights, scores, Objective(ppo_clip, distill=1.0))
    assert rows == [len(np.unique(plan.action_nodes))]
    assert 2 * rows[0] <= len(plan.action_nodes)


def test_no_more_logits_than_a_chunk_are_ever_there(monkeypatch):
    policy, teaching = models()
    learner = taught(policy, teaching)
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 2 * VOCABULARY)
    sizes = []
    original = head.scaled_logits
    watched = lambda hidden, *rest: sizes.append(len(hidden)) or original(hidden, *rest)
    monkeypatch.setattr(head, "scaled_logits", watched)
    plans, (credit, weights) = cut(TURNS, 1000), zeros_and_shares(TURNS)
    scores = {"buckets": learner.score(plans, len(TURNS), "buckets")}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        learner.update(plans, credit, weights, scores, Objective(ppo_clip, distill=1.0))
    assert max(sizes) == 2
    assert len(sizes) == 3 * math.ceil(len(np.unique(plans[0].action_nodes)) / 2), "asked, forward, backward"
    largest = max(parameter.numel() for parameter in policy.model.parameters())
    assert max(kept) <= max(largest, plans[0].num_tokens * 48)


def test_without_a_teacher_no_bucket_is_computed(monkeypatch):
    def never(*_):
        raise AssertionError

    for name in ("bucketed", "spread", "likeliest"):
        monkeypatch.setattr(head, name, never)
    learner = make_learner(make_model())
    credit, weights = zeros_and_shares(TURNS)
    metrics, _ = learner.update(cut(TURNS, 1000), credit, weights, {}, Objective(ppo_clip))
    assert "distill" not in metrics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_learn_about_the_same(dtype):
    policy, teaching = models()
    exact = taught(policy, teaching)
    plans, (credit, weights) = cut(TURNS, 1000), zeros_and_shares(TURNS)
    wanted, _ = exact.update(
        plans,
        credit,
        weights,
        {"buckets": exact.score(plans, len(TURNS), "buckets")},
        Objective(ppo_clip, distill=1.0),
    )
    narrow = Policy(make_model(), dtype=dtype)
    frozen = {"buckets": Teacher(Policy(make_model("llama", seed=1), dtype=dtype), 4, VOCABULARY)}
    learner = Learner(narrow, OptimizerSettings(0.0, clip_norm=1e9), lambda update: 1.0, frozen)
    scores = learner.score(plans, len(TURNS), "buckets")
    assert scores[0]["logprob"].dtype == np.float32
    metrics, _ = learner.update(plans, credit, weights, {"buckets": scores}, Objective(ppo_clip, distill=1.0))
    assert metrics["distill"] == pytest.approx(wanted["distill"], rel=1e-5 if dtype == torch.float32 else 0.05)


def test_a_plan_without_an_action_adds_nothing_and_is_measured_all_the_same():
    """As a rank with less to do computes it, while others compute theirs."""
    policy, teaching = models()
    learner = taught(policy, teaching)
    plans, (credit, weights) = cut(TURNS, 1000), zeros_and_shares(TURNS)
    idle = Plan.of_chains(np.zeros((1, 3), np.int32))
    scores = {"buckets": learner.score([idle, *plans], len(TURNS), "buckets")}
    found, named = [], []
    learner.reduce = lambda sums: named.append(sorted(sums)) or sums
    for given in (plans, [idle, *plans], [idle]):
        metrics, _ = learner.update(given, credit, weights, scores, Objective(ppo_clip, distill=1.0))
        found.append((metrics, gradients(policy.model)))
    assert found[1][0] == found[0][0]
    assert max(distance(values, found[0][1][name]) for name, values in found[1][1].items()) < 1e-15
    assert named == [named[0]] * 3  # ranks add up sums of the same names
    assert "distill" in named[0]
    assert "distill" not in found[2][0]
    assert not any(values.any() for values in found[2][1].values())

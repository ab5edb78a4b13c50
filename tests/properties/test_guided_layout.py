"""What a grammar allowed is part of the distribution, in every layout, against the allowed logits of one turn at a
time."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from properties.test_tree_layout import HANDED_OVER, PARTS, WHOLE, WORKLOADS, together
from support.making import VOCABULARY, distance, gradients, make_learner, make_model
from turnwise.allowed import Allowed, pack_set
from turnwise.cluster.deal import deal
from turnwise.learn import head
from turnwise.learn.losses import ppo_clip
from turnwise.learn.objective import Objective
from turnwise.learn.policy import Policy
from turnwise.learn.teacher import DIRECTIONS, Teacher
from turnwise.plan.balance import Cost
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.rows import merge

TEMPERATURE, TOP_K = 0.8, 5
EXACT = 1e-12
OBJECTIVE = Objective(ppo_clip, entropy=0.1, kl=0.3, distill=0.5, direction=DIRECTIONS["reverse"])
LAYOUTS = {
    "tree": lambda turns: cut(turns, WHOLE),
    "tree, cut": lambda turns: cut(turns, PARTS),
    "stretches": lambda turns: cut(turns, HANDED_OVER),
    "packed": lambda turns: pack(turns, WHOLE),
    "single turns": lambda turns: pack(turns, max(len(t.prompt) + len(t.action) for t in turns)),
    "merged": lambda turns: merge(turns, WHOLE),
}


def guided(turns, seed=0):
    """The turns with random sets of allowed tokens, large, small or of one token; every third turn has none. Turns with
    the same tokens get different sets."""
    random = np.random.default_rng(seed)
    found = []
    for place, turn in enumerate(turns):
        if place % 3 == 2:
            found.append(turn)
            continue
        sets = []
        for number, token in enumerate(turn.action.tolist()):
            share = (0.9, 0.2, 0.0)[number % 3]
            sets.append({token, *np.flatnonzero(random.random(VOCABULARY) < share).tolist()})
        allowed = Allowed(np.arange(len(sets)), [pack_set(tokens, VOCABULARY) for tokens in sets])
        found.append(replace(turn, allowed=allowed))
    return found


def tables(model, turns):
    """Per action token: (the allowed tokens, their logprobs), by one forward pass per turn and nothing of ours."""
    found = []
    for turn in turns:
        if not len(turn.action):
            continue
        tokens = torch.from_numpy(np.concatenate([turn.prompt, turn.action]).astype(np.int64))[None]
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(turn.prompt) - 1 : -1] / TEMPERATURE
        for number, row in enumerate(logits):
            kept = np.arange(VOCABULARY)
            if turn.allowed is not None:
                kept = np.flatnonzero(turn.allowed.dense(VOCABULARY)[number])
            found.append((kept, row[torch.from_numpy(kept)].log_softmax(-1)))
    return found


def apart(own, told):
    """KL of two distributions over the same tokens: the teacher's likeliest by themselves, the others together."""
    likely = told.topk(min(TOP_K, len(told))).indices
    rest = torch.ones_like(told).scatter(0, likely, 0.0)
    pairs = [(own[likely].exp(), told[likely].exp())]
    if rest.any():
        pairs.append(((own.exp() * rest).sum()[None], (told.exp() * rest).sum()[None]))
    return sum((p * (p / q).log()).sum() for p, q in pairs)


class Oracle:
    """Loss, gradient and logprobs of an update over guided turns."""

    def __init__(self, turns):
        self.turns = turns
        self.model = make_model(dtype="float64")
        self.model.set_attn_implementation("sdpa")
        self.reference, self.teacher = (make_model(dtype="float64", seed=seed) for seed in (1, 2))
        for frozen in (self.reference, self.teacher):
            frozen.set_attn_implementation("sdpa")
        random, sizes = np.random.default_rng(5), [len(turn.action) for turn in turns]
        self.credit = [random.normal(0, 1, size) for size in sizes]
        self.weights = [random.uniform(0.2, 1, size) / sum(sizes) for size in sizes]
        self.splits = np.cumsum(sizes)[:-1]
        actions = np.concatenate([turn.action for turn in turns])
        own, reference, teacher = (tables(model, turns) for model in (self.model, self.reference, self.teacher))
        places = [int(np.flatnonzero(kept == token)[0]) for (kept, _), token in zip(own, actions, strict=True)]
        logprobs = torch.stack([row[place] for (_, row), place in zip(own, places, strict=True)])
        beside = torch.stack([row[place] for (_, row), place in zip(reference, places, strict=True)]).detach()
        entropies = torch.stack([-(row.exp() * row).sum() for _, row in own])
        divergence = torch.stack(
            [apart(one, other.detach()) for (_, one), (_, other) in zip(own, teacher, strict=True)]
        )
        noise = random.normal(0, 0.3, len(logprobs))
        self.logprobs, self.entropies = (self.per_turn(values.detach().numpy()) for values in (logprobs, entropies))
        self.of_reference = self.per_turn(beside.numpy())
        self.old = self.per_turn(logprobs.detach().numpy() + noise)
        tensor = lambda values: torch.from_numpy(np.concatenate(values))
        terms, _ = OBJECTIVE(logprobs, entropies, tensor(self.old), tensor(self.credit), beside, divergence)
        total = (terms * tensor(self.weights)).sum()
        total.backward()
        self.loss, self.gradients = float(total.detach()), gradients(self.model)

    def per_turn(self, values):
        return np.split(values, self.splits)

    def updated(self, plans):
        """(loss, gradients, logprobs, scores of the reference, entropies) of our learner on these plans."""
        settings = {"dtype": torch.float64, "temperature": TEMPERATURE}
        learner = make_learner(copy.deepcopy(self.model), learning_rate=0.0, clip_norm=1e9, **settings)
        beside, teacher = (Policy(copy.deepcopy(model), **settings) for model in (self.reference, self.teacher))
        learner.models |= {"reference": beside, "buckets": Teacher(teacher, TOP_K, VOCABULARY)}
        found = {name: learner.score(plans, len(self.turns), name) for name in ("reference", "buckets", "inspection")}
        entropies = [values[:, 1] if len(values) else np.zeros(0) for values in found.pop("inspection")]
        metrics, now = learner.update(plans, self.credit, self.weights, {"old": self.old, **found}, OBJECTIVE)
        return metrics["loss"], gradients(learner.policy.model), now, found["reference"], entropies


@pytest.fixture(scope="module")
def oracles():
    return {workload: Oracle(guided(WORKLOADS[workload]())) for workload in ("growing", "edges")}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workload", ["growing", "edges"])
def test_every_layout_equals_the_allowed_logits_of_single_turns(oracles, workload, layout):
    oracle = oracles[workload]
    loss, gradient, logprobs, reference, entropies = oracle.updated(LAYOUTS[layout](oracle.turns))
    assert loss == pytest.approx(oracle.loss, rel=EXACT, abs=EXACT)
    assert distance(together(gradient), together(oracle.gradients)) <= EXACT
    for found, wanted in (
        (logprobs, oracle.logprobs),
        (reference, oracle.of_reference),
        (entropies, oracle.entropies),
    ):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=EXACT, atol=EXACT)


def test_a_learner_that_ignores_what_was_allowed_is_noticed(oracles):
    oracle = oracles["edges"]
    loss, gradient, logprobs, *_ = oracle.updated(cut([replace(turn, allowed=None) for turn in oracle.turns], WHOLE))
    assert abs(loss - oracle.loss) > 1e-2
    assert distance(together(gradient), together(oracle.gradients)) > 0.1
    assert max(np.abs(one - other).max(initial=0) for one, other in zip(logprobs, oracle.logprobs, strict=True)) > 0.5


def test_turns_that_share_tokens_and_not_their_sets_share_the_trunk_only(oracles):
    """The first two turns of this workload have the same tokens: nodes are laid out once, their targets twice."""
    turns = oracles["edges"].turns[:2]
    [plan], [bare] = cut(turns, WHOLE), cut([replace(turn, allowed=None) for turn in turns], WHOLE)
    assert plan.num_tokens == bare.num_tokens
    [stretch], [plain] = plan.stretches, bare.stretches
    assert len(plain.nodes) == len(turns[0].action)
    assert len(stretch.nodes) > len(plain.nodes)
    [alone] = cut([turns[0], turns[0]], WHOLE)  # equal sets are computed once
    assert len(alone.stretches[0].nodes) == len(plain.nodes)


def test_plans_that_are_dealt_to_ranks_carry_their_sets(oracles):
    """Each rank gets its plans as a pickle; their losses and gradients add up."""
    oracle = oracles["edges"]
    hands = [pickle.loads(pickle.dumps(hand)) for hand in deal(cut(oracle.turns, PARTS // 3), 2, Cost(1.0, 1.0))]
    found = [oracle.updated(hand) for hand in hands]
    assert sum(one[0] for one in found) == pytest.approx(oracle.loss, rel=EXACT, abs=EXACT)
    added = {name: sum(one[1].get(name, 0.0) for one in found) for name in oracle.gradients}
    assert distance(together(added), together(oracle.gradients)) <= EXACT


def test_chunks_and_kept_probabilities_change_nothing(oracles, monkeypatch):
    oracle = oracles["growing"]
    plans = cut(oracle.turns, WHOLE)
    kept = oracle.updated(plans)
    monkeypatch.setattr(head, "KEPT_ELEMENTS", 0)
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 3 * VOCABULARY)
    again = oracle.updated(plans)
    assert kept[0] == pytest.approx(again[0], rel=EXACT)
    assert distance(together(kept[1]), together(again[1])) <= EXACT


def test_a_token_that_was_not_allowed_is_refused(oracles):
    turn = oracles["edges"].turns[0]
    other = (int(turn.action[0]) + 1) % VOCABULARY
    sets = [pack_set([other], VOCABULARY)]
    broken = replace(turn, allowed=Allowed(np.zeros(len(turn.action)), sets))
    with pytest.raises(ValueError, match="not among those"):
        oracles["edges"].updated(cut([broken], WHOLE))

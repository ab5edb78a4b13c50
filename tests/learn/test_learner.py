import math

import numpy as np
import pytest
import torch

from support.making import distance, gradients, logprobs_of, make_learner, make_model, make_turns, parameters
from turnwise.learn.attention import NAME
from turnwise.learn.learner import save_policy
from turnwise.learn.losses import ppo_clip
from turnwise.learn.objective import Objective
from turnwise.learn.policy import load_model, load_tokenizer
from turnwise.learn.schedules import schedule
from turnwise.learn.tiny import build_tokenizer
from turnwise.plan.pack import pack

CLIP = Objective(ppo_clip)
MOST_TOKENS = 7
TURNS = [
    *make_turns([(5, 3), (2, 1), (4, 4)], seed=1),
    *make_turns([(7, 2), (3, 5)], growing=False, seed=2),
    *make_turns([(3, 0), (1, 2)], seed=3),
]


def batch(turns=TURNS, budget=1000):
    """(plans, credit, weights, scores): what an update takes, different for every token and tied to its turn."""

    def per_turn(which, scale):
        found = []
        for turn in turns:
            random = np.random.default_rng([which, *turn.prompt, *turn.action])
            found.append(random.uniform(0.2, 1.0, len(turn.action)) * scale)
        return found

    sign = [1 if len(turn.prompt) % 2 else -1 for turn in turns]
    credit = [side * values for side, values in zip(sign, per_turn(0, 2.0), strict=True)]
    weights = per_turn(1, 1.0 / sum(len(turn.action) for turn in turns))
    return pack(turns, budget), credit, weights, {"old": [turn.logprobs for turn in turns]}


def exact_learner(**how):
    return make_learner(make_model(dtype="float64"), dtype=torch.float64, **how)


def optimizer_state(learner):
    """By parameter and name, copied."""
    return {name: x.clone() for name, x in learner.stepper.state().items() if "/" in name}


def same_bits(one, other):
    assert one.keys() == other.keys()
    return all(np.array_equal(np.asarray(one[name]), np.asarray(other[name])) for name in one)


# ---------------------------------------------------------------- one update


def test_an_update_is_the_gradient_of_the_weighted_sum():
    learner = exact_learner(clip_norm=1e9)
    plans, credit, weights, scores = batch()
    [plan] = plans
    model = learner.policy.model
    logprobs, entropies = logprobs_of(learner.policy, plan)
    place = [np.concatenate([x[turn] for turn in plan.turns]) for x in (credit, weights, scores["old"])]
    advantage, weight, before = (torch.tensor(x, dtype=torch.float64) for x in place)
    ratio = (logprobs - before).exp()
    terms = -torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
    total = (terms * weight).sum()
    total.backward()
    wanted = gradients(model)

    metrics, now = learner.update(plans, credit, weights, scores, CLIP)
    found = gradients(model)
    assert max(distance(found[name], wanted[name]) for name in wanted) < 1e-13
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-12)
    assert metrics["entropy"] == pytest.approx(float(((entropies * weight).sum() / weight.sum()).detach()), rel=1e-12)
    assert metrics["ratio"] == pytest.approx(float(((ratio * weight).sum() / weight.sum()).detach()), rel=1e-12)
    assert 0 < metrics["clipped"] < 1
    assert metrics["gradient_norm"] == pytest.approx(math.sqrt(sum((g**2).sum() for g in wanted.values())))
    assert metrics["skipped"] == 0.0
    assert np.concatenate([now[turn] for turn in plan.turns]) == pytest.approx(logprobs.detach().numpy(), abs=1e-6)
    assert [len(values) for values in now] == [len(turn.action) for turn in TURNS]


def outcome_of(turns, budget):
    """Everything one update leaves behind."""
    learner = exact_learner(learning_rate=1e-3, clip_norm=0.1)
    metrics, now = learner.update(*batch(turns, budget), CLIP)
    by_turn = {(*turn.prompt, -1, *turn.action): values for turn, values in zip(turns, now, strict=True)}
    return gradients(learner.policy.model), parameters(learner.policy.model), metrics, by_turn


@pytest.mark.parametrize("budget", [19, 30, 40, 1000])
@pytest.mark.parametrize("seed", [0, 1])
def test_an_update_does_not_depend_on_passes_or_order(budget, seed):
    wanted = outcome_of(TURNS, 1000)
    shuffled = [TURNS[place] for place in np.random.default_rng(seed).permutation(len(TURNS))]
    found = outcome_of(shuffled, budget)
    for one, other in zip(found[:2], wanted[:2], strict=True):
        assert max(np.abs(one[name] - other[name]).max() for name in other) <= 1e-12
    assert found[2] == pytest.approx(wanted[2], abs=1e-12)
    assert found[3].keys() == wanted[3].keys()
    for name, values in wanted[3].items():
        np.testing.assert_allclose(found[3][name], values, atol=1e-6)


def test_the_updates_above_do_use_different_passes_and_do_move():
    assert [len(pack(TURNS, budget)) for budget in (19, 30, 40, 1000)] == [4, 3, 2, 1]
    before, after = parameters(make_model(dtype="float64")), outcome_of(TURNS, 1000)[1]
    assert all(np.abs(after[name] - before[name]).max() > 1e-5 for name in before)


def test_without_old_logprobs_the_policy_is_the_old_policy():
    plans, credit, weights, _ = batch()
    learners = exact_learner(), exact_learner()
    metrics, now = learners[0].update(plans, credit, weights, {}, CLIP)
    same = learners[1].score(plans, len(TURNS))
    given_metrics, _ = learners[1].update(plans, credit, weights, {"old": same}, CLIP)
    assert metrics["ratio"] == pytest.approx(1.0, rel=1e-12)
    assert metrics["clipped"] == 0.0
    assert [values.tolist() for values in now] == [values.tolist() for values in same]
    assert metrics == given_metrics


def test_scores_are_per_turn_and_leave_no_gradient():
    learner = exact_learner()
    [whole], parts = pack(TURNS, 1000), pack(TURNS, 19)
    scores = learner.score([whole], len(TURNS))
    assert [values.shape for values in scores] == [(len(turn.action),) for turn in TURNS]
    assert all(values.dtype == np.float64 for values in scores if len(values))
    for one, other in zip(scores, learner.score(parts, len(TURNS)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    assert all(parameter.grad is None for parameter in learner.policy.model.parameters())
    assert learner.num_updates == 0


def test_gradients_do_not_pile_up_from_update_to_update():
    learner = exact_learner(learning_rate=1e-12, clip_norm=1e9)
    for _ in range(2):
        learner.update(*batch(), CLIP)
        gradient = gradients(learner.policy.model)
    once = exact_learner(learning_rate=1e-12, clip_norm=1e9)
    once.update(*batch(), CLIP)
    for name, values in gradients(once.policy.model).items():
        assert distance(gradient[name], values) < 1e-6


def test_an_update_without_action_tokens_changes_nothing():
    learner = exact_learner()
    before = parameters(learner.policy.model)
    metrics, now = learner.update([], [np.zeros(0)], [np.zeros(0)], {"old": [np.zeros(0)]}, CLIP)
    assert (metrics["loss"], metrics["gradient_norm"]) == (0.0, 0.0)
    assert [values.shape for values in now] == [(0,)]
    assert same_bits(parameters(learner.policy.model), before)


# ---------------------------------------------------------------- clipping and learning rate


def norm_of(model):
    return math.sqrt(sum((g**2).sum() for g in gradients(model).values()))


def test_gradients_are_clipped_to_the_norm():
    free, bound, loose = (exact_learner(clip_norm=norm) for norm in (1e9, 0.01, 1e3))
    norms = [learner.update(*batch(), CLIP)[0]["gradient_norm"] for learner in (free, bound, loose)]
    assert norms[0] > 0.1
    assert norms == pytest.approx([norms[0]] * 3), "the norm is told as it was before clipping"
    assert norm_of(bound.policy.model) == pytest.approx(0.01, rel=1e-4)
    assert norm_of(loose.policy.model) == pytest.approx(norms[0])
    for name, values in gradients(free.policy.model).items():
        assert distance(gradients(bound.policy.model)[name], values * 0.01 / norms[0]) < 1e-4


def test_the_learning_rate_follows_the_schedule():
    learner = exact_learner(learning_rate=0.4, schedule=schedule("linear", warmup=2, total=6))
    rates, moves = [], []
    for _ in range(7):
        before = parameters(learner.policy.model)
        rates.append(learner.update(*batch(), CLIP)[0]["learning_rate"])
        after = parameters(learner.policy.model)
        moves.append(max(np.abs(after[name] - before[name]).max() for name in after))
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.3, 0.2, 0.1, 0.0])
    # Adam's first step moves a parameter with a plain gradient by the learning rate, and by 1 % of decay.
    assert moves[0] == pytest.approx(0.2, rel=0.05)
    assert moves[-1] == 0.0
    assert all(move > 0 for move in moves[:-1])


def test_updates_are_adamw_by_the_book():
    rate, (one, two) = 1e-2, (0.6, 0.8)
    learner = exact_learner(learning_rate=rate, betas=(one, two), clip_norm=1e9)
    wanted = parameters(learner.policy.model)
    mean, square = (dict.fromkeys(wanted, 0.0) for _ in range(2))
    for update in (1, 2, 3):
        learner.update(*batch(), CLIP)
        for name, gradient in gradients(learner.policy.model).items():
            mean[name] = one * mean[name] + (1 - one) * gradient
            square[name] = two * square[name] + (1 - two) * gradient**2
            step = mean[name] / (1 - one**update) / (np.sqrt(square[name] / (1 - two**update)) + 1e-8)
            wanted[name] = wanted[name] * (1 - rate * 0.01) - rate * step
    found = parameters(learner.policy.model)
    assert max(np.abs(found[name] - wanted[name]).max() for name in wanted) < 1e-10


# ---------------------------------------------------------------- not finite


def nan_terms(logprobs, old, advantages):
    return logprobs * math.nan, {}


def infinite_terms(logprobs, old, advantages):
    return logprobs - math.inf, {}


def infinite_slope(logprobs, old, advantages):
    """Finite everywhere, with an infinite derivative."""
    return (logprobs - logprobs.detach()).abs().sqrt(), {}


def nan_in_one_token(logprobs, old, advantages):
    """Of the pass with most tokens, which is neither the first nor the last."""
    spoiled = torch.zeros_like(logprobs)
    spoiled[-1] = math.nan if len(logprobs) == MOST_TOKENS else 0.0
    return logprobs + spoiled, {}


@pytest.mark.parametrize("loss", [nan_terms, infinite_terms, infinite_slope, nan_in_one_token])
@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_is_not_finite_is_skipped_and_counted(loss, first):
    learner = exact_learner()
    plans, credit, weights, scores = batch(budget=19)
    if not first:
        learner.update(plans, credit, weights, scores, CLIP)
    updates = learner.num_updates
    before, state = parameters(learner.policy.model), optimizer_state(learner)
    assert bool(state) != first
    for count in (1, 2):
        metrics, _ = learner.update(plans, credit, weights, scores, Objective(loss))
        assert not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["gradient_norm"]))
        assert metrics["skipped"] == 1.0
        assert learner.num_skipped_in_a_row == count
        assert learner.num_updates == updates + count
    assert same_bits(parameters(learner.policy.model), before)
    assert same_bits(optimizer_state(learner), state)

    fresh = exact_learner()
    for _ in range(updates + 1):
        fresh.update(plans, credit, weights, scores, CLIP)
    assert learner.update(plans, credit, weights, scores, CLIP)[0]["skipped"] == 0.0
    assert learner.num_skipped_in_a_row == 0
    assert same_bits(parameters(learner.policy.model), parameters(fresh.policy.model))


def test_one_pass_of_several_is_enough_to_skip():
    sizes = [len(plan.action_nodes) for plan in pack(TURNS, 19)]
    assert [size == MOST_TOKENS for size in sizes] == [False, True, False, False]


# ---------------------------------------------------------------- saving


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["get amber", "answer cedar"], 300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_restoring_goes_on_bit_by_bit(tmp_path, tokenizer, dtype):
    def learner_of(model):
        return make_learner(model, schedule=schedule("cosine", warmup=1, total=5), dtype=dtype)

    learner = learner_of(make_model())
    learner.update(*batch(), CLIP)
    learner.update(*batch(), Objective(nan_terms))
    learner.save(tmp_path, tokenizer)
    torch.manual_seed(123)
    torch.save(torch.get_rng_state(), tmp_path / "random.pt")
    learner.save(tmp_path, tokenizer)
    goes_on = [learner.update(*batch(), CLIP)[0] for _ in range(2)]
    torch.rand(3)

    again = learner_of(load_model(tmp_path))
    again.restore(tmp_path)
    assert torch.equal(torch.get_rng_state(), torch.load(tmp_path / "random.pt"))
    assert (again.num_updates, again.num_skipped_in_a_row) == (2, 1)
    went_on = [again.update(*batch(), CLIP)[0] for _ in range(2)]
    assert went_on == goes_on
    assert same_bits(parameters(again.policy.model), parameters(learner.policy.model))
    assert same_bits(optimizer_state(again), optimizer_state(learner))


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_what_is_saved_is_a_stock_model_folder(tmp_path, tokenizer, kind):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    learner = make_learner(make_model(kind))
    learner.update(*batch(), CLIP)
    learner.save(tmp_path, tokenizer)
    assert NAME not in (tmp_path / "config.json").read_text()
    assert learner.policy.model.config._attn_implementation == NAME
    scores = learner.score(pack(TURNS, 1000), len(TURNS))

    stock = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert stock.config._attn_implementation == "sdpa"
    assert same_bits(parameters(stock), parameters(learner.policy.model))
    learner.policy.model.set_attn_implementation("sdpa")
    for turn, values in zip(TURNS, scores, strict=True):
        tokens = torch.from_numpy(np.concatenate([turn.prompt, turn.action]).astype(np.int64))[None]
        with torch.no_grad():
            logits = stock(input_ids=tokens).logits[0]
            assert torch.equal(logits, learner.policy.model(input_ids=tokens).logits[0])
        table = logits.log_softmax(-1)[len(turn.prompt) - 1 : -1]
        recomputed = table.gather(1, torch.from_numpy(turn.action.astype(np.int64))[:, None])[:, 0]
        np.testing.assert_allclose(recomputed.numpy(), values, atol=2e-5)

    text = "get amber<|im_end|>\n"
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template
    assert load_tokenizer(tmp_path).eos_token_id == tokenizer.eos_token_id


def test_a_save_that_fails_leaves_the_policy_able_to_compute(tmp_path):
    class Broken:
        def save_pretrained(self, folder):
            raise OSError("disk full")

    learner = make_learner(make_model())
    wanted = learner.score(pack(TURNS, 1000), len(TURNS))
    with pytest.raises(OSError, match="disk full"):
        save_policy(learner.policy.model, Broken(), tmp_path)
    found = learner.score(pack(TURNS, 1000), len(TURNS))
    assert [values.tolist() for values in found] == [values.tolist() for values in wanted]


def test_published_weights_are_the_live_ones():
    learner = make_learner(make_model())
    published = learner.publish()
    learner.update(*batch(), CLIP)
    for name, tensor in learner.policy.model.state_dict().items():
        assert torch.equal(published[name], tensor)
    assert "lm_head.weight" in published


# ---------------------------------------------------------------- bfloat16


def test_bfloat16_keeps_float32_master_weights():
    learner = make_learner(make_model(), learning_rate=1e-6, dtype=torch.bfloat16)
    before = parameters(learner.policy.model)
    learner.update(*batch(), CLIP)
    after = parameters(learner.policy.model)
    assert {values.dtype for values in after.values()} == {np.dtype(np.float32)}
    assert {x.dtype for x in optimizer_state(learner).values()} == {torch.float32}
    moved = [np.abs(after[name] - before[name]) for name in before]
    assert all(0 < move.max() < 1e-5 for move in moved), "a step far below the resolution of bfloat16 has to arrive"


def test_seconds_are_counted_by_stage():
    learner = make_learner(make_model())
    learner.score(pack(TURNS, 1000), len(TURNS))
    assert learner.seconds["score"] > 0 == learner.seconds["optimizer"]
    learner.update(*batch(), CLIP)
    assert all(value > 0 for value in learner.seconds.values())


# ---------------------------------------------------------------- tokens without a weight


@pytest.mark.parametrize("spoilt", ["old", "credit"])
@pytest.mark.parametrize("budget", [19, 1000])
def test_a_turn_without_weight_may_hold_anything(spoilt, budget):
    """It is left out: zero times what is not a number would be no number, and the whole update skipped."""
    found = []
    for value in (None, math.nan, math.inf):
        learner = exact_learner(clip_norm=1e9)
        plans, credit, weights, scores = batch(budget=budget)
        weights[1], weights[4] = np.zeros_like(weights[1]), np.zeros_like(weights[4])
        if value is not None:
            told = {"old": scores["old"], "credit": credit}[spoilt]
            told[1], told[4] = np.full(len(told[1]), value), np.full(len(told[4]), value)
        metrics, _ = learner.update(plans, credit, weights, scores, CLIP)
        assert metrics["skipped"] == 0.0
        found.append((metrics, gradients(learner.policy.model)))
    for metrics, gradient in found[1:]:
        assert metrics == found[0][0]
        assert same_bits(gradient, found[0][1])


def test_an_update_whose_weights_are_all_zero_moves_nothing_and_measures_nothing():
    learner = exact_learner(learning_rate=1e-2)
    plans, credit, weights, scores = batch()
    learner.update(plans, credit, weights, scores, CLIP)  # so that there is momentum
    before = parameters(learner.policy.model)
    metrics, _ = learner.update(plans, credit, [np.zeros_like(w) for w in weights], scores, CLIP)
    assert (metrics["idle"], metrics["skipped"], metrics["loss"]) == (1.0, 0.0, 0.0)
    assert not {"ratio", "entropy", "clipped"} & metrics.keys()
    assert same_bits(parameters(learner.policy.model), before)

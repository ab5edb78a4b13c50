"""The learner by itself: the run's own, and what autograd of transformers computes."""

import json

import numpy as np
import pytest
import torch

import turnwise as tw
from support.making import distance, make_group, make_model, make_turn, parameters
from support.sessions import make_echo, without_environment
from turnwise.learn.losses import LOSSES

RATE = 1e-3
ADAMW = {"optimizer": {"learning_rate": RATE, "adamw": {"clip_norm": 1e9}}}


def two_groups():
    """Attempts of several turns whose prompts share prefixes, with logprobs near those of the model."""
    return [
        make_group([1.0, 0.0, 0.5], num_turns=[2, 1, 3], name="one"),
        make_group([0.0, 0.25], num_turns=[1, 2], name="two"),
    ]


def turns_in(groups):
    return [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]


def plain_logprobs(model, turn):
    """By transformers alone: one row, one full forward pass."""
    row = torch.tensor([[*turn.prompt.tolist(), *turn.action.tolist()]])
    logprobs = model(input_ids=row).logits[0].log_softmax(-1)
    start = len(turn.prompt)
    return torch.stack([logprobs[start + place - 1, token] for place, token in enumerate(turn.action.tolist())])


def updated_by_hand(model, groups):
    """GRPO with the clipped loss and the mean over tokens, turn by turn, and a step of torch's own AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), weight_decay=0.0)
    turns, loss = turns_in(groups), torch.zeros((), dtype=torch.float64)
    tokens = sum(len(turn.action) for turn in turns)
    for group in groups:
        totals = np.array([trajectory.total for trajectory in group.trajectories])
        advantages = (totals - totals.mean()) / (totals.std(ddof=1) + 1e-6)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            for turn in trajectory.turns:
                old = torch.tensor(turn.logprobs.astype(np.float64))
                ratio = (plain_logprobs(model, turn) - old).exp()
                clipped = ratio.clamp(0.8, 1.2)
                loss = loss - torch.minimum(ratio * advantage, clipped * advantage).sum() / tokens
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("layout", ["tree", "packed"])
def test_an_update_is_what_autograd_of_transformers_computes(layout):
    groups = two_groups()
    ours, theirs = make_model(dtype="float64"), make_model(dtype="float64")
    learner = tw.Learner(
        ours,
        layout=layout,
        credit={"name": "grpo"},
        loss={"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        weighting={"name": "token_mean"},
        **ADAMW,
    )
    before = parameters(ours)
    metrics = learner.update(groups)
    loss = updated_by_hand(theirs, groups)
    moved = parameters(ours)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-9)
    for name, expected in parameters(theirs).items():
        assert distance(moved[name] - before[name], expected - before[name]) < 1e-6, name
    assert learner.version == 1


def test_scores_are_those_of_transformers():
    groups, untouched = two_groups(), make_model(dtype="float64")
    scores = tw.Learner(make_model(dtype="float64")).score(groups)
    for turn, score in zip(turns_in(groups), scores, strict=True):
        assert score == pytest.approx(plain_logprobs(untouched, turn).detach().numpy(), abs=1e-12)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps, with every checkpoint."""
    folder = tmp_path_factory.mktemp("learner")
    recipe = without_environment(optimizer={"learning_rate": RATE})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_STATE", str(folder / "state"))
        return tw.train(recipe, environment=make_echo(), out=folder / "run", show=False)


def test_an_update_is_that_of_the_run_bit_for_bit(run, tmp_path):
    learner = tw.Learner(run.checkpoints[0], recipe=run.recipe)
    learner.model.to("cpu")
    torch.set_num_threads(1)
    for step in (1, 2):
        metrics = learner.update(run.groups(step))
        recorded = run.metrics[step]
        expected = tw.Learner(run.checkpoints[step]).weights()
        assert all(torch.equal(value, expected[name]) for name, value in learner.weights().items())
        assert metrics["loss"] == recorded["loss"]
        assert metrics["gradient_norm"] == recorded["gradient_norm"]
        assert metrics["gap/mean"] == recorded["gap/mean"]
    assert learner.version == 2


def test_a_saved_learner_goes_on_as_if_nothing_had_been(run, tmp_path):
    keys = {"optimizer": {"learning_rate": RATE}}
    learner = tw.Learner(run, **keys)
    learner.update(run.groups(1))
    restored = tw.Learner.load(learner.save(tmp_path / "saved"), **keys)
    assert restored.version == 1
    for one in (learner, restored):
        one.update(run.groups(2))
    other = restored.weights()
    assert all(torch.equal(value, other[name]) for name, value in learner.weights().items())
    with pytest.raises(ValueError, match="exists already"):
        learner.save(tmp_path / "saved")
    with pytest.raises(ValueError, match="is no folder that Learner.save wrote"):
        tw.Learner.load(run.checkpoint)
    assert json.loads((tmp_path / "saved" / "learner.json").read_text()) == {"version": 1}


def moved_by(**how):
    model = make_model(dtype="float64")
    tw.Learner(model, **ADAMW).update(two_groups(), **how)
    return parameters(model)


def same(one, other):
    return all(distance(one[name], other[name]) < 1e-12 for name in one)


def test_credit_is_a_name_a_table_arrays_or_a_function():
    from turnwise.credit.estimators import ESTIMATORS

    rloo = ESTIMATORS["rloo"].function
    arrays = rloo(two_groups(), {})
    named = moved_by(credit="rloo")
    assert not same(named, moved_by())
    for credit in ({"name": "rloo"}, arrays, lambda groups, scores: rloo(groups, scores)):
        assert same(named, moved_by(credit=credit))


def test_loss_is_a_name_or_a_function():
    named = moved_by(loss="reinforce")
    assert not same(named, moved_by())
    assert same(named, moved_by(loss={"name": "reinforce"}))
    assert same(named, moved_by(loss=LOSSES["reinforce"].function))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"credit": "rlo"}, "credit.name = 'rlo' does not exist; did you mean rloo?"),
        ({"credit": "gae"}, "credit gae needs values, which this learner has not"),
        ({"credit": [np.zeros(2)]}, "there are 9 turns and 1 arrays"),
        ({"credit": [np.zeros(3)] * 9}, "credit of turn 0 has one finite number per action token: 2, got"),
        ({"credit": [np.full(2, np.nan)] * 9}, "credit of turn 0 has one finite number per action token"),
        ({"loss": "ppo_clap"}, "loss.name = 'ppo_clap' does not exist"),
    ],
)
def test_what_cannot_be_meant_is_refused(how, said):
    learner = tw.Learner(make_model())
    with pytest.raises(ValueError) as caught:
        learner.update(two_groups(), **how)
    assert said in str(caught.value)
    assert learner.version == 0


def test_groups_that_the_model_cannot_compute_are_refused():
    learner, attempts = tw.Learner(make_model()), []
    for turn in (make_turn([1, 99], [2]), make_turn([1] * 300, [2]), make_turn([1], [2], logprobs=[np.nan])):
        attempts.append(tw.Group(tw.Task("t", "own"), (tw.Trajectory((turn,), tw.Status.finished),)))
    for group, said in zip(
        attempts, ["has the token 99, and those of the model are 0 to 63", "more than", "nobody knows"], strict=True
    ):
        with pytest.raises(ValueError, match=said):
            learner.update([group])
    with pytest.raises(ValueError, match="groups are a sequence of Group values"):
        learner.update(attempts[0])
    with pytest.raises(ValueError, match="nothing to train on"):
        learner.update([])
    with pytest.raises(ValueError, match="has no scores value; it has inspection, old"):
        learner.score(attempts[:0], "value")


@pytest.mark.parametrize(
    ("model", "keys", "said"),
    [
        (3, {}, "a model is a folder, a run, a causal model of transformers, got int"),
        ("nowhere", {}, "nowhere"),
        ("tiny", {"optimiser": {}}, "unknown key optimiser; did you mean optimizer?"),
        ("tiny", {"recipe": tw.Recipe(), "steps": 2}, "give keys or a recipe, not both"),
        ("tiny", {"cluster": {"fsdp": 2}}, "is in this process; remove cluster"),
    ],
)
def test_a_learner_that_cannot_be_is_refused(model, keys, said):
    with pytest.raises(ValueError) as caught:
        tw.Learner(model, **keys)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)

"""The walk of benchmarks/which_credit.py and which_loss.py, its small trainer, and the file of runs."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from support.scripts import scripts_by_name
from turnwise.assemble import objective
from turnwise.types import Group, Trajectory, Turn


@pytest.fixture(scope="module")
def modules():
    with scripts_by_name():
        import matrix
        import walk
        import which_credit
        import which_loss

        yield walk, matrix, which_credit, which_loss


def uniform(walk, goal):
    return walk.Policy(3, np.full((walk.SIGNS * goal, 1 + walk.WORDS, walk.WORDS), np.log(0.5)))


def knowing(walk, goal):
    """A policy that always says the right words."""
    numbers = np.arange(walk.SIGNS * goal)
    first, second = walk.right_words(numbers // goal)
    logprobs = np.full((len(numbers), 1 + walk.WORDS, walk.WORDS), -1e9)
    logprobs[numbers, 0, first] = 0.0
    logprobs[numbers, 1:, second] = 0.0
    return walk.Policy(0, logprobs)


def played(walk, world, policy=None, count=64, size=8):
    random = np.random.default_rng(5)
    ways = walk.ways_of(world, count // size, random).repeat(size, 0)
    return walk.play(world, policy or uniform(walk, world.goal), ways, random)


def test_who_knows_the_words_needs_a_turn_for_each_sign(modules):
    walk, *_ = modules
    world = walk.World(turns=8, goal=6)
    found = played(walk, world, knowing(walk, world.goal))
    assert found.shares(world) == {"reached": 1.0, "way": 1.0, "right": 1.0}
    assert (found.turns == 6).all()
    assert np.allclose(found.rewards.sum(1), 1.0)


def test_two_words_by_chance_are_right_one_time_in_four(modules):
    walk, *_ = modules
    world = walk.World(turns=24, goal=16)
    assert played(walk, world, count=4000).shares(world)["right"] == pytest.approx(0.25, abs=0.01)


def test_moves_slip_where_the_world_says(modules):
    walk, *_ = modules
    world = walk.World(turns=8, goal=8, slip=1.0, slips="early")
    assert (played(walk, world, knowing(walk, world.goal)).passed == 4).all()
    often = played(walk, walk.World(turns=10, goal=16, slip=0.2), knowing(walk, 16), count=4000)
    assert often.passed.mean() == pytest.approx(8.0, abs=0.1)


@pytest.mark.parametrize("tossed", ["first", "last"])
def test_when_it_is_paid_changes_no_total(modules, tossed):
    walk, *_ = modules
    world = walk.World(turns=8, goal=3, coin=1.0, tossed=tossed)
    by_turn, at_end = played(walk, world), played(walk, replace(world, pay="end"))
    assert np.allclose(by_turn.rewards.sum(1), at_end.rewards.sum(1))
    assert (np.count_nonzero(at_end.rewards, 1) <= 1).all()
    coins = by_turn.rewards.sum(1) - by_turn.passed / 3
    assert set(np.round(coins, 6)) == {0.0, 1.0}
    place = np.zeros(64, int) if tossed == "first" else by_turn.turns - 1
    assert (by_turn.rewards[np.arange(64), place] >= coins - 1e-9).all()


def test_attempts_are_those_that_the_constructors_check(modules):
    walk, *_ = modules
    world = walk.World(turns=4, goal=2, coin=0.5)
    found = played(walk, world)
    groups = walk.groups_of(world, found, 3, 8)
    assert len(groups) == 8
    for group in groups:
        checked = tuple(
            Trajectory(
                tuple(
                    Turn(
                        turn.prompt, turn.action, turn.logprobs, turn.versions, turn.stop, turn.reward, turn.said,
                        turn.heard, broke=turn.broke,
                    )
                    for turn in one.turns
                ),
                one.status,
            )
            for one in group.trajectories
        )  # fmt: skip
        assert [one.total for one in Group(group.task, checked).trajectories] == [
            one.total for one in group.trajectories
        ]
    lengths = [len(one.turns) for group in groups for one in group.trajectories]
    assert lengths == found.turns.tolist()
    first = groups[0].trajectories[0]
    assert first.turns[0].heard == (walk.messages(2)[int(first.turns[1].prompt[0])],)


def credit_of(matrix, which, name, groups):
    values = [np.zeros(2, np.float32) for group in groups for one in group.trajectories for _ in one.turns]
    recipe = matrix.recipe_of(f"credit.name={name}", *which.ESTIMATORS[name])
    return np.concatenate(objective.estimate_of(recipe)(groups, {"values": values}))


def test_estimators_that_see_totals_do_not_see_when_it_is_paid(modules):
    walk, matrix, which, _ = modules
    world = walk.World(turns=8, goal=3, coin=1.0)
    by_turn = walk.groups_of(world, played(walk, world), 0, 8)
    at_end = walk.groups_of(world, played(walk, replace(world, pay="end")), 0, 8)
    for name in which.ESTIMATORS:
        same = np.allclose(credit_of(matrix, which, name, by_turn), credit_of(matrix, which, name, at_end), atol=1e-6)
        assert same == (name in which.TOTALS), name


def weights_after_a_step(walk, matrix, settings):
    world = walk.World(turns=4, goal=2)
    trainer = matrix.Trainer(matrix.recipe_of("optimizer.learning_rate=1e-2", *settings), world, seed=0)
    found = played(walk, world, trainer.snapshot(0))
    metrics = trainer.step(walk.groups_of(world, found, 0, 8), found)
    return torch.cat([parameter.detach().flatten() for parameter in trainer.policy.parameters()]), metrics


def test_the_first_update_on_fresh_attempts_is_the_same_with_every_loss(modules):
    walk, matrix, _, which = modules
    one = "groups_per_update=8"
    first, _ = weights_after_a_step(walk, matrix, (*which.LOSSES["ppo_clip"], one))
    start, _ = weights_after_a_step(walk, matrix, (one, "optimizer.learning_rate=1e-12"))
    assert (first - start).abs().max() > 5e-3
    for name, settings in which.LOSSES.items():
        weights, metrics = weights_after_a_step(walk, matrix, (*settings, one))
        assert torch.allclose(weights, first, atol=1e-4), name
        assert metrics["largest ratio"] == pytest.approx(1.0, abs=1e-5)


def test_truncated_importance_sampling_does_nothing_to_fresh_attempts(modules):
    walk, matrix, _, which = modules
    learner = ("max_lag=4", which.LEARNER)
    plain, _ = weights_after_a_step(walk, matrix, learner)
    corrected, _ = weights_after_a_step(walk, matrix, which.AGES["lag 4, learner, TIS"])
    assert torch.allclose(plain, corrected, atol=1e-4)


def test_attempts_are_exactly_as_old_as_the_lag(modules):
    walk, matrix, *_ = modules
    recipe = matrix.recipe_of("max_lag=2", "steps=6", "groups_per_step=2", "groups_per_update=1")
    assert matrix.trained(walk.World(turns=2, goal=2), 0, recipe)["curve"]["lag"] == [0, 1, 2, 2, 2, 2]


def test_a_critic_learns_what_is_paid(modules):
    walk, matrix, *_ = modules
    settings = ("credit.name=gae", "credit.unit=turn", "critic.optimizer.learning_rate=1e-2", "steps=60")
    left = matrix.trained(walk.World(turns=2, goal=2), 0, matrix.recipe_of(*settings))["curve"]["critic, unexplained"]
    assert left[-1] < 0.95 < left[0]


def test_a_run_that_is_in_the_file_is_not_made_again(modules, tmp_path, capsys):
    _, matrix, *_ = modules
    path, made = tmp_path / "runs.jsonl", []

    def run(cell):
        made.append(cell["seed"])
        return {"after": {"sampled/reached": 0.5}, "cpu_seconds": 1.23456}

    matrix.make([{"seed": 1}], path, run)
    path.write_text(path.read_text() + json.dumps({"cell": {"seed": 2}})[:-3])
    matrix.make([{"seed": 1}, {"seed": 2}], path, run)
    assert made == [1, 2]
    assert [one["cell"]["seed"] for one in matrix.finished(path)] == [1, 2]
    assert matrix.finished(path)[0]["cpu_seconds"] == 1.235
    capsys.readouterr()


def test_the_learning_rate_is_that_of_the_best_pilots(modules):
    _, _, which, _ = modules

    def pilot(rate, right, seed):
        cell = {"pay": "end", "world": "w", "estimator": "gigpo", "rate": rate, "seed": seed}
        return {"cell": cell, "curve": {"right": [right, right]}}

    first, second = which.PILOTS[:2]
    runs = [pilot(0.01, 0.4, first), pilot(0.03, 0.5, first), pilot(0.01, 0.4, second), pilot(0.03, 0.2, second)]
    assert which.best_rates([*runs, pilot(0.003, 1.0, which.SEEDS[0])]) == {("end", "w", "gigpo"): 0.01}


def test_of_learning_rates_that_pilots_do_not_tell_apart_the_lowest_is_taken(modules):
    _, _, which, _ = modules
    assert which.lowest_of_the_best({0.01: [0.40, 0.40], 0.03: [0.30, 0.52]}) == 0.01
    assert which.lowest_of_the_best({0.01: [0.40, 0.40], 0.03: [0.44, 0.46]}) == 0.03


def test_an_arm_with_a_rate_of_its_own_is_run_at_the_common_one_too(modules):
    _, _, which, _ = modules
    arms = which.arms_to_run()
    rates = {**dict.fromkeys(arms, which.COMMON), arms[0]: 0.03}
    of_first = [cell for cell in which.reported(rates) if (cell["pay"], cell["world"], cell["estimator"]) == arms[0]]
    assert {cell["rate"] for cell in of_first} == {0.03, which.COMMON}
    assert len(which.reported(rates)) == (len(arms) + 1) * len(which.SEEDS)
    runs = [{"cell": cell, "curve": {"right": [cell["rate"]]}} for cell in of_first]
    pay, world, name = arms[0]
    assert {which.learned(run) for run in which.by_arm(runs, rates)[world, pay, name].values()} == {0.03}


def test_the_mean_gradient_of_an_unbiased_estimator_is_nearer_to_the_truth_than_that_of_a_step(modules):
    import which_gradient

    cell = {"world": "2 turns, coin at the end", "pay": "turns", "estimator": "rloo", "draws": 6}
    found = which_gradient.run_cell(cell)
    assert 0.0 < found["step"] < found["mean"] < 1.0


def test_differences_are_of_the_seeds_that_both_have(modules):
    _, matrix, *_ = modules
    assert matrix.paired({0: 3.0, 1: 5.0, 2: 9.0}, {1: 4.0, 0: 1.0}) == [2.0, 1.0]
    assert matrix.interval([]) == "missing"
    assert matrix.interval([1.0, 1.0, 1.0], "+") == "+1.000 +- 0.000"

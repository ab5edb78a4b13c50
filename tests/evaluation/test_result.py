import asyncio
import itertools
import math
import random

import pytest

from support.acting import Puppet, group, hang, limits, renderer, run, says, trajectory, user
from turnwise.engines.base import Sampling
from turnwise.envs.base import Reply
from turnwise.evaluation.result import Result, evaluate, pass_at
from turnwise.rollout.group import AttemptMaker
from turnwise.runs.interval import wilson
from turnwise.types import Group, Status, Task, Trajectory


class Told:
    """An environment that pays what its task says, or fails as it says."""

    async def open(self, task):
        self.paid = task.data["paid"]
        return Reply(user("go"))

    async def step(self, message):
        paid = self.paid.pop(0) if isinstance(self.paid, list) else self.paid
        if paid == "fail":
            raise RuntimeError("down")
        if paid == "hang":
            await hang()
        return Reply(finished=True, outcome=paid)

    async def close(self):
        return None


def tasks(*paid, dataset="hops"):
    return [Task(f"{dataset}-{number}", dataset, {"paid": value}) for number, value in enumerate(paid)]


def examine(chosen, attempts=1, success_at=1.0, environment=Told, seen=lambda group: None):
    practice = AttemptMaker(
        {"hops": environment, "guess": environment},
        says(),
        renderer(),
        Sampling(99),
        limits(call_seconds=0.2),
        seed=0,
        split="heldout/sampled",
        attempts=attempts,
    )
    return run(evaluate(practice, chosen, success_at, seen))


def test_every_attempt_counts_once():
    result = examine(tasks(1.0, 0.0, 0.5, 2.0, 1.0), attempts=3)
    assert result.num_attempts == 15
    assert result.num_successes == 9
    assert result.success == 0.6
    metrics = result.metrics(4)
    assert metrics["success"] == 0.6
    assert metrics["attempts"] == 15
    assert metrics["reward/mean"] == pytest.approx(0.9)
    assert metrics["trajectory/turns"] == 1.0
    assert metrics["success_low"] < 0.6 < metrics["success_high"]
    assert [made.task.id for made in result.groups] == [f"hops-{number}" for number in range(5)]


@pytest.mark.parametrize("how", ["fail", "hang"])
def test_an_attempt_that_failed_has_not_succeeded(how):
    result = examine(tasks(1.0, how, 1.0, 0.0))
    assert (result.num_attempts, result.num_successes, result.success) == (4, 2, 0.5)
    metrics = result.metrics(0)
    assert metrics["trajectory/failed"] == 1.0
    assert metrics["trajectory/count"] == 3.0
    assert metrics["reward/mean"] == pytest.approx(2 / 3)  # rewards are of attempts that count


def test_all_failed():
    metrics = examine(tasks("fail", "fail")).metrics(0)
    assert metrics["success"] == 0.0
    assert metrics["attempts"] == 2
    assert metrics["success_low"] == 0.0
    assert math.isnan(metrics["reward/mean"])


def test_ragged_groups_are_weighted_by_attempt():
    """A group that lost attempts must not weigh as much as a whole one."""
    failed = (trajectory(status=Status.failed),)
    result = Result((group(1.0, 1.0, 1.0), group(0.0), Group(Task("x", "hops"), (), failed * 4)), 1.0)
    assert result.num_attempts == 8
    assert result.num_successes == 3
    assert result.success == 3 / 8
    low, high = result.metrics(0)["success_low"], result.metrics(0)["success_high"]
    assert 0 < low < 3 / 8 < high < 1


@pytest.mark.parametrize("paid", [0.0, 1.0])
def test_one_task(paid):
    metrics = examine(tasks(paid)).metrics(0)
    assert metrics["attempts"] == 1
    assert metrics["success"] == paid
    assert metrics["success_low"] <= paid <= metrics["success_high"]
    assert metrics["success_high"] - metrics["success_low"] > 0.5


def test_no_task_at_all():
    result = examine([])
    assert (result.num_attempts, result.success) == (0, 0.0)
    assert (result.metrics(0)["success_low"], result.metrics(0)["success_high"]) == (0.0, 1.0)


def test_success_is_what_the_recipe_calls_so():
    assert examine(tasks(0.2, 0.4, 0.6), success_at=0.4).num_successes == 2
    with_turn_rewards = Result((Group(Task("x", "hops"), (trajectory(0.5),)),), 0.5)
    assert with_turn_rewards.num_successes == 1


def test_all_tasks_are_attempted_in_one_pool():
    """No barrier between batches: a slow task holds up nothing but itself."""
    barrier = asyncio.Barrier(40)

    class Meets(Told):
        async def step(self, message):
            await barrier.wait()
            return Reply(finished=True, outcome=1.0)

    assert examine(tasks(*[1.0] * 20), attempts=2, environment=Meets).num_successes == 40


def test_a_result_has_nothing_of_training_in_it():
    names = examine(tasks(1.0)).metrics(3).keys()
    assert not [name for name in names if name.startswith(("lag/", "groups/", "stop/"))]
    assert {"success", "success_low", "success_high", "attempts", "trajectory/turns", "status/finished"} <= names


def test_evaluation_does_not_meet_the_noise_of_training():
    asked = []

    def practice(split):
        engine = says(lambda prompt, session, seed: asked.append(seed) or "x")
        return AttemptMaker(
            {"hops": lambda: Puppet(Reply(finished=True))}, engine, renderer(), Sampling(9), limits(), 0, split, 2
        )

    for split in ("train", "heldout/sampled", "heldout/greedy"):
        run(evaluate(practice(split), tasks(1.0, 1.0), 1.0))
    assert len(set(asked)) == 12


def test_each_dataset_has_its_figures():
    metrics = examine([*tasks(1.0, 0.0), *tasks(1.0, 1.0, dataset="guess")]).metrics(0)
    assert (metrics["hops/success"], metrics["guess/success"], metrics["success"]) == (0.5, 1.0, 0.75)


def test_failed_attempts_count_the_same_overall_and_per_dataset():
    metrics = examine([*tasks(1.0, "fail"), *tasks(1.0, "fail", dataset="guess")]).metrics(0)
    assert metrics["success"] == 0.5
    assert metrics["hops/success"] == metrics["guess/success"] == 0.5


# ---------------------------------------------------------------- several attempts


def slow_pass_at(k, successes, attempts):
    """Over all choices of k attempts."""
    outcomes = [True] * successes + [False] * (attempts - successes)
    chosen = list(itertools.combinations(outcomes, k))
    return sum(any(some) for some in chosen) / len(chosen)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_pass_at_k_counts_every_choice_of_k_attempts(k):
    tallies = [(0, 8), (1, 8), (3, 9), (8, 8)]
    wanted = sum(slow_pass_at(k, *tally) for tally in tallies) / len(tallies)
    assert pass_at(k, tallies) == pytest.approx(wanted, rel=1e-12)


def test_pass_at_k_needs_k_attempts():
    with pytest.raises(ValueError, match="pass@4 needs 4 attempts at every task, and one has 3"):
        pass_at(4, [(1, 4), (1, 3)])
    assert math.isnan(pass_at(1, []))


def test_k_attempts_give_pass_at_every_power_up_to_k():
    result = examine(tasks([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 8, 1.0), attempts=8)
    metrics = result.metrics(3)
    assert [name for name in metrics if name.startswith("pass@")] == ["pass@2", "pass@4", "pass@8"]
    assert metrics["pass@8"] == pytest.approx(2 / 3)
    assert metrics["pass@2"] == pytest.approx((0.25 + 1.0) / 3)
    assert (metrics["tasks"], metrics["attempts"], metrics["version"]) == (3, 24, 3)
    assert metrics["success_low"] < metrics["success"] == 9 / 24 < metrics["success_high"]


def test_one_task_and_one_attempt():
    metrics = examine(tasks(1.0)).metrics(0)
    assert (metrics["success"], metrics["tasks"], metrics["attempts"]) == (1.0, 1, 1)
    assert (metrics["success_low"], metrics["success_high"]) == wilson(1, 1)
    assert not any(name.startswith("pass@") for name in metrics)


def test_failed_attempts_are_attempts_of_pass_at_k():
    metrics = examine(tasks(["fail", "fail", "fail", 1.0], 0.0), attempts=4).metrics(0)
    assert metrics["attempts"] == 8
    assert metrics["pass@4"] == 0.5


def test_datasets_have_their_own_headlines():
    mixed = [*tasks(1.0, 1.0, 0.0), *tasks(0.0, 1.0, dataset="guess")]
    metrics = examine(mixed, attempts=2).metrics(0)
    assert (metrics["hops/success"], metrics["guess/success"]) == (pytest.approx(2 / 3), 0.5)
    assert (metrics["hops/tasks"], metrics["guess/attempts"]) == (3, 4)
    assert metrics["hops/success_low"] < metrics["hops/success"]
    assert metrics["success"] == pytest.approx(0.6)


# ---------------------------------------------------------------- against slow references


def slow_interval(tallies, z=1.96):
    """The rates that are within z of their own standard errors of what was found, searched for one by one. Where tasks
    were attempted several times, it is found by as many independent attempts as would leave it as uncertain as the
    spread between tasks does."""
    tasks, total = len(tallies), sum(attempts for _, attempts in tallies)
    rate = sum(successes for successes, _ in tallies) / total
    size = float(tasks)
    if tasks > 1 and total > tasks and 0 < rate < 1:
        spread = sum((successes / total - rate * attempts / total) ** 2 for successes, attempts in tallies)
        variance = spread * tasks / (tasks - 1)
        size = min(total, max(tasks, rate * (1 - rate) / variance)) if variance else total
    grid = [p / 40_000 for p in range(40_001)]
    fits = [p for p in grid if abs(rate - p) <= z * math.sqrt(p * (1 - p) / size)]
    return fits[0], fits[-1]


def outcomes(num_tasks, attempts, kind):
    """What each attempt at each task comes to, of every sort, the same each time."""
    chance = random.Random(f"{num_tasks} {attempts} {kind}")
    sorts = [0.0, 1.0] if kind == "sound" else [0.0, 1.0, "fail"]
    return [[chance.choice(sorts) for _ in range(attempts)] for _ in range(num_tasks)]


@pytest.mark.parametrize("kind", ["sound", "failing"])
@pytest.mark.parametrize("attempts", [1, 8])
@pytest.mark.parametrize("num_tasks", [1, 2, 13])
def test_counts_intervals_and_pass_at_k_are_those_of_slow_references(num_tasks, attempts, kind):
    told = outcomes(num_tasks, attempts, kind)
    metrics = examine(tasks(*[list(paid) for paid in told]), attempts=attempts).metrics(7)
    tallies = [(paid.count(1.0), attempts) for paid in told]
    flat = [outcome for paid in told for outcome in paid]
    counting = [outcome for outcome in flat if outcome != "fail"]
    assert (metrics["tasks"], metrics["attempts"]) == (num_tasks, num_tasks * attempts)
    assert metrics["trajectory/count"] == len(counting)
    assert metrics["trajectory/failed"] == flat.count("fail")
    assert metrics["success"] == flat.count(1.0) / len(flat)
    assert metrics["return"] == pytest.approx(sum(counting) / len(counting) if counting else math.nan, nan_ok=True)
    low, high = slow_interval(tallies)
    assert metrics["success_low"] == pytest.approx(low, abs=5e-5)
    assert metrics["success_high"] == pytest.approx(high, abs=5e-5)
    for k in (2, 4, 8):
        if k > attempts:
            assert f"pass@{k}" not in metrics
        else:
            wanted = sum(slow_pass_at(k, *tally) for tally in tallies) / num_tasks
            assert metrics[f"pass@{k}"] == pytest.approx(wanted, rel=1e-12)


def test_groups_are_seen_as_they_are_made():
    seen = []
    result = examine(tasks(1.0, 0.0, "fail"), attempts=2, seen=seen.append)
    assert sorted(group.task.id for group in seen) == ["hops-0", "hops-1", "hops-2"]
    assert result.num_failed == 2
    assert len(result.attempts) == 6


def test_a_result_knows_the_versions_that_made_it():
    mixed = Result((group(1.0, versions=(3, 3)), group(0.0, versions=(4,))), 1.0)
    assert mixed.versions == {3, 4}
    assert Result((Group(Task("x", "hops"), (), (Trajectory((), Status.failed),)),), 1.0).versions == set()

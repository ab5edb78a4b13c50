import math
import warnings

import pytest

from turnwise.messages import Message
from turnwise.runs.describe import describe
from turnwise.types import Break, Group, Status, StopReason, Task, Trajectory, Turn


def turn(num_tokens=2, prompt=3, version=5, reward=0.0, stop=StopReason.end_token):
    action = [1] * num_tokens
    return Turn(
        [1] * prompt, action, [-0.5] * num_tokens, [version] * num_tokens, stop, reward, Message("assistant", "")
    )


def attempt(outcome, *turns, status=Status.finished, **marks):
    return Trajectory(turns or (turn(),), status, outcome, marks)


def group(*attempts, name="a", dataset="hops", failed=()):
    return Group(Task(name, dataset), attempts, failed)


def measure(kept=(), dropped=(), version=5):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return describe(kept, dropped, version=version, success_at=1.0)


def test_rewards_and_success_are_over_kept_and_dropped_attempts():
    metrics = measure([group(attempt(1.0), attempt(0.0))], [group(attempt(1.0), attempt(2.0))])
    assert (metrics["reward/mean"], metrics["reward/min"], metrics["reward/max"]) == (1.0, 0.0, 2.0)
    assert metrics["reward/std"] == pytest.approx(math.sqrt(0.5))
    assert metrics["success"] == 0.75


def test_turn_rewards_are_part_of_the_total():
    assert measure([group(attempt(0.5, turn(reward=0.25), turn(reward=0.25)))])["success"] == 1.0


def test_turns_are_not_trajectories():
    """Field bug: metrics counted turns as trajectories."""
    long = attempt(0.0, *(turn(num_tokens=1, prompt=10, reward=0.1) for _ in range(9)))
    short = attempt(1.0, turn(num_tokens=11, prompt=20, reward=0.6, stop=StopReason.length))
    metrics = measure([group(long, short)])
    assert metrics["success"] == 0.5
    assert (metrics["trajectory/count"], metrics["trajectory/turns"], metrics["trajectory/action_tokens"]) == (2, 5, 10)
    assert (metrics["turn/count"], metrics["turn/action_tokens"], metrics["turn/prompt_tokens"]) == (10, 2, 11)
    assert metrics["turn/reward"] == pytest.approx(0.15)
    assert (metrics["stop/end_token"], metrics["stop/length"], metrics["stop/abort"]) == (0.9, 0.1, 0.0)


def test_failed_attempts_are_counted_and_change_nothing_else():
    kept = [group(attempt(1.0), attempt(0.0, status=Status.too_long))]
    crashed = attempt(-9.0, turn(reward=-9.0, num_tokens=50), status=Status.failed, lookups=9.0)
    unopened = Trajectory((), Status.prompt_too_long)
    metrics = measure([group(*kept[0].trajectories, failed=(crashed, crashed))], [group(failed=(unopened,))])
    without = measure(kept, [group()]).items()
    changed = {name for name, value in without if metrics[name] != value and not math.isnan(value)}
    assert changed == {
        "trajectory/failed",
        "status/failed",
        "status/prompt_too_long",
        "failure/rate",
        "failure/worst_task",
    }
    assert metrics["trajectory/failed"] == 3
    assert metrics["failure/rate"] == pytest.approx(2 / 5)  # a prompt that does not fit is no failure
    assert metrics["failure/worst_task"] == 0.5
    assert {name: metrics[f"status/{name}"] for name in Status} == {
        "finished": 1,
        "too_many_turns": 0,
        "too_long": 1,
        "observation_too_large": 0,
        "prompt_too_long": 1,
        "timed_out": 0,
        "failed": 2,
        "penalised": 0,
    }
    assert metrics.keys().isdisjoint({"marks/lookups"})


def test_groups():
    mixed, equal, lone = group(attempt(1.0), attempt(0.0)), group(attempt(0.1), attempt(0.1)), group(attempt(1.0))
    metrics = measure([mixed, equal, lone], [equal])
    assert (metrics["groups/kept"], metrics["groups/dropped"], metrics["groups/zero_variance"]) == (3, 1, 2)


def test_groups_whose_attempts_sampled_the_same_are_identical():
    same = group(attempt(1.0, turn(), turn(3)), attempt(0.0, turn(), turn(3)))
    other, lone = group(attempt(1.0, turn(), turn(3)), attempt(1.0, turn(), turn(2))), group(attempt(1.0))
    assert measure([same, other, lone], [same])["groups/identical"] == 2


def test_groups_of_each_dataset_that_are_kept():
    metrics = measure([group(attempt(1.0)), group(attempt(1.0))], [group(attempt(1.0), dataset="maze")])
    assert (metrics["groups/kept/hops"], metrics["groups/kept/maze"]) == (2, 0)


def said(text, stop):
    return Turn([1], [9], [-0.5], [5], stop, 0.0, Message("assistant", text))


def test_an_end_is_missed_where_sampling_goes_on_after_a_control_token():
    texts = ["cold<|im_end|>x", "a</s>b", "<｜end▁of▁sentence｜>", "a < b || c", "plain"]
    cut = [attempt(1.0, said(text, StopReason.length)) for text in texts]
    ended = [attempt(1.0, said("<|im_end|>", StopReason.end_token))]
    assert measure([group(*cut, *ended)])["stop/missed_end"] == 3 / 6


def test_the_longest_prompt_that_did_not_fit():
    long = [Trajectory((), Status.prompt_too_long, marks={"prompt_tokens": size}) for size in (70.0, 90.0)]
    assert measure([], [group(failed=long)])["turn/prompt_tokens_refused"] == 90
    assert measure([group(attempt(1.0, prompt_tokens=5.0))])["turn/prompt_tokens_refused"] == 0


def test_lag_is_over_the_tokens_that_train():
    kept = [group(attempt(1.0, turn(num_tokens=3, version=5), turn(num_tokens=1, version=1), turn(num_tokens=0)))]
    metrics = measure(kept, [group(attempt(1.0, turn(version=0)))], version=5)
    assert (metrics["lag/mean"], metrics["lag/max"]) == (1.0, 4.0)


def test_marks_are_over_the_attempts_that_have_them():
    metrics = measure([group(attempt(1.0, lookups=2.0), attempt(1.0, lookups=4.0, b=1.0))], [group(attempt(0.0))])
    assert (metrics["marks/lookups"], metrics["marks/b"]) == (3.0, 1.0)


def test_datasets_have_their_own_numbers_when_there_are_several():
    hops, maze = group(attempt(1.0), attempt(0.0)), group(attempt(3.0), dataset="maze")
    assert not any(name.startswith("success/") or name == "reward/hops" for name in measure([hops], [hops]))
    metrics = measure([hops], [maze])
    assert (metrics["success/hops"], metrics["success/maze"]) == (0.5, 1.0)
    assert (metrics["reward/hops"], metrics["reward/maze"]) == (0.5, 3.0)


def test_a_dataset_cannot_take_the_name_of_a_statistic():
    with pytest.raises(ValueError, match="a dataset cannot be called mean"):
        measure([group(attempt(1.0)), group(attempt(1.0), dataset="mean")])


def test_nothing_gives_the_same_names_and_no_warning():
    empty = measure()
    assert empty.keys() == measure([group(attempt(1.0))]).keys() == measure([group()], [group()]).keys()
    assert all(type(value) is float for value in empty.values())
    undefined = {name for name, value in empty.items() if math.isnan(value)}
    assert {"reward/mean", "success", "lag/max", "trajectory/turns", "stop/length"} <= undefined
    assert all(value == 0 for name, value in empty.items() if name not in undefined)


def chain(*prompts, broke=()):
    """Turns with the prompts given, each with action [9], that broke for the reasons given."""
    reasons = (Break.none, *broke)
    return tuple(
        Turn(prompt, [9], [-0.5], [5], StopReason.length, 0.0, Message("assistant", "x"), broke=cause)
        for prompt, cause in zip(prompts, reasons, strict=True)
    )


def test_prefixes_are_of_turns_after_the_first():
    grew = chain([1], [1, 9, 2], [1, 9, 2, 9], broke=("none", "none"))
    broke = chain([1, 2, 3], [1, 2, 4, 4, 4], [7], broke=("template", "history"))
    metrics = measure([group(attempt(1.0, *grew))], [group(attempt(1.0, *broke))])
    assert metrics["prefix/extended"] == 0.5
    assert metrics["prefix/breaks/template"] == 1
    assert metrics["prefix/breaks/history"] == 1
    assert metrics["prefix/breaks/retokenised"] == 0
    assert metrics["prefix/breaks/unknown"] == 0
    assert metrics["prefix/lost_tokens"] == 2 + 6
    assert "prefix/breaks/none" not in metrics


def test_a_break_without_a_recorded_cause_is_counted():
    metrics = measure([group(attempt(1.0, *chain([1], [2], broke=("none",))))])
    assert metrics["prefix/breaks/unknown"] == 1
    assert metrics["prefix/lost_tokens"] == 2


def test_a_prompt_repeats_unless_the_environment_wants_it():
    repeated = chain([1, 2], [1, 2], [1, 2], broke=("template", "history"))
    grew = chain([1], [1, 9, 2], broke=("none",))
    assert measure([group(attempt(1.0, *repeated), attempt(1.0, *grew))])["prefix/repeated"] == 1 / 3


def test_a_first_turn_has_nothing_to_extend():
    metrics = measure([group(attempt(1.0))])
    assert math.isnan(metrics["prefix/extended"])
    assert metrics["prefix/lost_tokens"] == 0


def test_faults_are_a_share_of_turns():
    said = Message("assistant", "{", fault="write JSON")
    faulty = Turn([1, 9], [9], [-0.5], [5], StopReason.length, 0.0, said)
    assert measure([group(attempt(1.0, turn(), faulty))])["turn/faults"] == 0.5

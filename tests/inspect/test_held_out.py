"""Held-out success, and whether two evaluations differ."""

import pytest

from support.reported import evaluate, recorded_run
from turnwise.inspect.held_out import HeldOut, contrast, held_out_of, tallies_of
from turnwise.inspect.run_reader import RunReader
from turnwise.runs.folder import RunFolder
from turnwise.runs.interval import wilson

AFTER = {"e": [1.0], "f": [1.0], "g": [1.0], "h": [0.0]}


def test_evaluations_come_from_the_metrics_in_order(tmp_path):
    run = recorded_run(tmp_path / "run", AFTER)
    run.refresh()
    before, after = held_out_of(run)["sampled"]
    assert (before.version, before.success, before.attempts, before.tasks) == (0, 0.25, 4, 4)
    assert (before.low, before.high) == wilson(1, 4)
    assert (after.version, after.estimate) == (2, (0.75, *wilson(3, 4)))


def test_without_metrics_they_are_counted(tmp_path):
    run = recorded_run(tmp_path / "run", AFTER)
    run.refresh()
    logged = held_out_of(run)
    run.folder.metrics.unlink()
    run.refresh()
    assert held_out_of(run) == logged


def test_a_line_that_makes_no_sense_is_no_evaluation(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    folder.metrics.write_text(
        '{"step": 0, "eval/sampled/success": 7}\n{"step": 1, "eval/greedy/success": 0.5, "eval/greedy/success_low": 2, '
        '"eval/greedy/attempts": -1e400}\n'
    )
    run = RunReader(folder)
    run.refresh()
    [one] = held_out_of(run)["greedy"]
    assert (one.version, one.success, one.attempts) == (1, 0.5, 0)
    assert one.low != one.low
    assert "sampled" not in held_out_of(run)


def test_an_attempt_that_failed_is_counted_and_has_not_succeeded(tmp_path):
    run = recorded_run(tmp_path / "run", {"e": [1.0, 0.0, 0.0], "f": [1.0, 1.0, 0.9999999]})
    run.refresh()
    assert tallies_of(run, "sampled", 2) == {("hops", "e"): (1, 3), ("hops", "f"): (3, 3)}
    assert tallies_of(run, "greedy", 2) == {}


def found(kind, success, count):
    return HeldOut(kind, 1, success, *wilson(success * count, count), count, count)


def tallies(name, successes, failures):
    numbers = enumerate([1] * successes + [0] * failures)
    return {("hops", f"{name}{number}"): (success, 1) for number, success in numbers}


def test_the_same_tasks_are_compared_one_by_one():
    first, second = tallies("t", 3, 9), tallies("t", 8, 4)
    result = contrast(found("sampled", 0.25, 12), found("sampled", 8 / 12, 12), first, second)
    assert result.paired_tasks == 12
    assert (result.better, result.worse) == (5, 0)
    assert result.p_value == pytest.approx(2 / 32)
    assert not result.is_clear
    assert result.change == pytest.approx(5 / 12)
    assert result.low < result.change < result.high


def test_other_tasks_are_compared_as_two_proportions():
    first, second = tallies("t", 50, 50), tallies("u", 65, 35)
    result = contrast(found("sampled", 0.5, 100), found("sampled", 0.65, 100), first, second)
    assert result.paired_tasks == 0
    assert result.p_value == pytest.approx(0.0319, abs=1e-4)
    assert result.is_clear
    # without attempts on disk, the counts of the metrics are taken
    assert contrast(found("sampled", 0.5, 100), found("sampled", 0.65, 100), {}, {}) == result


def test_a_few_tasks_in_common_do_not_make_pairs():
    first, second = tallies("t", 5, 5), {**tallies("u", 3, 3), **tallies("t", 4, 0)}
    assert contrast(found("sampled", 0.5, 10), found("sampled", 0.7, 10), first, second).paired_tasks == 0


def test_a_smaller_evaluation_is_compared_on_its_tasks():
    first, second = tallies("t", 6, 94), tallies("t", 3, 2)
    result = contrast(found("sampled", 0.06, 100), found("sampled", 0.6, 5), first, second)
    assert (result.paired_tasks, result.better, result.worse) == (5, 0, 2)
    assert result.change == pytest.approx(-0.4)  # of these five tasks, not of all


def test_without_intervals_nothing_can_be_said():
    unknown = HeldOut("sampled", 1, 0.5, float("nan"), float("nan"), 0, 0)
    assert contrast(unknown, found("sampled", 0.5, 10), {}, {}) is None


def test_evaluations_of_every_kind_are_listed(tmp_path):
    run = recorded_run(tmp_path / "run", AFTER)
    evaluate(run.folder, 2, "other", {"e": [1.0]})
    run.refresh()
    assert list(held_out_of(run)) == ["sampled", "other"]

"""Recorded attempts scored again by changed environments."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.replaying import record_run
from support.running import SilentScreen
from turnwise.assemble.objective import estimate_of, weighting_of
from turnwise.assemble.run import open_environments
from turnwise.inspect.rescore import credited, rescore
from turnwise.inspect.rescore_report import RescoreReport
from turnwise.recipe.schema import Recipe
from turnwise.runs.archive import read_step, step_path
from turnwise.runs.folder import RunFolder
from turnwise.runs.recorded_archive import RecordedArchive
from turnwise.runs.trust import recipe_of_run
from turnwise.types import Status, turns_of


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("recorded"), "steps=2")


def recipe_of(run: Path, *overrides: str) -> Recipe:
    return recipe_of_run(RunFolder.open(run), overrides, "needless")


def scored(run: Path, name: str = "", *overrides: str, **how: Any) -> RescoreReport:
    named = [f'env.0.name="support.rescoring:{name}"', 'env.0.dataset="hops"'] if name else []
    recipe = recipe_of(run, *named, "rollout.limits.call_seconds=5", *overrides)

    async def work() -> RescoreReport:
        with open_environments(recipe) as environments:
            return await rescore(
                recipe, RecordedArchive.open(run, how.pop("step", None)), environments, SilentScreen(), **how
            )

    return asyncio.run(work())


def content(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def attempts_in(run: Path, step: int) -> list[Any]:
    groups = [record.group for record in read_step(step_path(run / "archive", step))]
    return [attempt for group in groups for attempt in (*group.trajectories, *group.failed)]


def test_the_same_environment_pays_what_it_paid_and_nothing_in_the_run_changes(recorded: Path) -> None:
    before = content(recorded)
    report = scored(recorded)
    assert len(report.attempts) == len(attempts_in(recorded, 1)) + len(attempts_in(recorded, 2))
    assert not report.changed
    assert not report.notes
    assert all(one.difference == "" and one.status_before == one.status_after for one in report.attempts)
    assert [one.before for one in report.attempts if one.key.step == 1] == [
        attempt.total for attempt in attempts_in(recorded, 1)
    ]
    assert content(recorded) == before


def test_a_changed_reward_is_paid_for_the_same_messages(recorded: Path) -> None:
    report = scored(recorded, "Generous")
    totals = [(attempt.outcome, attempt.total) for attempt in attempts_in(recorded, 1) + attempts_in(recorded, 2)]
    assert [one.after for one in report.attempts] == [
        pytest.approx(outcome + 2 * (total - outcome) + 0.125) for outcome, total in totals
    ]
    assert not any(one.difference for one in report.attempts)


def test_a_setting_can_change_it_too(recorded: Path) -> None:
    report = scored(recorded, "", "env.0.settings.link_reward=0.5")
    assert report.changed
    assert all(one.change == pytest.approx(0.25) for one in report.changed)


@pytest.mark.parametrize(
    ("name", "differed"),
    [("Wordy", "was answered otherwise"), ("Reworded", "opened otherwise"), ("Hasty", "finished it")],
)
def test_other_answers_are_counted_and_the_reward_is_computed(recorded: Path, name: str, differed: str) -> None:
    report = scored(recorded, name)
    assert any(differed in one.difference for one in report.attempts)
    assert len(report.counted) == len(report.attempts)


def test_an_environment_that_refuses_tasks_costs_those_attempts_only(recorded: Path) -> None:
    report = scored(recorded, "Choosy")
    failed = [one for one in report.attempts if one.status_after is Status.failed]
    assert 0 < len(failed) < len(report.attempts)
    assert all("this store is closed" in one.failure for one in failed)
    assert "\x1b" not in "\n".join(report.describe())
    assert not report.changed


@pytest.mark.parametrize(("name", "status"), [("Raising", Status.failed), ("Hanging", Status.timed_out)])
def test_an_environment_that_raises_or_hangs_has_no_rewards_and_says_why(
    recorded: Path, name: str, status: Status
) -> None:
    report = scored(recorded, name, "rollout.limits.call_seconds=0.1", "rollout.failures.retries=0", step=1)
    assert {one.status_after for one in report.attempts} == {status}
    lines = report.describe()
    assert lines[1] == f"{len(report.attempts)} attempts have no reward now, of which {len(report.attempts)} had one"
    assert lines[-1] == "no attempt has a reward before and after"


def test_failures_that_are_paid_are_paid_again(recorded: Path) -> None:
    pay = "rollout.failures.on_failure={name='pay', value=-2.0}"
    report = scored(recorded, "Raising", pay, "rollout.failures.retries=0", step=1)
    assert {(one.after, one.status_after) for one in report.attempts} == {(-2.0, Status.penalised)}


def test_a_limit_takes_whole_groups(recorded: Path) -> None:
    assert len(scored(recorded, limit=5).attempts) == 8
    assert {one.key.step for one in scored(recorded, step=2).attempts} == {2}


def test_a_dataset_that_nobody_opens_is_refused(recorded: Path) -> None:
    with pytest.raises(ValueError, match=r"is of the dataset hops, and the environments of the recipe are Generous"):
        scored(recorded, "", 'env.0.name="support.rescoring:Generous"')


def test_groups_that_an_agent_drives_are_left_out(recorded: Path) -> None:
    with pytest.raises(ValueError, match="no attempt that can be scored again.*an agent drives them"):
        scored(recorded, "", 'env.0.agent="support.rescoring:Hops"')


def test_the_groups_are_written_with_their_new_rewards_and_credit(recorded: Path, tmp_path: Path) -> None:
    report = scored(recorded, "Generous", archive=tmp_path / "archive")
    recipe = recipe_of(recorded)
    for step in (1, 2):
        before, after = (
            read_step(step_path(recorded / "archive", step)),
            read_step(step_path(tmp_path / "archive", step)),
        )
        assert [one.group.task for one in before] == [one.group.task for one in after]
        paid = [one.after for one in report.attempts if one.key.step == step]
        assert [t.total for one in after for t in (*one.group.trajectories, *one.group.failed)] == paid
        kept = [record.group for record in after if record.kept]
        credit = [array for record in after for array in record.credit]
        for found, wanted in zip(credit, estimate_of(recipe)(kept, {}), strict=True):
            np.testing.assert_array_equal(found, np.asarray(wanted, np.float32))
        weights = [array for record in after for array in record.weights]
        for found, wanted in zip(weights, weighting_of(recipe)(kept), strict=True):
            np.testing.assert_array_equal(found, np.asarray(wanted, np.float32))
        tokens = [[turn.action.tolist() for turn in turns_of([one.group])] for one in before]
        assert tokens == [[turn.action.tolist() for turn in turns_of([one.group])] for one in after]


def test_the_same_rewards_have_the_recorded_credit(recorded: Path) -> None:
    recipe, before = recipe_of(recorded), read_step(step_path(recorded / "archive", 1))
    after, note = credited(recipe, 1, [record.group for record in before])
    assert note == ""
    assert [record.kept for record in after] == [record.kept for record in before]
    for one, other in zip(before, after, strict=True):
        assert [array.tolist() for array in one.credit] == [array.tolist() for array in other.credit]
        assert [array.tolist() for array in one.weights] == [array.tolist() for array in other.weights]


def test_credit_for_which_models_are_needed_is_left_out(recorded: Path) -> None:
    groups = [record.group for record in read_step(step_path(recorded / "archive", 1))]
    gae = recipe_of(recorded, "credit={name='gae'}", "filter={name='keep_all'}")
    records, note = credited(gae, 1, groups)
    assert not any(record.kept for record in records)
    assert "without credit" in note
    assert "values" in note
    maxrl = recipe_of(recorded, "credit={name='maxrl'}")
    low = [
        type(g)(g.task, tuple(type(t)(t.turns, t.status, -3.0 - n) for n, t in enumerate(g.trajectories)))
        for g in groups
    ]
    records, note = credited(maxrl, 1, low)
    assert not any(record.kept for record in records)
    assert note.startswith("groups of step 1 are written without credit: ")

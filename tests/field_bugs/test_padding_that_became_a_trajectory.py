"""Padding that became a trajectory.

Elsewhere the rows of a step were padded to a multiple of the number of ranks with copies of the first rows, whose loss
mask was zero, and a flag on rows said where trajectories end. The flag was padded with zeros, so the padding was a
trajectory without an end, in the statistics and denominators of the step.
"""

from dataclasses import replace

import numpy as np
import pytest

from field_bugs.one_step import step_on
from support.making import make_group, make_turn
from turnwise.credit.weighting import WEIGHTINGS
from turnwise.interop.skyrl import from_generator_output, to_generator_output
from turnwise.plan.pack import pack
from turnwise.types import Group, Status, Task, Trajectory, turns_of

RANKS = 8
GROUPS = [
    make_group([1.0, 0.0], num_turns=[2, 3], name="a"),
    make_group([1.0, 1.0, 0.5], num_turns=[1, 3, 1], name="b"),
]
OF_TRAJECTORIES = ("trajectory/count", "trajectory/action_tokens", "reward/mean", "reward/std", "success")


def check_padding_is_nothing(pad, credit, weighting):
    """A step on padded groups has the loss, gradient, credit, weights and statistics of one on the groups alone."""
    assert len(list(turns_of(pad(GROUPS)))) % RANKS == 0
    settings = (f"credit.name={credit}", f"weighting.name={weighting}")
    alone, padded = step_on(GROUPS, *settings), step_on(pad(GROUPS), *settings)
    [wanted], [found] = alone.updates, padded.updates
    assert wanted.metrics["gradient_norm"] > 1e-3
    changed = [name for name in OF_TRAJECTORIES if padded.metrics[name] != alone.metrics[name]]
    for name in ("credit", "weights"):
        if not np.array_equal(*(np.concatenate(getattr(update, name)) for update in (wanted, found))):
            changed.append(name)
    if any((found.gradient[name] != wanted.gradient[name]).any() for name in wanted.gradient):
        changed.append("gradient")
    if (found.metrics["loss"], found.num_tokens) != (wanted.metrics["loss"], wanted.num_tokens):
        changed.append("loss")
    assert not changed, f"padding has changed: {', '.join(changed)}"


def with_empty_turns(groups):
    """As many turns without an action as are missing, at the end of attempts: all that padding can be here."""
    missing = -len(list(turns_of(groups))) % RANKS
    attempt = groups[-1].trajectories[-1]
    empty = [make_turn([1, 2, 3], []) for _ in range(missing)]
    padded = replace(attempt, turns=(*attempt.turns, *empty))
    return [*groups[:-1], replace(groups[-1], trajectories=(*groups[-1].trajectories[:-1], padded))]


def padded_rows(groups):
    """Rows with a flag where trajectories end; the rows that are missing copy the first ones, with all masks zero."""
    rows = to_generator_output(groups)
    missing = -len(rows["response_ids"]) % RANKS
    for key in ("prompt_token_ids", "response_ids", "stop_reasons", "trajectory_ids"):
        rows[key] = rows[key] + rows[key][:missing]
    for key in ("rewards", "loss_masks", "rollout_logprobs"):
        rows[key] = rows[key] + [[0] * len(row) for row in rows[key][:missing]]
    rows["is_last_step"] = rows["is_last_step"] + [False] * missing
    return rows


def with_a_padding_trajectory(groups):
    """The padded rows as groups again, where a trajectory begins after every row that is flagged as a last one."""
    rows = padded_rows(groups)
    trajectory_of = np.cumsum([False, *rows["is_last_step"][:-1]])
    made: dict[str, list[Trajectory]] = {}
    for number in range(trajectory_of[-1] + 1):
        members = np.flatnonzero(trajectory_of == number)
        turns = [turn_of(rows, row) for row in members]
        is_padding = not any(rows["is_last_step"][row] for row in members)
        task = "pad0" if is_padding else rows["trajectory_ids"][members[0]].instance_id
        made.setdefault(task, []).append(Trajectory(tuple(turns), Status.finished))
    return [Group(Task(task, "test"), tuple(attempts)) for task, attempts in made.items()]


def turn_of(rows, row):
    """A row as a turn; one whose mask is zero has no action."""
    action, logprobs = rows["response_ids"][row], rows["rollout_logprobs"][row]
    trained = all(rows["loss_masks"][row])
    return make_turn(
        rows["prompt_token_ids"][row],
        action if trained else [],
        logprobs=logprobs if trained else [],
        reward=sum(rows["rewards"][row]),
    )


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("credit", ["grpo", "reinforce"])
def test_turns_without_an_action_are_nothing(credit, weighting):
    check_padding_is_nothing(with_empty_turns, credit, weighting)


@pytest.mark.parametrize("budget", [12, 40, 1000])
def test_plans_hold_turns_and_nothing_else(budget):
    turns = list(turns_of(with_empty_turns(GROUPS)))
    plans = pack(turns, budget)
    real = sum(len(turn.prompt) + len(turn.action) for turn in turns if len(turn.action))
    assert sum(plan.num_tokens for plan in plans) == real


@pytest.mark.parametrize(
    ("credit", "changed"),
    [
        ("grpo", "trajectory/count, trajectory/action_tokens, reward/mean, reward/std, success"),
        ("reinforce", "trajectory/count, .*success, credit, gradient, loss"),  # its baseline is that of the step
    ],
)
def test_a_padding_trajectory_is_caught(credit, changed):
    with pytest.raises(AssertionError, match=f"padding has changed: {changed}"):
        check_padding_is_nothing(with_a_padding_trajectory, credit, "token_mean")


def test_a_padded_flag_is_refused_where_it_is_read():
    assert len(from_generator_output(to_generator_output(GROUPS))) == len(GROUPS)
    with pytest.raises(ValueError, match="is_last_step"):
        from_generator_output(padded_rows(GROUPS))

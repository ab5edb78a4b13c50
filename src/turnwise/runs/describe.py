"""Metrics of groups: what a step's attempts were like, per trajectory and per turn, never mixed under one name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from turnwise.tokens import lost_tokens
from turnwise.types import Break, Group, Status, StopReason, Trajectory, Turn, by_seat, turns_of

TOOL_ERRORS = re.compile(r"tools/[^/]+/errors")
"""Marks that environments made of tools leave behind an error inside one."""
STATISTICS = ("mean", "std", "min", "max")
CONTROL_TOKEN = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|</s>|<eos>|<end_of_turn>")
"""How chat templates spell the tokens that end a turn."""
PROMPT_TOKENS = "prompt_tokens"
"""Mark of an attempt whose first prompt did not fit: its length."""


def describe(kept: Sequence[Group], dropped: Sequence[Group], *, version: int, success_at: float) -> dict[str, float]:
    """The metrics of one step's groups.

    Rewards, success, lengths, stops and marks are over all attempts that count, of kept and dropped groups together:
    a filter that drops groups in which everything succeeded must not bias the curve. Failed attempts appear in the
    statuses and in trajectory/failed only. Lag is over the action tokens that train, those of kept groups; `version`
    is the version being trained. A mean over nothing is NaN.
    """
    groups = [*kept, *dropped]
    attempts = [trajectory for group in groups for trajectory in group.trajectories]
    metrics = _rewards(attempts, success_at)
    metrics |= _datasets(groups, kept, success_at)
    metrics |= _trajectories(attempts)
    metrics["trajectory/failed"] = float(sum(len(group.failed) for group in groups))
    metrics |= _turns(groups)
    metrics |= _prefixes(attempts)
    metrics |= _statuses(groups)
    metrics |= _failures(groups)
    metrics["groups/kept"] = float(len(kept))
    metrics["groups/dropped"] = float(len(dropped))
    metrics["groups/zero_variance"] = float(sum(map(_is_equal, kept)))
    metrics["groups/identical"] = float(sum(map(_is_identical, groups)))
    metrics |= _lag(kept, version)
    metrics |= _tools(groups)
    return metrics | _marks(attempts)


def _rewards(attempts: Sequence[Trajectory], success_at: float) -> dict[str, float]:
    totals = np.array([trajectory.total for trajectory in attempts], np.float64)
    values = (totals.mean(), totals.std(), totals.min(), totals.max()) if attempts else (math.nan,) * 4
    rewards = {f"reward/{name}": float(value) for name, value in zip(STATISTICS, values, strict=True)}
    return rewards | {"success": _mean(totals >= success_at)}


def _datasets(groups: Sequence[Group], kept: Sequence[Group], success_at: float) -> dict[str, float]:
    """Groups trained on, success and reward of each dataset, when there are several."""
    names = sorted({group.task.dataset for group in groups})
    if len(names) < 2:
        return {}
    metrics = {}
    for name in names:
        if name in STATISTICS:
            raise ValueError(
                f"a dataset cannot be called {name}: reward/{name} is a metric already; rename the dataset"
            )
        totals = [t.total for group in groups if group.task.dataset == name for t in group.trajectories]
        metrics[f"groups/kept/{name}"] = float(sum(group.task.dataset == name for group in kept))
        metrics[f"success/{name}"] = _mean(total >= success_at for total in totals)
        metrics[f"reward/{name}"] = _mean(totals)
    return metrics


def _trajectories(attempts: Sequence[Trajectory]) -> dict[str, float]:
    return {
        "trajectory/count": float(len(attempts)),
        "trajectory/turns": _mean(len(trajectory.turns) for trajectory in attempts),
        "trajectory/action_tokens": _mean(trajectory.num_action_tokens for trajectory in attempts),
    }


def _turns(groups: Sequence[Group]) -> dict[str, float]:
    turns = list(turns_of(groups))
    metrics = {
        "turn/count": float(len(turns)),
        "turn/action_tokens": _mean(len(turn.action) for turn in turns),
        "turn/reward": _mean(turn.reward for turn in turns),
        "turn/prompt_tokens": _mean(len(turn.prompt) for turn in turns),
        "turn/faults": _mean(bool(turn.said.faults) for turn in turns),
    }
    metrics["stop/missed_end"] = _mean(_missed_end(turn) for turn in turns)
    return metrics | {f"stop/{reason}": _mean(turn.stop is reason for turn in turns) for reason in StopReason}


def _missed_end(turn: Turn) -> bool:
    """Whether the model wrote a control token, and sampling went on up to the token limit all the same."""
    return turn.stop is StopReason.length and CONTROL_TOKEN.search(turn.said.content) is not None


def _is_equal(group: Group) -> bool:
    """Whether all attempts of a group that are compared with each other have the same total."""
    return all(len({trajectory.total for trajectory in part.trajectories}) <= 1 for part in by_seat([group]))


def _is_identical(group: Group) -> bool:
    """Whether all attempts of a group that are compared with each other, two at least, sampled the same tokens."""
    seats = [[[turn.action.tobytes() for turn in one.turns] for one in part.trajectories] for part in by_seat([group])]
    return all(len(sampled) > 1 and all(actions == sampled[0] for actions in sampled) for sampled in seats)


def _prefixes(attempts: Sequence[Trajectory]) -> dict[str, float]:
    """How many of the turns after the first extend the turn before, and what the others cost, by cause."""
    pairs = [pair for trajectory in attempts for pair in pairwise(trajectory.turns)]
    starts = [trajectory.spans[:, 0] for trajectory in attempts]
    extended = [same for start in starts for same in (start[1:] == start[:-1]).tolist()]
    broken = [pair for pair, same in zip(pairs, extended, strict=True) if not same]
    causes = [turn.broke for _, turn in broken]
    return {
        "prefix/extended": 1 - len(broken) / len(pairs) if pairs else math.nan,
        "prefix/lost_tokens": float(sum(lost_tokens(turn, before) for before, turn in broken)),
        "prefix/repeated": _mean(_is_repeated(turn, before) for before, turn in pairs),
        **{f"prefix/breaks/{cause}": float(causes.count(cause)) for cause in Break if cause is not Break.none},
    }


def _is_repeated(turn: Turn, before: Turn) -> bool:
    """Whether a prompt is the one of the turn before once more, although the environment did not ask for that."""
    same_length = len(turn.prompt) == len(before.prompt)  # which comparing arrays would find out ten times slower
    return same_length and turn.broke is not Break.history and np.array_equal(turn.prompt, before.prompt)


def _statuses(groups: Sequence[Group]) -> dict[str, float]:
    """How many attempts ended in each way, those that do not count included, and the longest prompt that did not
    fit."""
    statuses = [trajectory.status for group in groups for trajectory in (*group.trajectories, *group.failed)]
    lengths = [t.marks[PROMPT_TOKENS] for group in groups for t in group.failed if PROMPT_TOKENS in t.marks]
    longest = {"turn/prompt_tokens_refused": max(lengths, default=0.0)}
    return {f"status/{status}": float(statuses.count(status)) for status in Status} | longest


def _failures(groups: Sequence[Group]) -> dict[str, float]:
    """Share of attempts that failed for good, penalised ones included, and of those at the task where it is largest."""
    shares = [failure_share(group) for group in groups]
    sizes = [len(group.trajectories) + len(group.failed) for group in groups]
    return {
        "failure/rate": float(np.average(shares, weights=sizes)) if sum(sizes) else math.nan,
        "failure/worst_task": max(shares, default=math.nan),
    }


def failure_share(group: Group) -> float:
    """Share of a group's attempts that failed, timed out or were penalised for it."""
    attempts = (*group.trajectories, *group.failed)
    broken = (Status.failed, Status.timed_out, Status.penalised)
    return sum(trajectory.status in broken for trajectory in attempts) / max(1, len(attempts))


def _lag(kept: Sequence[Group], version: int) -> dict[str, float]:
    versions = [turn.versions for turn in turns_of(kept) if len(turn.versions)]
    if not versions:
        return {"lag/mean": math.nan, "lag/max": math.nan}
    lag = version - np.concatenate(versions).astype(np.int64)
    return {"lag/mean": float(lag.mean()), "lag/max": float(lag.max())}


def _tools(groups: Sequence[Group]) -> dict[str, float]:
    """Errors inside each tool that had some: a sum over all attempts, those that do not count included."""
    sums: dict[str, float] = {}
    for group in groups:
        for trajectory in (*group.trajectories, *group.failed):
            for name, value in trajectory.marks.items():
                if TOOL_ERRORS.fullmatch(name):
                    sums[name] = sums.get(name, 0.0) + value
    return dict(sorted(sums.items()))


def _marks(attempts: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each mark over the attempts that have it; errors inside tools are counted by themselves."""
    values: dict[str, list[float]] = {}
    for trajectory in attempts:
        for name, value in trajectory.marks.items():
            if not TOOL_ERRORS.fullmatch(name):
                values.setdefault(name, []).append(value)
    return {f"marks/{name}": _mean(values[name]) for name in sorted(values)}


def _mean(values: Iterable[float]) -> float:
    array = np.fromiter(values, np.float64)
    return float(array.mean()) if len(array) else math.nan

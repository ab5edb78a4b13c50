"""Checks of what updates do: a policy that breaks, ratios that leave their range, samples that are too old."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from turnwise.runs.why.attempts import STEPS, holds
from turnwise.runs.why.check import Check, Evidence, Threshold
from turnwise.runs.why.history import mean


def learning_rate(evidence: Evidence) -> str | None:
    """The policy breaks: non-finite updates, ratios far from 1, success that falls, or behaviour that jumps."""
    return (
        nonfinite_updates(evidence)
        or ratio_spike(evidence)
        or fallen_success(evidence)
        or cut_off_at_once(evidence)
        or lost_entropy(evidence)
    )


def nonfinite_updates(evidence: Evidence) -> str | None:
    skipped = evidence.history.training.latest("skipped")
    if not skipped > 0:
        return None
    return f"{skipped:.0%} of the updates of the last step had a loss or gradient that is not finite."


def ratio_spike(evidence: Evidence) -> str | None:
    limits = evidence.limits
    found = evidence.history.training.last("ratio", int(limits["ratio_steps"]))
    if evidence.settings["max_lag"] or not holds(np.abs(found - 1), limits["ratio_steps"], limits["ratio"]):
        return None
    return f"the mean ratio of new to old probabilities was {mean(found):.2f} over the last {len(found)} steps, not 1."


def fallen_success(evidence: Evidence) -> str | None:
    """Success of the last steps far below the best before, by more than chance explains. A longer stretch of steps
    shows a smaller fall."""
    columns, limits = evidence.history.training, evidence.limits
    # The attempts at a task may all succeed or all fail, so a group counts once.
    success, groups = columns.all("success"), np.nan_to_num(columns.all("groups/kept") + columns.all("groups/dropped"))
    for steps in (int(limits["steps"] * times) for times in (1, 2, 4)):
        if len(success) <= steps or not np.isfinite(success[-steps:]).all():
            return None
        now, size_now = mean(success[-steps:]), float(groups[-steps:].sum())
        known = [best_before(evidence, success[:-steps], groups[:-steps]), *before_training(evidence)]
        for then, size_then, where in known:
            fall = limits["sigmas"] * standard_error(then, size_then, now, size_now)
            if now <= limits["part"] * then and then - now >= fall:
                return f"success fell from {then:.2f} {where} to {now:.2f} in the last {steps} steps."
    return None


def best_before(
    evidence: Evidence, success: NDArray[np.float64], groups: NDArray[np.float64]
) -> tuple[float, float, str]:
    """(success, groups, where) of the best stretch of earlier steps."""
    size = min(int(evidence.limits["before"]), len(success))
    ones = np.ones(size)
    sizes = np.convolve(groups, ones, "valid")
    means = np.convolve(np.nan_to_num(success * groups), ones, "valid") / np.maximum(sizes, 1e-9)
    best = int(means.argmax())
    steps = evidence.history.training.steps[best : best + size]
    where = f"in step {steps[0]}" if size == 1 else f"in steps {steps[0]} to {steps[-1]}"
    return float(means[best]), float(sizes[best]), where


def before_training(evidence: Evidence) -> list[tuple[float, float, str]]:
    """The same of the evaluation before training, if it is known."""
    evaluations = evidence.history.evaluations
    if not evaluations.steps or evaluations.steps[0] != 0:
        return []
    success, tasks = (float(evaluations.all(f"eval/sampled/{name}")[0]) for name in ("success", "tasks"))
    return [(success, tasks, "before training")] if math.isfinite(success) and tasks > 0 else []


def standard_error(one: float, size: float, other: float, other_size: float) -> float:
    """Of the difference between two shares."""
    size, other_size = max(size, 1.0), max(other_size, 1.0)
    pooled = (one * size + other * other_size) / (size + other_size)
    return math.sqrt(max(pooled * (1 - pooled), 1e-4) * (1 / size + 1 / other_size))


def cut_off_at_once(evidence: Evidence) -> str | None:
    """Actions that ended by themselves run into the token limit all of a sudden."""
    limits = evidence.limits
    cut = evidence.history.training.last("stop/length", 2 + int(limits["jump_steps"]))
    if len(cut) < 3 or not holds(cut[-2:], 2, limits["jump_to"]) or progresses(evidence):
        return None
    low = float(np.nanmin(cut[:-2])) if np.isfinite(cut[:-2]).any() else math.nan
    if not low <= limits["jump_from"]:
        return None
    return f"the share of turns cut off by the token limit jumped from {low:.2f} to {cut[-1]:.2f} within a few steps."


def lost_entropy(evidence: Evidence) -> str | None:
    """Entropy that falls to almost nothing, or multiplies, while rewards do not rise."""
    limits, entropy = evidence.limits, evidence.history.training.all("entropy")
    known = entropy[np.isfinite(entropy)]
    if len(known) < 3 or progresses(evidence):
        return None
    first, last = float(known[:2].mean()), known[-2:]
    fell = first >= limits["entropy"] and bool((last <= limits["fall"] * first).all())
    rose = first >= limits["entropy"] and bool((last >= limits["rise"] * first).all())
    if not (fell or rose):
        return None
    return f"entropy went from {first:.2g} to {last[-1]:.2g} nats, and rewards did not rise."


def progresses(evidence: Evidence) -> bool:
    """Whether rewards rise, or success is high already."""
    columns, limits = evidence.history.training, evidence.limits
    reward, deviation, success = (columns.all(name) for name in ("reward/mean", "reward/std", "success"))
    rise = mean(reward[-3:]) - mean(reward[:3])
    return mean(success[-3:]) >= limits["solved"] or rise > limits["progress"] * max(mean(deviation[:3]), 1e-9)


def entropy_bonus(evidence: Evidence) -> str | None:
    """Entropy grows because it is paid for."""
    limits, entropy = evidence.limits, evidence.history.training.all("entropy")
    known = entropy[np.isfinite(entropy)]
    if not evidence.settings["entropy"] or len(known) < 2 + limits["steps"] or progresses(evidence):
        return None
    first, last = float(known[:2].mean()), known[-int(limits["steps"]) :]
    if first < limits["entropy"] or not holds(last, limits["steps"], limits["rise"] * first):
        return None
    return f"with {evidence.settings.named('entropy')}, entropy rose from {first:.2g} to {last[-1]:.2g} nats."


def clipping(evidence: Evidence) -> str | None:
    limits = evidence.limits
    found = evidence.history.training.last("clipped", int(limits["steps"]))
    if not holds(found, limits["steps"], limits["share"]):
        return None
    return f"the loss cut off the gradient of {mean(found):.0%} of the trained tokens in the last {len(found)} steps."


def gap(evidence: Evidence) -> str | None:
    """The engine's logprobs differ from the learner's by more than rounding explains."""
    limits, settings = evidence.limits, evidence.settings
    found = evidence.history.training.last("gap/mean", int(limits["steps"]))
    known = found[np.isfinite(found)]
    limit = limits[settings["dtype"]]
    if not len(known) or not (known >= limit).all():
        return None
    return (
        f"the engine's logprobs differ from the learner's by {known.mean():.1e} nats on average, with "
        f"{settings.named('dtype')}; {limit:g} is the most that rounding explains."
    )


def lag(evidence: Evidence) -> str | None:
    """Samples are so old that the ratio is no longer near 1."""
    limits, columns, settings = evidence.limits, evidence.history.training, evidence.settings
    steps = int(limits["steps"])
    age, ratio, clipped = (columns.last(name, steps) for name in ("lag/mean", "ratio", "clipped"))
    if not settings["max_lag"] or not holds(age, steps, limits["lag"]):
        return None
    if not (holds(np.abs(ratio - 1), steps, limits["ratio"]) or holds(clipped, steps, limits["clipped"])):
        return None
    return (
        f"with {settings.named('max_lag')}, samples are {mean(age):.1f} versions old on average; the mean ratio is "
        f"{mean(ratio):.2f}, and {mean(clipped):.0%} of the tokens are clipped."
    )


def stale(evidence: Evidence) -> str | None:
    """Samples older than allowed are masked, or dropped with their groups."""
    limits, columns, settings = evidence.limits, evidence.history.training, evidence.settings
    steps = int(limits["steps"])
    masked, turns = columns.last("lag/masked_turns", steps), columns.last("turn/count", steps)
    kept, dropped = columns.last("groups/kept", steps), columns.last("groups/dropped", steps)
    if settings["order"] != "finished":
        return None
    if holds(masked - limits["share"] * turns, steps, 0.0) and turns.all():
        return f"{masked.sum() / turns.sum():.0%} of the turns of the last {steps} steps were too old to train on."
    drops = settings["stale"] == "drop_group" and settings["filter"] == "keep_all"
    if drops and holds(dropped - limits["share"] * (kept + dropped), steps, 0.0):
        return f"{dropped.sum():.0f} of {(kept + dropped).sum():.0f} groups of the last {steps} steps were too old."
    return None


ENTROPY = Threshold(0.02, "nats of entropy at the start, at least")
SOLVED = Threshold(0.8, "success from which nothing is amiss")
PROGRESS = Threshold(
    0.25, "standard deviations by which rewards rise, from the first three steps to the last, if they do"
)
UPDATE_CHECKS = (
    Check(
        name="entropy_bonus",
        cause="The entropy bonus drowns the reward",
        meaning="The policy is paid more for being random than for succeeding.",
        remedy="Lower {entropy}.",
        find=entropy_bonus,
        reads=("entropy", "reward/mean", "reward/std", "success"),
        thresholds={
            "rise": Threshold(1.5, "times the entropy of the first two steps"),
            "entropy": ENTROPY,
            "solved": SOLVED,
            "progress": PROGRESS,
            "steps": Threshold(2, STEPS),
        },
        explains=("learning_rate", "token_limit", "no_end"),
    ),
    Check(
        name="learning_rate",
        cause="The learning rate is too high",
        meaning="An update changed the policy so much that it forgot what it could do.",
        remedy="Divide {learning_rate} by 10 and start from an earlier checkpoint.",
        find=learning_rate,
        reads=(
            "skipped",
            "ratio",
            "success",
            "groups/kept",
            "groups/dropped",
            "stop/length",
            "entropy",
            "reward/mean",
            "reward/std",
            "eval/sampled/success",
            "eval/sampled/tasks",
        ),
        thresholds={
            "ratio": Threshold(0.2, "distance of the mean ratio from 1, without lag"),
            "ratio_steps": Threshold(2, "steps in a row with such a ratio"),
            "part": Threshold(0.5, "part of the best success so far that is left"),
            "sigmas": Threshold(4.5, "standard errors that the fall exceeds, where a group counts as one attempt"),
            "steps": Threshold(3, "steps over which present success is averaged; twice and four times as many too"),
            "before": Threshold(10, "steps over which earlier success is averaged, at most"),
            "jump_from": Threshold(0.3, "or: share of turns cut off, before"),
            "jump_to": Threshold(0.8, "share of turns cut off, in two steps"),
            "jump_steps": Threshold(4, "steps between the two, at most"),
            "fall": Threshold(0.1, "or: part of the first two steps' entropy that is left in two steps"),
            "rise": Threshold(3, "or: times their entropy"),
            "entropy": ENTROPY,
            "solved": SOLVED,
            "progress": PROGRESS,
        },
        explains=("token_limit", "no_end", "equal_groups", "turn_limit", "conversation_too_long", "faults", "clipping"),
    ),
    Check(
        name="clipping",
        cause="Most of the gradient is clipped",
        meaning="The policy leaves the range in which the loss trusts its samples.",
        remedy="Lower {learning_rate}, take fewer updates per step (raise {groups_per_update}), or widen the clip "
        "range in [{clip}].",
        find=clipping,
        reads=("clipped",),
        thresholds={"share": Threshold(0.4, "share of trained tokens"), "steps": Threshold(3, STEPS)},
    ),
    Check(
        name="gap",
        cause="Engine and learner disagree",
        meaning="The learner is trained on probabilities that are not those it was sampled with.",
        remedy='Compare with {engine} = "slots" and {dtype} = "float32"; set {correction} = "token" if the gap '
        "is the engine's rounding. The run stops at {gap_limit}.",
        find=gap,
        reads=("gap/mean",),
        thresholds={
            "float32": Threshold(1e-4, "nats, with float32"),
            "bfloat16": Threshold(0.05, "nats, with bfloat16"),
            "steps": Threshold(3, STEPS),
        },
    ),
    Check(
        name="lag",
        cause="Samples are too old",
        meaning="The policy has moved on since they were sampled, and the gradient is biased or clipped.",
        remedy='Lower {max_lag}, lower {learning_rate}, or set {correction} = "token".',
        find=lag,
        reads=("lag/mean", "ratio", "clipped"),
        thresholds={
            "lag": Threshold(1, "versions, on average"),
            "ratio": Threshold(0.2, "distance of the mean ratio from 1"),
            "clipped": Threshold(0.3, "or: share of tokens clipped"),
            "steps": Threshold(3, STEPS),
        },
        explains=("clipping",),
    ),
    Check(
        name="stale",
        cause="Much of what is sampled is too old to train on",
        meaning="Sampling runs further ahead than the lag allows, so its work is lost.",
        remedy='Raise {max_lag}, or set {order} = "due", which bounds the lag without loss.',
        find=stale,
        reads=("lag/masked_turns", "turn/count", "groups/kept", "groups/dropped"),
        thresholds={"share": Threshold(0.3, "share of turns or groups"), "steps": Threshold(3, STEPS)},
    ),
)

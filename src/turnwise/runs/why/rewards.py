"""Checks of what attempts are paid: no differences to learn from, or none that is kept."""

from __future__ import annotations

import math

import numpy as np

from turnwise.credit.estimators import ESTIMATORS
from turnwise.runs.why.attempts import STEPS, holds
from turnwise.runs.why.check import Check, Evidence, Threshold
from turnwise.runs.why.history import mean


def constant_reward(evidence: Evidence) -> str | None:
    """Every attempt since the start was paid the same."""
    limits, columns, evaluations = evidence.limits, evidence.history.training, evidence.history.evaluations
    stopped = columns.latest("groups/kept") == 0
    if (len(columns) < limits["steps"] and not stopped) or not reads_rewards(evidence):
        return None
    attempts = float(np.nansum(columns.all("trajectory/count")))
    low, high = columns.all("reward/min"), columns.all("reward/max")
    evaluated = evaluations.all("eval/sampled/reward/min"), evaluations.all("eval/sampled/reward/max")
    known = np.concatenate([low, high, *evaluated])
    known = known[np.isfinite(known)]
    if attempts < limits["attempts"] or not len(known) or known.min() != known.max():
        return None
    return f"all {attempts:.0f} attempts of {len(columns)} steps were paid exactly {known[0]:g}."


def equal_groups(evidence: Evidence) -> str | None:
    """No group has taught anything for some steps, and that is not because all is learned."""
    limits, columns = evidence.limits, evidence.history.training
    per_step = columns.latest("groups/kept")
    if not per_step > 0:
        return None
    steps = max(int(limits["steps"]), math.ceil(limits["groups"] / per_step))
    norm = columns.last("gradient_norm", steps)
    kept, equal = columns.last("groups/kept", steps), columns.last("groups/zero_variance", steps)
    solved = mean(columns.last("success", steps)) >= limits["solved"]
    if not holds(-norm, steps, -limits["gradient"]) or not holds(equal - kept, steps, 0.0) or solved:
        return None
    return f"the gradient was 0 in the last {steps} steps: in all {kept.sum():.0f} groups every attempt was paid alike."


def low_temperature(evidence: Evidence) -> str | None:
    """Attempts at a task are equal because they are sampled almost greedily."""
    limits, columns, settings = evidence.limits, evidence.history.training, evidence.settings
    steps = int(limits["steps"])
    groups = columns.last("groups/kept", steps) + columns.last("groups/dropped", steps)
    identical, equal = columns.last("groups/identical", steps), columns.last("groups/zero_variance", steps)
    if settings["temperature"] > limits["temperature"] or len(groups) < steps or not groups.all():
        return None
    kept = columns.last("groups/kept", steps)
    if identical.sum() < limits["identical"] * groups.sum() and equal.sum() < limits["equal"] * kept.sum():
        return None
    held = evidence.history.evaluations.latest("eval/sampled/success")  # at another temperature
    if mean(columns.last("success", steps)) >= limits["solved"] and not held < limits["solved"]:
        return None
    return (
        f"with {settings.named('temperature')}, {identical.sum() / groups.sum():.0%} of the groups of the last {steps} "
        f"steps had only identical attempts, and {equal.sum():.0f} of {kept.sum():.0f} were paid alike."
    )


def dropping_filter(evidence: Evidence) -> str | None:
    """A filter drops nearly all groups, or has dropped all until the run stopped."""
    limits, columns, settings = evidence.limits, evidence.history.training, evidence.settings
    stopped = columns.latest("groups/kept") == 0
    steps = 1 if stopped else int(limits["steps"])
    kept, dropped = columns.last("groups/kept", steps), columns.last("groups/dropped", steps)
    if settings["filter"] == "keep_all" or not holds(dropped - limits["share"] * (kept + dropped), steps, 0.0):
        return None
    where = "before the run stopped" if stopped else f"in the last {steps} steps"
    return (
        f"{settings.named('filter')} dropped {dropped.sum():.0f} of {(kept + dropped).sum():.0f} groups {where}; "
        f"success was {mean(columns.last('success', steps)):.2f}."
    )


def starved_dataset(evidence: Evidence) -> str | None:
    """A dataset is trained on much less than its weight says."""
    limits, columns = evidence.limits, evidence.history.training
    steps, environments = int(limits["steps"]), evidence.settings["environments"]
    if len(environments) < 2 or len(columns) < steps:
        return None
    kept = {each.label: columns.last(f"groups/kept/{each.label}", steps) for each in environments}
    # A step with groups of one dataset only has no numbers by dataset.
    total = float(sum(np.nansum(values) for values in kept.values()))
    weights = sum(each.weight for each in environments)
    for each in environments:
        wanted, found = each.weight / weights, float(np.nansum(kept[each.label]))
        if wanted * total >= limits["groups"] and found < limits["part"] * wanted * total:
            return (
                f"{each.label} has {found:.0f} of the {total:.0f} groups trained on in the last {steps} steps, and "
                f"{wanted:.0%} by its weight."
            )
    return None


def few_tasks(evidence: Evidence) -> str | None:
    """There are few tasks, each was attempted often, and held-out tasks are not solved as well."""
    limits, columns = evidence.limits, evidence.history.training
    distinct, epochs = columns.latest("tasks/distinct"), columns.latest("tasks/epochs")
    if not (distinct <= limits["tasks"] and epochs >= limits["epochs"]):
        return None
    trained, held = mean(columns.last("success", int(limits["steps"]))), held_out(evidence)
    if not math.isnan(held) and not trained - held >= limits["gap"]:
        return None
    beside = "" if math.isnan(held) else f"; success is {trained:.2f} on these and {held:.2f} on held-out tasks"
    return f"there are {distinct:.0f} training tasks, and each was drawn {epochs:.0f} times{beside}."


def overfitting(evidence: Evidence) -> str | None:
    """Success rises on training tasks and does not on held-out ones."""
    limits, columns, evaluations = evidence.limits, evidence.history.training, evidence.history.evaluations
    steps = int(limits["steps"])
    if len(columns) < 2 * steps or len(evaluations) < 2:
        return None
    trained = columns.all("success")
    before, after = mean(trained[:steps]), mean(trained[-steps:])
    first = evaluations.all("eval/sampled/success")[0]
    held, high = evaluations.latest("eval/sampled/success"), evaluations.latest("eval/sampled/success_high")
    recent = evaluations.latest("eval/sampled/version") >= columns.steps[-1] - limits["age"]
    rose = after - before >= limits["rise"] and held - first <= limits["part"] * (after - before)
    if not (recent and rose and after - high >= limits["gap"]):
        return None
    return (
        f"success in training rose from {before:.2f} to {after:.2f}, and on held-out tasks it went from {first:.2f} to "
        f"{held:.2f} (at most {high:.2f} with 95 % confidence)."
    )


def held_out(evidence: Evidence) -> float:
    """Held-out success of weights that were trained; NaN where none has been evaluated lately."""
    evaluations = evidence.history.evaluations
    version = evaluations.latest("eval/sampled/version")
    recent = version > 0 and version >= evidence.history.step - evidence.limits["age"]
    return evaluations.latest("eval/sampled/success") if recent else math.nan


def reads_rewards(evidence: Evidence) -> bool:
    """Whether rewards decide what is learned."""
    estimator = ESTIMATORS.get(evidence.settings["credit"])
    return estimator is None or estimator.reads_rewards


SOLVED = Threshold(0.9, "success from which equal attempts are no fault")
REWARD_CHECKS = (
    Check(
        name="low_temperature",
        cause="The temperature is too low for attempts to differ",
        meaning="Attempts at a task that are equal cannot be compared, so nothing is learned from them.",
        remedy="Set {temperature} to 1, or at least near it.",
        find=low_temperature,
        reads=(
            "groups/kept",
            "groups/dropped",
            "groups/identical",
            "groups/zero_variance",
            "success",
            "eval/sampled/success",
        ),
        thresholds={
            "temperature": Threshold(0.3, "temperature up to which this is looked for"),
            "identical": Threshold(0.5, "share of groups with identical attempts only"),
            "equal": Threshold(0.9, "or: share of groups paid alike"),
            "solved": Threshold(0.9, "success from which that is no fault, in training and in the last evaluation"),
            "steps": Threshold(3, STEPS),
        },
        explains=("equal_groups", "constant_reward", "learning_rate", "filter", "clipping"),
    ),
    Check(
        name="constant_reward",
        cause="The environment pays a constant",
        meaning="All attempts are worth the same, so there is nothing to learn. Either the reward is wrong, or no task "
        "is within reach, or all are solved already.",
        remedy="Try the environment with turnwise play; compare what it pays for a right and for a wrong attempt "
        "({settings}). If it pays as it should, choose other tasks ({tasks}) or train on demonstrations first ({sft}).",
        find=constant_reward,
        reads=(
            "reward/min",
            "reward/max",
            "trajectory/count",
            "groups/kept",
            "eval/sampled/reward/min",
            "eval/sampled/reward/max",
        ),
        thresholds={
            "attempts": Threshold(64, "attempts at least, all of the run"),
            "steps": Threshold(4, "steps at least, unless the run stopped because no group was kept"),
        },
        explains=("equal_groups", "filter"),
    ),
    Check(
        name="equal_groups",
        cause="There is no gradient",
        meaning="Credit compares the attempts at a task, and they are all paid alike: too hard, too easy, or the "
        "reward does not depend on what the model does.",
        remedy="Choose tasks that succeed sometimes ({tasks}), raise {group_size} or {temperature}, or train on "
        "demonstrations first ({sft}).",
        find=equal_groups,
        reads=("gradient_norm", "groups/kept", "groups/zero_variance", "success"),
        thresholds={
            "gradient": Threshold(1e-9, "largest gradient norm that counts as none"),
            "solved": SOLVED,
            "groups": Threshold(40, "groups in these steps, at least"),
            "steps": Threshold(5, STEPS),
        },
    ),
    Check(
        name="filter",
        cause="The filter drops nearly everything",
        meaning="Most of what is sampled is thrown away: the attempts of most groups are paid alike.",
        remedy='Choose tasks that succeed sometimes ({tasks}), raise {group_size}, or set {filter} = "keep_all".',
        find=dropping_filter,
        reads=("groups/kept", "groups/dropped", "success"),
        thresholds={"share": Threshold(0.8, "share of groups dropped"), "steps": Threshold(3, STEPS)},
    ),
    Check(
        name="starved_dataset",
        cause="A dataset is hardly trained on",
        meaning="Its groups are dropped, by the filter or because attempts fail, and others take their place.",
        remedy="Look at its success in the metrics; give it easier tasks ({tasks}), raise its {weight}, or change "
        "{filter}.",
        find=starved_dataset,
        reads=("groups/kept/",),
        thresholds={
            "part": Threshold(0.25, "part of its share by weight"),
            "groups": Threshold(8, "groups that its weight would give it in these steps, at least"),
            "steps": Threshold(5, STEPS),
        },
    ),
    Check(
        name="few_tasks",
        cause="There are too few tasks",
        meaning="The model learns these tasks by heart.",
        remedy="Give more tasks ({tasks} or {data}): hundreds at least.",
        find=few_tasks,
        reads=("tasks/distinct", "tasks/epochs", "success", "eval/sampled/success", "eval/sampled/version"),
        thresholds={
            "tasks": Threshold(16, "training tasks, at most"),
            "epochs": Threshold(4, "draws of each task, at least"),
            "gap": Threshold(0.1, "success in training above held-out success; not asked for without an evaluation"),
            "age": Threshold(10, "steps for which an evaluation is recent"),
            "steps": Threshold(3, "steps over which success in training is averaged"),
        },
        explains=("overfitting",),
    ),
    Check(
        name="overfitting",
        cause="The model overfits",
        meaning="It learns the training tasks, not how to solve such tasks.",
        remedy="Give more or more varied tasks ({tasks} or {data}), train for fewer {steps}, or lower {learning_rate}.",
        find=overfitting,
        reads=(
            "success",
            "eval/sampled/success",
            "eval/sampled/success_high",
            "eval/sampled/version",
        ),
        thresholds={
            "rise": Threshold(0.2, "rise of success in training"),
            "part": Threshold(0.25, "held-out success rose by at most this part of it"),
            "gap": Threshold(0.15, "success in training above the upper end of held-out success"),
            "age": Threshold(10, "steps for which an evaluation is recent"),
            "steps": Threshold(5, "steps over which success in training is averaged"),
        },
    ),
)

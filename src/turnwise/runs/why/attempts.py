"""Checks of how attempts go: prompts that do not fit, actions that do not end, calls that cannot be read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from turnwise.runs.why.check import Check, Evidence, Threshold
from turnwise.runs.why.history import Columns, mean

STEPS = "steps in a row in which it must be so"
NO_REWARD = ("constant_reward", "equal_groups", "turn_limit")
"""What follows where attempts cannot succeed."""


def holds(values: NDArray[np.float64], steps: float, at_least: float) -> bool:
    """Whether that many last values are known, and each is at least so large."""
    return len(values) >= steps and bool((values >= at_least).all())


def shares(columns: Columns, name: str, steps: float, prefix: str = "") -> NDArray[np.float64]:
    """Which share of all attempts a count of attempts is, in each of the last steps."""
    count, failed, counted = (
        columns.last(prefix + key, int(steps)) for key in (name, "trajectory/failed", "trajectory/count")
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        return count / (failed + counted)


def prompt_too_long(evidence: Evidence) -> str | None:
    """First prompts do not fit, in training or in an evaluation."""
    limits, settings = evidence.limits, evidence.settings
    for columns, prefix, where in (
        (evidence.history.training, "", "the last step"),
        (evidence.history.evaluations, "eval/sampled/", "the last evaluation"),
    ):
        found = shares(columns, "status/prompt_too_long", 1, prefix)
        if holds(found, 1, limits["share"]):
            longest = columns.latest(prefix + "turn/prompt_tokens_refused")
            length = f"; the longest has {longest:.0f} tokens" if longest > 0 else ""
            return (
                f"the first prompt did not fit in {found[-1]:.0%} of the attempts of {where}, with "
                f"{settings.named('max_prompt_tokens')}{length}."
            )
    return None


def conversation_too_long(evidence: Evidence) -> str | None:
    limits, columns = evidence.limits, evidence.history.training
    found = shares(columns, "status/too_long", limits["steps"])
    if not holds(found, limits["steps"], limits["share"]):
        return None
    settings = evidence.settings
    return (
        f"{mean(found):.0%} of the attempts of the last {len(found)} steps outgrew "
        f"{settings.named('max_prompt_tokens')} or {settings.named('max_trajectory_tokens')}; a prompt has "
        f"{columns.latest('turn/prompt_tokens'):.0f} tokens on average."
    )


def not_shown(evidence: Evidence) -> str | None:
    limits = evidence.limits
    found = evidence.history.training.last("prefix/repeated", int(limits["steps"]))
    if not holds(found, limits["steps"], limits["share"]):
        return None
    return (
        f"in {mean(found):.0%} of the turns after the first of the last {len(found)} steps, the prompt was that of the "
        "turn before, token by token."
    )


def no_end(evidence: Evidence) -> str | None:
    """Actions go on after a control token, or none ever ends although there is much room."""
    limits, columns = evidence.limits, evidence.history.training
    steps = int(limits["steps"])
    cut, missed = columns.last("stop/length", steps), columns.last("stop/missed_end", steps)
    if holds(cut, steps, limits["share"]) and holds(missed - limits["missed"] * cut, steps, 0.0):
        return (
            f"{mean(missed):.0%} of the turns of the last {steps} steps wrote a control token such as <|im_end|> and "
            "went on up to the token limit."
        )
    roomy = evidence.settings["max_action_tokens"] >= limits["room"]
    if roomy and holds(cut, steps, limits["never"]):
        named = evidence.settings.named("max_action_tokens")
        return f"{mean(cut):.1%} of the turns of the last {steps} steps ended at {named}, and next to none by itself."
    return None


def token_limit(evidence: Evidence) -> str | None:
    limits = evidence.limits
    found = evidence.history.training.last("stop/length", int(limits["steps"]))
    if not holds(found, limits["steps"], limits["share"]):
        return None
    named = evidence.settings.named("max_action_tokens")
    return f"{mean(found):.0%} of the turns of the last {len(found)} steps were cut off at {named}."


def turn_limit(evidence: Evidence) -> str | None:
    """Attempts run out of turns, and none is paid otherwise than another."""
    limits, columns = evidence.limits, evidence.history.training
    steps = int(limits["steps"])
    found, spread = shares(columns, "status/too_many_turns", steps), columns.last("reward/std", steps)
    if not (holds(found, steps, limits["share"]) and holds(-spread, steps, 0.0)):
        return None
    return (
        f"{mean(found):.0%} of the attempts of the last {steps} steps ended at "
        f"{evidence.settings.named('max_turns')}, and all were paid alike."
    )


def faults(evidence: Evidence) -> str | None:
    """Calls cannot be read, and that does not get better."""
    limits, all_faults = evidence.limits, evidence.history.training.all("turn/faults")
    steps = int(limits["steps"])
    last = all_faults[-steps:]
    falls = bool(last[-1:] < limits["falling"] * all_faults[:1])
    if not holds(last, steps, limits["share"]) or falls:
        return None
    return (
        f"{mean(last):.0%} of the turns of the last {steps} steps had a tool call that could not be parsed as "
        f"{evidence.settings.named('tools')}."
    )


def tool_errors(evidence: Evidence) -> str | None:
    limits, columns = evidence.limits, evidence.history.training
    steps = int(limits["steps"])
    count = columns.last("trajectory/count", steps)
    for tool, name in columns.under("tools/").items():
        found = columns.last(name, steps)
        if holds(found - limits["per_attempt"] * count, steps, 0.0) and count.all():
            return (
                f"the tool {tool.removesuffix('/errors')} raised {found.sum():.0f} errors in the "
                f"{count.sum():.0f} attempts of the last {steps} steps."
            )
    return None


def failures(evidence: Evidence) -> str | None:
    limits = evidence.limits
    found = evidence.history.training.last("failure/rate", int(limits["steps"]))
    if not holds(found, limits["steps"], limits["share"]):
        return None
    return f"{mean(found):.0%} of the attempts of the last {len(found)} steps failed or timed out."


ATTEMPT_CHECKS = (
    Check(
        name="prompt_too_long",
        cause="Prompts are too long",
        meaning="Such attempts have no turn and do not count: their tasks are never trained on.",
        remedy="Raise {max_prompt_tokens} and {max_trajectory_tokens}, or give shorter tasks.",
        find=prompt_too_long,
        reads=(
            "status/prompt_too_long",
            "trajectory/count",
            "trajectory/failed",
            "turn/prompt_tokens_refused",
            "eval/sampled/status/prompt_too_long",
            "eval/sampled/trajectory/count",
            "eval/sampled/trajectory/failed",
            "eval/sampled/turn/prompt_tokens_refused",
        ),
        thresholds={"share": Threshold(0.2, "share of the attempts of one step or evaluation")},
        explains=(*NO_REWARD, "conversation_too_long", "failures", "filter"),
    ),
    Check(
        name="conversation_too_long",
        cause="Conversations outgrow their limit",
        meaning="Attempts end before they can succeed, and are trained as failures.",
        remedy="Raise {max_prompt_tokens} and {max_trajectory_tokens}, or lower {max_turns} or {max_action_tokens}.",
        find=conversation_too_long,
        reads=("status/too_long", "trajectory/count", "trajectory/failed", "turn/prompt_tokens"),
        thresholds={"share": Threshold(0.5, "share of attempts"), "steps": Threshold(3, STEPS)},
        explains=NO_REWARD,
    ),
    Check(
        name="not_shown",
        cause="The chat template does not show new messages",
        meaning="The model sees the same prompt again and cannot know what the environment answered.",
        remedy="Look at the chat template in {model}: it must write every message of a conversation.",
        find=not_shown,
        reads=("prefix/repeated",),
        thresholds={"share": Threshold(0.5, "share of turns after the first"), "steps": Threshold(2, STEPS)},
        explains=NO_REWARD,
    ),
    Check(
        name="no_end",
        cause="The end of an action is not recognised",
        meaning="The model ends its messages with another token than those that stop sampling.",
        remedy="Look at eos_token, generation_config.json and the chat template in {model}: the token that ends a "
        "message must be among them. If the model has never learned to end a message, train it first with {sft}.",
        find=no_end,
        reads=("stop/length", "stop/missed_end"),
        thresholds={
            "share": Threshold(0.5, "share of turns cut off"),
            "missed": Threshold(0.5, "share of those with a control token in their text"),
            "never": Threshold(0.995, "or: share of turns cut off whatever their text"),
            "room": Threshold(64, "with at least so many action tokens allowed"),
            "steps": Threshold(2, STEPS),
        },
        explains=("token_limit", "conversation_too_long", "faults", *NO_REWARD),
    ),
    Check(
        name="token_limit",
        cause="Actions end at the token limit",
        meaning="The environment hears unfinished messages, and credit goes to beginnings.",
        remedy="Raise {max_action_tokens} and, with it, {max_trajectory_tokens}.",
        find=token_limit,
        reads=("stop/length",),
        thresholds={"share": Threshold(0.5, "share of turns"), "steps": Threshold(3, STEPS)},
        explains=("conversation_too_long", "faults", *NO_REWARD),
    ),
    Check(
        name="turn_limit",
        cause="Attempts run out of turns",
        meaning="No attempt comes to an end that pays, so there is nothing to compare.",
        remedy="Raise {max_turns}, begin with easier tasks ({tasks}), or train on demonstrations first ({sft}).",
        find=turn_limit,
        reads=("status/too_many_turns", "trajectory/count", "trajectory/failed", "reward/std"),
        thresholds={"share": Threshold(0.95, "share of attempts"), "steps": Threshold(5, STEPS)},
        explains=("constant_reward", "equal_groups"),
    ),
    Check(
        name="faults",
        cause="Tool calls cannot be parsed",
        meaning="The model writes calls in another format than they are read in, and does not learn to change it.",
        remedy="Set {tools} to the format of this model, or train on demonstrations first ({sft}).",
        find=faults,
        reads=("turn/faults",),
        thresholds={
            "share": Threshold(0.3, "share of turns"),
            "falling": Threshold(0.8, "below this part of the first step's share it counts as falling"),
            "steps": Threshold(5, STEPS),
        },
        explains=NO_REWARD,
    ),
    Check(
        name="tool_errors",
        cause="A tool raises errors",
        meaning="The model is trained on a tool that does not work.",
        remedy="See events.log for the traceback; repair the tool or its settings ({settings}).",
        find=tool_errors,
        reads=("tools/", "trajectory/count"),
        thresholds={"per_attempt": Threshold(0.5, "errors per attempt"), "steps": Threshold(3, STEPS)},
        explains=NO_REWARD,
    ),
    Check(
        name="failures",
        cause="Attempts fail",
        meaning="They do not count. Tasks at which attempts fail more often are trained on less.",
        remedy="See events.log for the tracebacks; repair the environment, or raise {turn_seconds} if it is slow.",
        find=failures,
        reads=("failure/rate",),
        thresholds={"share": Threshold(0.25, "share of attempts"), "steps": Threshold(3, STEPS)},
    ),
)

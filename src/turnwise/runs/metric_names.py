"""The metrics of a run: the name, unit, meaning and healthy value of everything that `metrics.jsonl` may hold.

docs/reference/metrics.md is generated from this table, and a test compares the table with what runs write.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

EVALUATIONS = re.compile(r"eval/(sampled|greedy)/(.+)")
PLACEHOLDERS = {"<kind>": "(sampled|greedy)", "<queue>": "(step|close)", "<k>": r"\d+"}


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `<word>` in a name stands for any text, or for what PLACEHOLDERS says.

    Example:
        Metric("success/<dataset>", "share", "Success in one dataset.", "rises").matches("success/hops")
    """

    name: str
    unit: str
    meaning: str
    healthy: str
    in_evaluations: bool = False
    """Whether an evaluation reports it too, as eval/sampled/NAME and eval/greedy/NAME."""

    def matches(self, key: str) -> bool:
        return _pattern(self.name).fullmatch(key) is not None


@cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"(<\w+>)", name)
    return re.compile("".join(PLACEHOLDERS.get(p, ".+") if p.startswith("<") else re.escape(p) for p in parts))


ATTEMPTS = (
    Metric(
        "success",
        "share",
        "Attempts whose total reward reaches `rollout.success_threshold`, of all attempts that count, in kept and "
        "dropped groups.",
        "rises",
    ),
    Metric("success/<dataset>", "share", "The same in one dataset; only with several environments.", "rises"),
    Metric("reward/mean", "reward", "Mean total reward of the attempts that count.", "rises", True),
    Metric("reward/std", "reward", "Standard deviation of the total reward.", "above 0: credit needs differences"),
    Metric("reward/min", "reward", "Smallest total reward.", "within what the environment can pay", True),
    Metric("reward/max", "reward", "Largest total reward.", "within what the environment can pay", True),
    Metric("reward/<dataset>", "reward", "Mean total reward in one dataset; only with several environments.", "rises"),
    Metric("trajectory/count", "attempts", "Attempts that count.", "groups x `rollout.group_size`", True),
    Metric("trajectory/failed", "attempts", "Attempts that do not count.", "0", True),
    Metric("trajectory/turns", "turns", "Mean number of turns per attempt.", "below `rollout.max_turns`", True),
    Metric(
        "trajectory/action_tokens",
        "tokens",
        "Mean number of sampled tokens per attempt.",
        "no sudden growth or collapse",
        True,
    ),
    Metric("turn/count", "turns", "Turns of the attempts that count.", "trajectory/count x trajectory/turns", True),
    Metric(
        "turn/action_tokens",
        "tokens",
        "Mean number of sampled tokens per turn.",
        "below `rollout.max_action_tokens`",
        True,
    ),
    Metric("turn/reward", "reward", "Mean reward that a turn was paid.", "0 where only the outcome pays"),
    Metric("turn/prompt_tokens", "tokens", "Mean prompt length.", "below `rollout.max_prompt_tokens`", True),
    Metric(
        "turn/prompt_tokens_refused",
        "tokens",
        "Longest first prompt that did not fit; 0 where all did.",
        "0",
        True,
    ),
    Metric(
        "turn/faults",
        "share",
        "Turns with a tool call that cannot be read or names no offered tool. The agent loop answers those itself.",
        "near 0, or falling",
        True,
    ),
    Metric("stop/end_token", "share", "Turns in which the model sampled an end token.", "near 1 with a chat model"),
    Metric("stop/stop_string", "share", "Turns that a stop string ended.", "0 where no stop strings are set"),
    Metric("stop/length", "share", "Turns that the token limit cut off.", "near 0"),
    Metric("stop/abort", "share", "Turns that were aborted.", "0"),
    Metric(
        "stop/missed_end",
        "share",
        "Turns cut off by the token limit although the model wrote a control token such as `<|im_end|>`.",
        "0; otherwise the end token is another one",
    ),
    Metric("marks/<mark>", "the mark's", "Mean of a named score that the environment reports.", "see the env", True),
    Metric("tools/<tool>/errors", "errors", "Exceptions inside a tool; absent where there were none.", "absent", True),
)

ENDINGS = (
    Metric("status/finished", "attempts", "The environment ended the attempt.", "nearly all", True),
    Metric("status/too_many_turns", "attempts", "`rollout.max_turns` was reached.", "falls", True),
    Metric("status/too_long", "attempts", "A token limit of the attempt was reached.", "near 0", True),
    Metric("status/observation_too_large", "attempts", "An observation had too many bytes.", "0", True),
    Metric("status/prompt_too_long", "attempts", "The first prompt did not fit; does not count.", "0", True),
    Metric("status/timed_out", "attempts", "A deadline passed; does not count.", "0", True),
    Metric("status/failed", "attempts", "The environment or the engine failed; does not count.", "0", True),
    Metric(
        "status/penalised",
        "attempts",
        'Failed, but counted by `rollout.failures.on_failure.name = "pay"`.',
        "0, or falling",
        True,
    ),
    Metric("failure/rate", "share", "Attempts that failed, timed out or were penalised.", "0", True),
    Metric("failure/worst_task", "share", "The same at the task with the largest share.", "below 0.5", True),
)

PREFIXES = (
    Metric(
        "prefix/extended",
        "share",
        "Turns after the first whose prompt begins with the whole turn before.",
        "1 where history only grows",
        True,
    ),
    Metric(
        "prefix/lost_tokens",
        "tokens",
        "Tokens that turns share with nothing because a prefix broke.",
        "0 where history only grows",
        True,
    ),
    Metric(
        "prefix/repeated",
        "share",
        "Turns after the first whose prompt is that of the turn before: the template does not show new messages.",
        "0",
        True,
    ),
    Metric("prefix/breaks/template", "turns", "The chat template rewrote the turn before.", "0", True),
    Metric("prefix/breaks/retokenised", "turns", "Sampled tokens differ from the tokenizer's.", "0", True),
    Metric("prefix/breaks/history", "turns", "The environment rewrote history.", "0 unless it means to", True),
    Metric("prefix/breaks/unknown", "turns", "No cause was recorded.", "0", True),
)

GROUPS = (
    Metric("groups/kept", "groups", "Groups trained on.", "`groups_per_step`"),
    Metric(
        "groups/dropped", "groups", "Groups that a filter or `schedule.stale` dropped.", "few: each cost its sampling"
    ),
    Metric(
        "groups/zero_variance",
        "groups",
        "Kept groups whose attempts all have the same total: group-relative credit is 0 there.",
        "not all; rises as success nears 1",
    ),
    Metric(
        "groups/identical",
        "groups",
        "Groups, kept and dropped, whose attempts all sampled the same tokens.",
        "few; rises as success nears 1",
    ),
    Metric(
        "groups/kept/<dataset>",
        "groups",
        "Groups of one dataset trained on; only with several environments.",
        "its share by `env.weight`",
    ),
    Metric("tasks/distinct", "tasks", "Training tasks that there are, in all datasets.", "hundreds or more"),
    Metric("tasks/epochs", "times", "How often each task of the most used dataset was drawn so far.", "few"),
    Metric("tasks/resting", "tasks", "Tasks that rest; only with `schedule.max_rest`.", "rises as success nears 1"),
    Metric("lag/mean", "versions", "Mean lag of the trained tokens.", "at most `max_lag`; 0 when synchronous"),
    Metric("lag/max", "versions", "Largest lag of a trained token.", "at most `max_lag`"),
    Metric("lag/masked_turns", "turns", 'Turns with weight 0 by `schedule.stale = "mask_turn"`.', "near 0"),
    Metric(
        "fair/turns",
        "ratio",
        "Mean turns of trained attempts over those of sampled ones, over the run so far.",
        'about 1; less favours short attempts (`schedule.order = "finished"`)',
    ),
)

UPDATES = (
    Metric("loss", "-", "The objective: a weighted sum over tokens. Not comparable between recipes.", "finite"),
    Metric("ratio", "ratio", "Mean ratio of new to old probability.", "about 1"),
    Metric("clipped", "share", "Trained tokens whose gradient the loss cut off.", "small"),
    Metric("entropy", "nats", "Mean entropy of the policy at sampled tokens.", "falls slowly, not to 0 at once"),
    Metric("kl", "nats", "Mean k3 estimate of the divergence from the reference.", "bounded"),
    Metric("distill", "nats", "Mean divergence from the teacher (`[distill]`).", "falls"),
    Metric("gradient_norm", "-", "Gradient norm before clipping.", "finite; spikes are rare"),
    Metric("learning_rate", "-", "Learning rate of the update.", "follows the schedule"),
    Metric("skipped", "share", "Updates skipped for a non-finite loss or gradient.", "0"),
    Metric("idle", "share", "Updates in which no token had a weight: no optimizer step.", "0, or near the end"),
    Metric("critic/loss", "-", "Loss of the critic.", "falls"),
    Metric("critic/clipped", "share", "Tokens whose value change was clipped.", "small"),
    Metric("critic/error", "reward", "Mean distance of a value from its target.", "falls"),
    Metric("critic/gradient_norm", "-", "Gradient norm of the critic before clipping.", "finite"),
    Metric("critic/learning_rate", "-", "Learning rate of the critic.", "follows the schedule"),
    Metric("critic/skipped", "share", "Critic updates skipped for a non-finite loss or gradient.", "0"),
)

AGREEMENT = (
    Metric(
        "gap/mean",
        "nats",
        "Mean absolute difference between the engine's and the learner's logprobs of the same tokens under the same "
        "weights.",
        "below 1e-6 in float32 with the slot engine; the run stops above `guards.max_logprob_gap`",
    ),
    Metric("gap/max", "nats", "Largest such difference.", "1e-6 to 2e-5 in float32 with the slot engine"),
    Metric("gap/k3", "nats", "k3 estimate of the divergence between engine and learner.", "near 0"),
    Metric(
        "gap/rerouted",
        "nats",
        "As `gap/mean`, of turns on whose history experts are replayed that older weights took; `gap/mean` leaves them "
        "out. Only with `model.router_replay`.",
        "about what one step changes; 0 where no weights are loaded during an attempt",
    ),
    Metric(
        "routes/replayed",
        "share",
        "Planned tokens whose experts were those that the engine took; only with `model.router_replay`.",
        "near 1: the last token of an attempt has none",
    ),
    Metric(
        "routes/disagreed",
        "share",
        "Tokens for which several turns recorded experts, and not the same: the first turn's were replayed. Only with "
        "`model.router_replay`.",
        "near 0 at lag 0; grows with `max_lag`",
    ),
    Metric("weight_check/tokens", "tokens", "Tokens compared after a load; 0 where the engine had no time.", "above 0"),
    Metric(
        "weight_check/gap",
        "nats",
        "The gap on probes that were sampled after the load.",
        "below weight_check/limit; the run stops above it",
    ),
    Metric(
        "weight_check/moved",
        "nats",
        "How far the load moved the logprobs of the probes before it.",
        "above weight_check/gap; otherwise the check cannot tell whether the load arrived",
    ),
    Metric("weight_check/limit", "nats", "The limit of all checks; on line 0 only.", "`weight_check.limit`, if set"),
    Metric("weight_check/start/gap", "nats", "The gap before training; on line 0 only.", "below weight_check/limit"),
    Metric(
        "weight_check/start/gap_far",
        "nats",
        "The gap after long prompts before training; 0 where `rollout.max_trajectory_tokens` allows none; on line 0 "
        "only.",
        "near weight_check/start/gap",
    ),
    Metric(
        "weight_check/start/gap_disturbed",
        "nats",
        "The gap after a load that changed every tensor, before training; on line 0 only.",
        "below weight_check/limit",
    ),
    Metric(
        "weight_check/start/moved",
        "nats",
        "How far the load that changed every tensor moved logprobs; on line 0 only.",
        "four times weight_check/limit or more",
    ),
    Metric("correction/mean", "ratio", "Mean factor of the off-policy correction.", "about 1"),
    Metric("correction/masked_tokens", "share", "Tokens outside `correction.token_band`.", "small"),
    Metric("correction/masked_by_sequence", "share", "Tokens of sequences outside `sequence_band`.", "small"),
    Metric("correction/capped", "share", "Tokens whose ratio was above `correction.importance_ratio_cap`.", "small"),
)

COST = (
    Metric("tokens/planned", "tokens", "Tokens that the step's plans compute: the unique ones with a tree.", "-"),
    Metric("tokens/sampled", "tokens", "Tokens that the step's attempts sampled.", "-"),
    Metric("tokens/action", "tokens", "Sampled tokens that are trained, shared ones once.", "-"),
    Metric("passes", "passes", "Forward and backward passes of one epoch.", "few"),
    Metric("speed/tokens_per_second", "tokens/s", "tokens/sampled over seconds/step.", "steady"),
    Metric("seconds/step", "s", "The whole step: waiting, training, loading.", "steady"),
    Metric("seconds/wait_for_groups", "s", "Waiting for groups.", "small with `max_lag` above 0"),
    Metric("seconds/train", "s", "Planning, scoring, credit and updates.", "-"),
    Metric("seconds/plan_and_credit", "s", "Planning and credit alone.", "a small part of seconds/train"),
    Metric(
        "seconds/longest_stall",
        "s",
        "The longest time in which the event loop turned to nobody. Deadlines do not run meanwhile.",
        "below 0.1 with `max_lag` above 0; without, the loop waits for each step",
    ),
    Metric("seconds/load", "s", "Loading weights into the engine, and their check.", "a small part of seconds/step"),
    Metric("seconds/load/gather", "s", "Of it: the learner gets its weights ready.", "near 0"),
    Metric(
        "seconds/load/write",
        "s",
        "Of it: weights are written where engines read them, each rank its part. Engines sample on.",
        "about the bytes over the speed of memory",
    ),
    Metric(
        "seconds/load/swap",
        "s",
        "Of it: engines take the weights, and sample nothing meanwhile.",
        "a small part of seconds/step",
    ),
    Metric("seconds/load/transfer", "s", "Of the swap: vLLM's workers read or receive the weights.", "-"),
    Metric(
        "seconds/load/check",
        "s",
        "Of it: engine and learner are compared; near 0 where this load is not checked.",
        "at most 2 % of the run's time, unless `weight_check.every` is set",
    ),
    Metric("seconds/generate", "s", "Inside the engine's model, summed over its processes.", "-"),
    Metric("seconds/score", "s", "Scoring passes of the learner.", '0 with `loss.anchor = "engine"` and no KL'),
    Metric("seconds/forward_backward", "s", "Gradient passes of the learner.", "-"),
    Metric("seconds/optimizer", "s", "Optimizer steps.", "-"),
    Metric("seconds/critic", "s", "Updates of the critic.", "-"),
    Metric("seconds/evaluation/sampled", "s", "The evaluation at the evaluation's temperature.", "-"),
    Metric("seconds/evaluation/greedy", "s", "The greedy evaluation.", "-"),
    Metric(
        "seconds/trained_over_sampled",
        "ratio",
        "Mean duration of trained attempts over that of sampled ones, over the run so far.",
        "about 1; less favours quick attempts",
    ),
)

BATCHES = (
    Metric("batch/<dataset>/<queue>/calls", "calls", "Calls of `step_many` (queue step) or `close_many` (close).", "-"),
    Metric("batch/<dataset>/<queue>/items", "items", "Environments in those calls.", "-"),
    Metric("batch/<dataset>/<queue>/failed_calls", "calls", "Calls that raised or timed out.", "0"),
    Metric("batch/<dataset>/<queue>/left_items", "items", "Items whose caller had left before the answer.", "0"),
    Metric("batch/<dataset>/<queue>/size_mean", "items", "Mean items per call.", "above 1 where calls cost"),
    Metric("batch/<dataset>/<queue>/size_max", "items", "Most items in a call.", "at most the batch limit"),
    Metric("batch/<dataset>/<queue>/wait_seconds", "s", "Mean wait of an item before its call.", "small"),
    Metric("batch/<dataset>/<queue>/call_seconds", "s", "Mean duration of a call.", "-"),
    Metric("batch/<dataset>/<queue>/slot_use", "share", "Use of the parallel calls allowed.", "below 1"),
    Metric("batch/<dataset>/<queue>/flush/full", "calls", "Calls made because the batch was full.", "-"),
    Metric("batch/<dataset>/<queue>/flush/everyone", "calls", "Calls made because no other attempt could join.", "-"),
    Metric("batch/<dataset>/<queue>/flush/waited", "calls", "Calls made because the wait was over.", "-"),
    Metric("batch/<dataset>/<queue>/flush/again", "calls", "Repeats of a failed idempotent call.", "0"),
    Metric("batch/<dataset>/<queue>/fitted/per_call", "s", "Learned fixed cost of a call.", "near the real one"),
    Metric("batch/<dataset>/<queue>/fitted/per_item", "s", "Learned cost of an item.", "near the real one"),
)

HELD_OUT = (
    Metric("eval/<kind>/success", "share", "Successes among all held-out attempts, failed ones included.", "rises"),
    Metric("eval/<kind>/success_low", "share", "Lower end of its 95 % interval.", "-"),
    Metric("eval/<kind>/success_high", "share", "Upper end of its 95 % interval.", "-"),
    Metric("eval/<kind>/attempts", "attempts", "Attempts made.", "tasks x `evaluation.attempts`"),
    Metric("eval/<kind>/tasks", "tasks", "Held-out tasks.", "-"),
    Metric("eval/<kind>/return", "reward", "Mean total reward of the attempts that count.", "rises"),
    Metric("eval/<kind>/pass@<k>", "share", "Unbiased chance that one of k attempts at a task succeeds.", "rises"),
    Metric("eval/<kind>/version", "version", "The weights that were evaluated.", "the step, or earlier with overlap"),
    Metric("eval/<kind>/<dataset>/success", "share", "Success in one dataset; also success_low and so on.", "rises"),
    Metric("eval/<kind>/<dataset>/success_low", "share", "Lower end of its 95 % interval.", "-"),
    Metric("eval/<kind>/<dataset>/success_high", "share", "Upper end of its 95 % interval.", "-"),
    Metric("eval/<kind>/<dataset>/attempts", "attempts", "Attempts made in one dataset.", "-"),
    Metric("eval/<kind>/<dataset>/tasks", "tasks", "Held-out tasks of one dataset.", "-"),
    Metric("eval/<kind>/<dataset>/return", "reward", "Mean total reward in one dataset.", "rises"),
    Metric("eval/<kind>/<dataset>/pass@<k>", "share", "pass@k in one dataset.", "rises"),
)

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Attempts": ATTEMPTS,
    "How attempts ended": ENDINGS,
    "Shared prefixes": PREFIXES,
    "Groups and lag": GROUPS,
    "Updates": UPDATES,
    "Engine against learner": AGREEMENT,
    "Cost and time": COST,
    "Held-out evaluations": HELD_OUT,
    "Batched environment calls": BATCHES,
}
METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)


def metric_of(key: str) -> Metric | None:
    """The row that describes a key of `metrics.jsonl`: of several, the one with the most literal text.

    Example:
        metric_of("eval/greedy/trajectory/turns").name == "trajectory/turns"
    """
    found = [metric for metric in METRICS if metric.matches(key)]
    if (evaluated := EVALUATIONS.fullmatch(key)) is not None:
        found += [metric for metric in METRICS if metric.in_evaluations and metric.matches(evaluated[2])]
    return max(found, key=lambda metric: len(re.sub(r"<\w+>", "", metric.name)), default=None)

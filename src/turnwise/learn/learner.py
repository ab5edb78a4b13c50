"""The learner: scores recorded tokens and takes optimizer steps on plans."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.credit.scope import PerTurn
from turnwise.learn.critic import FOLDER as CRITIC
from turnwise.learn.critic import Critic
from turnwise.learn.export import stage_export, weights_of
from turnwise.learn.lora import Adapters, WithoutAdapters
from turnwise.learn.masters import MASTERS, read_masters
from turnwise.learn.objective import Objective
from turnwise.learn.perturbation import Change, Disturbance
from turnwise.learn.policy import Inspection, Policy, no_progress_bars
from turnwise.learn.schedules import Schedule
from turnwise.learn.snapshot import names_in, read_snapshot, stage
from turnwise.learn.staged import Staged
from turnwise.learn.stepper import OptimizerSettings, Reduce, Stepper, alone
from turnwise.learn.teacher import Teacher, compare_with_teacher
from turnwise.learn.terms import drop_unweighted, weighted_means
from turnwise.plan.blocks import Index
from turnwise.plan.plan import Plan
from turnwise.pretrained import CausalLM, ChatTokenizer

Scorer = Policy | Teacher | WithoutAdapters | Inspection
"""A model that scores. Its passes yield the indices of action tokens and their scores."""
Result = tuple[Index, NDArray[Any]]
"""(which action tokens of a plan, one value or row of each), from one pass."""
FOLDER = "optimizer"


class Learner:
    """A policy with an optimizer, a critic if the objective needs one, and frozen models that score. One call to
    `update` is one optimizer step, whatever the number of plans."""

    def __init__(
        self,
        policy: Policy,
        settings: OptimizerSettings,
        schedule: Schedule,
        frozen: Mapping[str, Scorer] = MappingProxyType({}),
        critic: Critic | None = None,
        reduce: Reduce = alone,
        adapters: Adapters | None = None,
    ) -> None:
        self.models: dict[str, Scorer] = {**frozen, "old": policy, "inspection": Inspection(policy)}
        """Models by the name of their scores: old, inspection, reference, teacher, buckets, values."""
        self.policy = policy
        self.critic = critic
        self.adapters = adapters
        """The adapters of the policy; None if all its weights are trained."""
        self.reduce = reduce
        """Adds up the sums of this learner's plans over all ranks."""
        self.stepper = Stepper(policy.model.named_parameters(), settings, schedule)
        self.seconds = {"score": 0.0, "forward_backward": 0.0, "optimizer": 0.0}
        if critic is not None:
            self.models["values"] = critic.model
            self.seconds["critic"] = 0.0
        self.disturbance: Disturbance | None = None

    @torch.no_grad()
    def score(self, plans: Sequence[Plan], num_turns: int, name: str = "old") -> list[NDArray[Any]]:
        """The scores of every action token, one array per turn: logprobs under the current weights or under a frozen
        model, a teacher's buckets, or the critic's values before each token."""
        before = time.perf_counter()
        scores: list[NDArray[Any]] = [np.zeros(0, np.float32)] * num_turns
        results = []
        for plan in plans:
            passes: Iterator[tuple[Any, ...]] = self.models[name].passes(plan)
            results.append([(picked, array_of(scores_of_pass)) for picked, scores_of_pass, *_ in passes])
        self.write_per_turn(plans, results, scores)
        self.seconds["score"] += time.perf_counter() - before
        return scores

    def update(
        self,
        plans: Sequence[Plan],
        credit: PerTurn,
        token_weights: PerTurn,
        scores: Mapping[str, PerTurn],
        objective: Objective,
    ) -> tuple[dict[str, float], list[NDArray[Any]]]:
        """Take one optimizer step on the sum over all tokens of token weight times the objective's term. Returns the
        metrics, and the logprob of each token before the step.

        Without old scores the current policy is the old policy, as in the only update of a step; without buckets there
        is no teacher. The step is skipped if the loss or the gradient is not finite. It is also skipped if all token
        weights are zero: there is nothing to learn, but the optimizer's momentum would still move the policy.
        """
        before = time.perf_counter()
        self.stepper.clear()
        sums: dict[str, float] = {"loss": 0.0, "weight": 0.0}
        logprobs_now: list[NDArray[Any]] = [np.zeros(0, np.float32)] * len(credit)
        results: list[list[Result]] = []
        for plan in plans:
            left = len(plan.stretches)
            loss_inputs = {name: plan.gather(values) for name, values in scores.items()}
            loss_inputs["credit"], loss_inputs["weight"] = plan.gather(credit), plan.gather(token_weights)
            passes: Iterator[tuple[Any, ...]] = self.policy.passes(plan)
            if (buckets := loss_inputs.pop("buckets", None)) is not None:
                passes = compare_with_teacher(self.policy, plan, buckets, objective.direction)
            results.append([])
            for picked, *outputs in passes:
                results[-1].append((picked, array_of(outputs[0])))
                inputs, (logprobs, entropies, *divergences) = drop_unweighted(self.policy, loss_inputs, picked, outputs)
                old, reference = inputs.get("old", logprobs.detach()), inputs.get("reference")
                terms, measured = objective(logprobs, entropies, old, inputs["credit"], reference, *divergences)
                total = (terms * inputs["weight"]).sum()
                left -= 1
                self.policy.backward(total, is_last=plan is plans[-1] and not left)
                sums["loss"] += float(total.detach())
                sums["weight"] += float(loss_inputs["weight"][picked].sum())
                for name, values in measured.items():
                    sums[name] = sums.get(name, 0.0) + float((values * inputs["weight"]).sum())
        self.write_per_turn(plans, results, logprobs_now)
        sums = self.reduce(sums)
        between = time.perf_counter()
        stepped = self.stepper.step(math.isfinite(sums["loss"]), idle=not sums["weight"])
        metrics = {**weighted_means(sums, "loss"), **stepped}
        self.seconds["forward_backward"] += between - before
        self.seconds["optimizer"] += time.perf_counter() - between
        return metrics, logprobs_now

    def write_per_turn(self, plans: Sequence[Plan], results: list[list[Result]], per_turn: list[NDArray[Any]]) -> None:
        """Write the results of all passes into the arrays of their turns, with those of the ranks that share them."""
        for plan, found in zip(plans, self.policy.context.gathered(results), strict=True):
            write_per_turn(plan, found, per_turn)

    def update_critic(
        self, plans: Sequence[Plan], targets: PerTurn, token_weights: PerTurn, old: PerTurn
    ) -> dict[str, float]:
        """Take one optimizer step of the critic towards the targets. Returns metrics."""
        assert self.critic is not None
        before = time.perf_counter()
        metrics = self.critic.update(plans, targets, token_weights, old, self.reduce)
        self.seconds["critic"] += time.perf_counter() - before
        return metrics

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the policy, taken or skipped."""
        return self.stepper.num_updates

    @property
    def num_skipped_in_a_row(self) -> int:
        return self.stepper.num_skipped_in_a_row

    def publish(self) -> Mapping[str, torch.Tensor]:
        """The current weights by name, with merged adapters; valid until the next update."""
        return self.plain(self.policy.model.state_dict())

    def plain(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """All weights of the policy in the form of a model without adapters."""
        return weights if self.adapters is None else self.adapters.merged(weights)

    def disturb(self, change: Change) -> int:
        assert self.disturbance is None, "undo the last disturbance before the next one"
        self.disturbance = Disturbance(self.policy.model, change)
        return self.disturbance.num_new

    def undisturb(self) -> None:
        assert self.disturbance is not None
        self.disturbance.undo()
        self.disturbance = None

    def release(self) -> None:
        """Give memory back to the GPU that is kept for the next pass and not in use."""
        if self.policy.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def save(self, folder: Path, tokenizer: ChatTokenizer) -> None:
        """Write weights and tokenizer in the format of transformers, and all that `restore` needs besides."""
        self.stage(tokenizer).write(folder)

    def stage(self, tokenizer: ChatTokenizer) -> Staged:
        """All that `save` writes, in host memory; this rank's part where there are several, which call this together.
        The export is in the dtype of the computation; where that rounds the weights, a snapshot has them as they
        are."""
        snapshots = {FOLDER: {**self.stepper.state(), "random": torch.get_rng_state(), **self.adapter_weights()}}
        if self.adapters is not None:
            export = self.adapters.stage_export(tokenizer)
        else:
            dtype = torch.bfloat16 if self.policy.dtype == torch.bfloat16 else None
            export = stage_export(self.policy.model, tokenizer, dtype)
            if dtype is not None:
                snapshots[MASTERS] = weights_of(self.policy.model)
        if self.critic is not None:
            snapshots[CRITIC] = self.critic.state()
        return Staged({folder: stage(tensors) for folder, tensors in snapshots.items()}, export)

    def restore(self, folder: Path) -> None:
        """Restore the state that `save` wrote. Where it has no master weights, those that were loaded with the model
        are exact, and adapters are all that is trained."""
        if self.adapters is None:
            read_masters(folder, self.policy.model)
        extra = {"random": torch.get_rng_state(), **self.adapter_weights()}
        state = self.stepper.blank(names_in(folder / FOLDER) - extra.keys())
        read_snapshot(folder / FOLDER, {**state, **extra})
        self.stepper.restore(state)
        torch.set_rng_state(extra["random"])
        if self.critic is not None:
            self.critic.restore(folder)

    def adapter_weights(self) -> dict[str, torch.Tensor]:
        """The weights of the adapters, with names that differ from the optimizer's. A model is loaded without them."""
        parameters = {} if self.adapters is None else self.adapters.parameters
        return {f"adapter/{name}": parameter for name, parameter in parameters.items()}

    def close(self) -> None:
        """There is nothing to close: this learner has no other process."""


def array_of(values: torch.Tensor | NDArray[Any]) -> NDArray[Any]:
    return values if isinstance(values, np.ndarray) else values.detach().cpu().numpy()


def write_per_turn(plan: Plan, results: Sequence[Result], per_turn: list[NDArray[Any]]) -> None:
    """Write the results of a plan's passes, one value or row per action token, into the arrays of its turns."""
    if not results:
        return
    values = results[0][1]
    if len(results) > 1:
        values = np.empty((len(plan.action_nodes), *values.shape[1:]), values.dtype)
        for picked, part_values in results:
            values[picked] = part_values
    for turn, part in zip(plan.turns, np.split(values, plan.offsets[1:])[:-1], strict=True):
        per_turn[turn] = part


def save_policy(
    model: CausalLM, tokenizer: ChatTokenizer, folder: Path, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write a folder that `from_pretrained` can load, with the given weights or else the model's."""
    with no_progress_bars():
        model.save_pretrained(folder, **({} if weights is None else {"state_dict": dict(weights)}))
        tokenizer.save_pretrained(folder)

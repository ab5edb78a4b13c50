"""Recipes: what a run is made of, as frozen pydantic models read from TOML.

A recipe has a fixed set of keys: a short list that a person sets (`Section.in_short_list`), and tables that can be
forgotten, whose docstrings say when to open them. Where a function is chosen by name (an estimator, a loss, an
environment), the other keys of its table are that function's arguments and are checked against its signature, so that
no setting can be written that the chosen function would ignore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from turnwise.recipe.cluster import ClusterConfig
from turnwise.recipe.engine import EngineConfig, WeightCheckConfig
from turnwise.recipe.environment import EndpointConfig, EnvironmentConfig
from turnwise.recipe.evaluation import EvaluationConfig
from turnwise.recipe.model import LoraConfig, ModelConfig
from turnwise.recipe.objective import CorrectionConfig, DistillConfig, KlConfig
from turnwise.recipe.optimizer import CriticConfig, OptimizerConfig
from turnwise.recipe.output import ArchiveConfig, CheckpointsConfig, ScreenConfig, TrackingConfig
from turnwise.recipe.rollout import RolloutConfig, SamplingConfig
from turnwise.recipe.schedule import GuardsConfig, ScheduleConfig
from turnwise.recipe.section import Choice, Section
from turnwise.recipe.warm_start import SftConfig

TOKENS_ON_CPU, TOKENS_ON_GPU = 4096, 16384
"""Of a pass, if a recipe does not say: benchmarks/microbatch.py measures them on a CPU."""


class Recipe(Section):
    """A whole run."""

    out: str = "runs/{recipe}-{seed}"
    """Run folder, with the names filled in; an existing one is never overwritten."""
    seed: int = Field(0, ge=0)
    """Seed of everything random."""
    steps: int = Field(100, ge=1)
    """Training steps; new weights are live after each."""
    max_lag: int = Field(0, ge=0)
    """How many versions behind the trained weights an action may have been sampled; 0 is synchronous."""
    groups_per_step: int = Field(8, ge=1)
    """Groups trained on in each step."""
    groups_per_update: int = Field(0, ge=0)
    """Groups per update; 0 takes all groups of the step."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's groups."""
    layout: Literal["tree", "packed", "rows"] = "tree"
    """Layout of turns for the model: tree computes shared prefixes once, packed computes every turn by itself, rows
    pads attempts to one width, for models with layers other than attention; the result is equal."""
    max_tokens_per_microbatch: int = Field(0, ge=0)
    """Tokens per forward and backward pass, which bound memory and never change the result; 0 takes 16,384 on a GPU and
    4,096 on a CPU, and in any case as many as the longest attempt has."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Where metrics, tables of attempts and the curve go besides the run folder; see docs/guides/trackers.md."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    lora: LoraConfig = LoraConfig()
    """Its adapters."""
    env: tuple[EnvironmentConfig, ...] = Field(min_length=1)
    """Environments to train on, mixed by weight."""
    endpoint: EndpointConfig = EndpointConfig()
    """The HTTP endpoint at which agents call the model."""
    rollout: RolloutConfig = RolloutConfig()
    """How attempts are made."""
    sampling: SamplingConfig = SamplingConfig()
    """How training attempts are sampled."""
    engine: EngineConfig = EngineConfig()
    """The engine, which samples actions."""
    weight_check: WeightCheckConfig = WeightCheckConfig()
    """How loads of new weights are checked."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How sampling, training and evaluation interleave."""
    guards: GuardsConfig = GuardsConfig()
    """When a run stops by itself."""
    filter: Choice = Choice(name="keep_all")
    """Filter that decides which groups are trained on."""
    credit: Choice = Choice(name="grpo")
    """Advantage estimator."""
    weighting: Choice = Choice(name="token_mean")
    """Weight of every token in the objective."""
    loss: Choice = Choice(name="ppo_clip")
    """Policy loss; besides its settings it takes anchor (which logprobs a ratio compares with) and, for gspo, scope."""
    entropy: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus."""
    kl: KlConfig = KlConfig()
    """The KL penalty, which keeps the policy near a reference."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction of credit."""
    teacher: str = ""
    """A folder that transformers can load, or a name of the Hub: the model that credit distill and the loss term of
    [distill] learn from."""
    distill: DistillConfig = DistillConfig()
    """The loss term that compares the policy's distributions with the teacher's."""
    critic: CriticConfig = CriticConfig()
    """The critic of credit gae."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its learning rate schedule."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out attempts."""
    sft: SftConfig = SftConfig()
    """Warm start."""
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    """When checkpoints are written, and how many stay."""
    archive: ArchiveConfig = ArchiveConfig()
    """What is recorded of trajectories, and how long."""
    screen: ScreenConfig = ScreenConfig()
    """What training prints besides its progress."""
    tracking: TrackingConfig = TrackingConfig()
    """Settings of trackers."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the learner and the engines run."""

    @field_validator("env", mode="before")
    @classmethod
    def one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def parts_fit(self) -> Self:
        update = self.groups_per_update or self.groups_per_step
        if self.groups_per_step % update:
            raise ValueError(
                f"groups_per_step = {self.groups_per_step} is not a multiple of groups_per_update = {update}"
            )
        longest = self.rollout.max_trajectory_tokens
        if self.layout != "tree" and 0 < self.max_tokens_per_microbatch < longest:
            raise ValueError(
                f"max_tokens_per_microbatch = {self.max_tokens_per_microbatch} cannot hold a turn of "
                f"rollout.max_trajectory_tokens = {longest}; raise it"
            )
        if self.layout == "rows" and (self.cluster.cp > 1 or self.model.router_replay):
            key = "cluster.cp" if self.cluster.cp > 1 else "model.router_replay"
            raise ValueError(f'{key} is not computed with layout = "rows"; remove it, or set layout = "tree"')
        if self.weight_check.changed and self.engine_shares_weights:
            raise ValueError(
                f"weight_check.{self.weight_check.changed[0]} is ignored with max_lag = 0, where the engine computes "
                "on the learner's own weights; remove it"
            )
        if self.cluster.on_ray and self.engine.processes:
            raise ValueError("engine.processes is ignored on a Ray cluster, where cluster.replicas decides; remove it")
        if self.cluster.on_ray and self.model.device == "mps":
            raise ValueError('model.device = "mps" is of one machine; on a Ray cluster set it to "cuda" or "cpu"')
        if self.endpoint.changed and not any(environment.is_driven for environment in self.env):
            raise ValueError(f"endpoint.{self.endpoint.changed[0]} is ignored without an env.agent; remove it")
        if not self.cluster.on_ray and any(environment.concurrency.actors for environment in self.env):
            raise ValueError(
                'env.concurrency.actors needs a Ray cluster; set cluster.placement = "colocated" or "disaggregated"'
            )
        labels = [environment.label for environment in self.env]
        for label in labels:
            if label in ("mean", "std", "min", "max"):
                raise ValueError(
                    f'"{label}" names a statistic in the metrics; give that environment another dataset = "..."'
                )
            if labels.count(label) > 1:
                raise ValueError(f'two environments are called "{label}"; give each its own dataset = "..."')
        longest = self.engine.memory.max_model_len
        if longest and longest < self.rollout.max_trajectory_tokens:
            raise ValueError(
                f"engine.memory.max_model_len = {longest} is shorter than "
                f"rollout.max_trajectory_tokens = {self.rollout.max_trajectory_tokens}"
            )
        return self

    @model_validator(mode="after")
    def weights_arrive(self) -> Self:
        """Refuse ways for weights that lead nowhere."""
        vllm, cluster = self.engine.vllm, self.cluster
        if self.engine.servers and cluster.replicas > 1:
            raise ValueError(
                f"cluster.replicas = {cluster.replicas} is ignored with engine.{self.engine.name}.servers, which "
                "sample instead; remove one of them"
            )
        if vllm.transfer != "file" and cluster.on_ray:
            raise ValueError(
                f'engine.vllm.transfer = "{vllm.transfer}" sends from the machine of the run, and on a Ray cluster the '
                'learner is elsewhere; set engine.vllm.transfer = "file"'
            )
        if vllm.transfer == "ipc" and vllm.tensor_parallel_size > cluster.ranks:
            raise ValueError(
                f'engine.vllm.transfer = "ipc" shares GPUs with the learner, which has {cluster.ranks} of them, and '
                f'engine.vllm.tensor_parallel_size = {vllm.tensor_parallel_size}; set engine.vllm.transfer = "file"'
            )
        return self

    @model_validator(mode="after")
    def engines_sleep_in_turn(self) -> Self:
        """Refuse sleep where sampling goes on while the learner works, or where the learner has other GPUs."""
        if not self.engine.vllm.sleep:
            return self
        if self.max_lag:
            raise ValueError(
                f"engine.vllm.sleep: with max_lag = {self.max_lag} sampling goes on while the learner works; set "
                "max_lag = 0, or engine.vllm.sleep = false"
            )
        if self.schedule.overlap_evaluations:
            raise ValueError(
                "engine.vllm.sleep: with schedule.overlap_evaluations vLLM evaluates while the learner works; set "
                "one of them to false"
            )
        if self.cluster.placement in ("disaggregated", "separate_nodes"):
            raise ValueError(
                f'engine.vllm.sleep: with cluster.placement = "{self.cluster.placement}" vLLM has GPUs of its own, and '
                "nobody else could use their memory; set engine.vllm.sleep = false"
            )
        return self

    @model_validator(mode="after")
    def somebody_answers(self) -> Self:
        others = self.cluster.is_spread or self.engine.processes or self.engine.servers
        if "answer_seconds" in self.cluster.changed and not others:
            raise ValueError(
                "cluster.answer_seconds is ignored where the run is one process; remove it, or set engine.processes"
            )
        return self

    @model_validator(mode="after")
    def replicas_share_whole_gpus(self) -> Self:
        each, cluster = self.engine.vllm.tensor_parallel_size, self.cluster
        if cluster.placement == "colocated" and self.model.device == "cuda" and cluster.replicas * each > cluster.ranks:
            raise ValueError(
                f"cluster.replicas = {cluster.replicas} with {each} GPUs each share those of {cluster.ranks} ranks, "
                "which have one each; lower cluster.replicas or engine.vllm.tensor_parallel_size"
            )
        return self

    @model_validator(mode="after")
    def schedule_fits(self) -> Self:
        every, overlaps = self.evaluation.every, self.schedule.overlap_evaluations
        if self.schedule.order != "started" and not self.max_lag:
            raise ValueError(
                f'schedule.order = "{self.schedule.order}" is ignored with max_lag = 0, where every group of a step is '
                "waited for"
            )
        if self.schedule.mean_lag > self.max_lag:
            raise ValueError(
                f"schedule.mean_lag = {self.schedule.mean_lag:g} is more than max_lag = {self.max_lag}, which no group "
                "may exceed; lower it, or raise max_lag"
            )
        if self.schedule.max_rest and all(entry.fresh for entry in self.env):
            raise ValueError(
                "schedule.max_rest is ignored with env.fresh = true, where no task comes again; remove one of them"
            )
        if self.evaluation.greedy and overlaps:
            raise ValueError(
                "evaluation.greedy is ignored with schedule.overlap_evaluations = true, whose evaluations are sampled; "
                "set one of them to false"
            )
        if overlaps and not every:
            raise ValueError(
                "schedule.overlap_evaluations is ignored with evaluation.every = 0, where nothing is evaluated during "
                "training"
            )
        if overlaps and every >= self.steps:
            raise ValueError(
                f"schedule.overlap_evaluations is ignored with evaluation.every = {every}: no evaluation is due before "
                f"the last of steps = {self.steps}"
            )
        if overlaps and self.engine.servers:
            raise ValueError(
                "schedule.overlap_evaluations needs an engine with weights of its own, and "
                f"engine.{self.engine.name}.servers have one version of them; set schedule.overlap_evaluations = false"
            )
        return self

    @property
    def engine_shares_weights(self) -> bool:
        """Whether the engine computes with the learner's own module."""
        in_process = self.engine.name == "slots" and not self.engine.processes
        return in_process and not self.max_lag and not self.cluster.is_spread

    def tokens_per_pass(self, device: str) -> int:
        """Tokens of a forward and backward pass on a device: cpu, cuda or mps."""
        if self.max_tokens_per_microbatch:
            return self.max_tokens_per_microbatch
        return max(TOKENS_ON_CPU if device == "cpu" else TOKENS_ON_GPU, self.rollout.max_trajectory_tokens)

    @property
    def lag_slots(self) -> int:
        """Groups that may have started and not been trained on. As many pass through them in a version as a step takes,
        so the mean lag is their number of steps less one."""
        mean_lag = (self.schedule.mean_lag or self.max_lag / 2) if self.schedule.order == "due" else self.max_lag
        return math.ceil((mean_lag + 1) * self.groups_per_step)

    @property
    def updates_per_step(self) -> int:
        return self.groups_per_step // (self.groups_per_update or self.groups_per_step) * self.epochs

"""Recipes: what a run is made of, as frozen pydantic models read from TOML.

A recipe has a fixed set of keys. Where a function is chosen by name (an estimator, a loss, an environment), the other
keys of its table are that function's own arguments and are checked against its signature, so that no setting can be
written that the chosen function would ignore.
"""

from __future__ import annotations

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
from turnwise.recipe.output import RunsConfig
from turnwise.recipe.rollout import RolloutConfig, SamplingConfig
from turnwise.recipe.section import Choice, Section
from turnwise.recipe.warm_start import SftConfig


class Recipe(Section):
    """A whole run."""

    out: str = "runs/{recipe}-{seed}"
    """Run folder; {recipe} and {seed} are filled in. An existing one is never overwritten."""
    seed: int = Field(0, ge=0)
    """Everything random derives from it."""
    steps: int = Field(100, ge=1)
    """Training steps: new weights are live after each."""
    max_lag: int = Field(0, ge=0)
    """How many versions behind the trained weights an action may have been sampled; 0 is synchronous."""
    order: Literal["started", "finished"] = "started"
    """Groups are trained on in the order they started, which bounds lag by construction, or as they finish, which
    favours short attempts and enforces the bound by `stale`."""
    stale: Literal["drop_group", "mask_turn"] = "drop_group"
    """With order = "finished": what to do with samples older than max_lag. drop_group discards and replaces the group;
    mask_turn keeps it and gives stale turns zero weight."""
    stall_warning_seconds: float = Field(60.0, gt=0)
    """Seconds without a new group after which a warning says what is waited for."""
    groups_per_step: int = Field(8, ge=1)
    """Groups trained on in each step."""
    groups_per_update: int = Field(0, ge=0)
    """Groups per optimizer step; 0 takes the whole step's."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's groups."""
    layout: Literal["tree", "packed"] = "tree"
    """How turns are laid out: tree computes shared prefixes once, packed every turn by itself; the result is equal."""
    max_tokens_per_microbatch: int = Field(16384, ge=1)
    """Tokens per forward and backward pass; bounds memory, never changes the result."""
    nonfinite_limit: int = Field(3, ge=1)
    """Updates in a row that may be skipped for a non-finite loss or gradient before the run stops."""
    dropped_limit: int = Field(512, ge=1)
    """Groups in a row that may be dropped before the run stops."""
    gap_limit: float = Field(0.0, ge=0)
    """Mean difference between the engine's logprobs and the learner's, on tokens of the trained version, at which the
    run stops; 0 takes 1e-3 in float32 and 0.1 in bfloat16."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    lora: LoraConfig = LoraConfig()
    """Its adapters."""
    env: tuple[EnvironmentConfig, ...] = Field(min_length=1)
    """Environments to train on, mixed by weight."""
    endpoint: EndpointConfig = EndpointConfig()
    """Where agents find the model."""
    rollout: RolloutConfig = RolloutConfig()
    """How attempts are made."""
    sampling: SamplingConfig = SamplingConfig()
    """How training attempts are sampled."""
    engine: EngineConfig = EngineConfig()
    """What samples."""
    weight_check: WeightCheckConfig = WeightCheckConfig()
    """How its weights are checked."""
    filter: Choice = Choice(name="keep_all")
    """Which groups are worth training on."""
    credit: Choice = Choice(name="grpo")
    """Advantage estimator."""
    weighting: Choice = Choice(name="token_mean")
    """Share of every token in the objective."""
    loss: Choice = Choice(name="ppo_clip")
    """Policy loss; beside its own settings anchor (what a ratio compares with) and, for gspo, scope."""
    entropy: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus."""
    kl: KlConfig = KlConfig()
    """How the policy is kept near a reference."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""
    teacher: str = ""
    """A folder that transformers can load: the model that credit distill and the term of [distill] learn from."""
    distill: DistillConfig = DistillConfig()
    """How the policy's distributions are drawn to the teacher's."""
    critic: CriticConfig = CriticConfig()
    """What credit gae learns values with."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out attempts."""
    sft: SftConfig = SftConfig()
    """Warm start."""
    runs: RunsConfig = RunsConfig()
    """What a run leaves behind."""
    cluster: ClusterConfig = ClusterConfig()
    """Where it runs."""

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
        if self.layout == "packed" and self.max_tokens_per_microbatch < self.rollout.max_trajectory_tokens:
            raise ValueError(
                f"max_tokens_per_microbatch = {self.max_tokens_per_microbatch} cannot hold a turn of "
                f"rollout.max_trajectory_tokens = {self.rollout.max_trajectory_tokens}; raise it"
            )
        if self.order == "started" and "stale" in self.changed:
            raise ValueError('stale is ignored with order = "started": nothing is older than max_lag then')
        if self.order == "finished" and not self.max_lag:
            raise ValueError(
                'order = "finished" is ignored with max_lag = 0, where every group of a step is waited for'
            )
        if self.evaluation.overlap and self.evaluation.every >= self.steps:
            raise ValueError(
                f"evaluation.overlap is ignored with evaluation.every = {self.evaluation.every}: no evaluation is due "
                f"before the last of steps = {self.steps}"
            )
        if self.weight_check.changed and self.engine_shares_weights:
            raise ValueError(
                f"weight_check.{self.weight_check.changed[0]} is ignored with max_lag = 0, where the engine computes "
                "on the learner's own weights; remove it"
            )
        if self.evaluation.overlap and self.engine.vllm.server:
            raise ValueError(
                "evaluation.overlap needs an engine with weights of its own, and engine.vllm.server has one version of "
                "them; set evaluation.overlap = false"
            )
        if self.cluster.on_ray and self.engine.processes:
            raise ValueError("engine.processes is ignored on a Ray cluster, where cluster.replicas decides; remove it")
        if self.cluster.on_ray and self.model.device not in ("auto", "cuda" if self.cluster.gpus else "cpu"):
            raise ValueError(
                f'model.device = "{self.model.device}" is ignored on a Ray cluster, where cluster.gpus = '
                f"{self.cluster.gpus:g} decides; remove it"
            )
        if self.endpoint.changed and not any(environment.is_driven for environment in self.env):
            raise ValueError(f"endpoint.{self.endpoint.changed[0]} is ignored without an env.agent; remove it")
        if not self.cluster.on_ray and any(environment.actors for environment in self.env):
            raise ValueError('env.actors needs a Ray cluster; set cluster.placement = "colocated" or "disaggregated"')
        labels = [environment.label for environment in self.env]
        for label in labels:
            if label in ("mean", "std", "min", "max"):
                raise ValueError(
                    f'"{label}" names a statistic in the metrics; give that environment another dataset = "..."'
                )
            if labels.count(label) > 1:
                raise ValueError(f'two environments are called "{label}"; give each its own dataset = "..."')
        if self.engine.max_model_len and self.engine.max_model_len < self.rollout.max_trajectory_tokens:
            raise ValueError(
                f"engine.max_model_len = {self.engine.max_model_len} is shorter than "
                f"rollout.max_trajectory_tokens = {self.rollout.max_trajectory_tokens}"
            )
        return self

    @property
    def engine_shares_weights(self) -> bool:
        """Whether the engine computes with the learner's own module."""
        in_process = self.engine.name == "slots" and not self.engine.processes
        return in_process and not self.max_lag and not self.cluster.is_spread

    @property
    def updates_per_step(self) -> int:
        return self.groups_per_step // (self.groups_per_update or self.groups_per_step) * self.epochs

"""The environments that a recipe trains on, and where agents find the model."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from turnwise.recipe.section import Section


class BatchingConfig(Section):
    """How calls of an environment with `step_many` or `close_many` are batched. Open it when such calls are slow or
    cost money."""

    in_short_list = ()

    slots: int = Field(4, ge=1)
    """Calls under way at once, of step_many and of close_many each."""
    max_batch: int = Field(256, ge=1)
    """Attempts per call."""
    max_wait: float | Literal["auto"] = "auto"
    """Seconds that a call waits for more attempts while a slot is free; auto is 0 in training, and in evaluations half
    the fixed cost of a call, as fitted to earlier calls."""
    policy: Literal["adaptive", "lockstep", "per_attempt"] = "adaptive"
    """adaptive calls when a slot is free, with as many attempts as are worth a call; lockstep waits for all attempts,
    each turn; per_attempt makes one call for each."""

    @field_validator("max_wait", mode="before")
    @classmethod
    def seconds_or_auto(cls, value: Any) -> Any:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value != "auto" and not (number and 0 <= value < math.inf):
            raise ValueError('write seconds, 0 or more, or "auto"')
        return value

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if self.policy != "adaptive" and (ignored := {"max_batch", "max_wait"} & set(self.changed)):
            raise ValueError(f'{min(ignored)} is ignored with policy = "{self.policy}"')
        return self


class IsolationConfig(Section):
    """Attempts in separate processes. Open it when an environment may crash, hang or take all memory, or when an
    agent's command needs a secret."""

    in_short_list = ()

    enabled: bool = False
    """Whether each attempt has a process: an environment that ends its process, computes for ever or takes all memory
    then costs its attempt and nothing else."""
    memory: int = Field(4096, ge=0)
    """MiB that an isolated attempt may allocate; 0 for no limit."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that the agent's command, or the process of a library, gets besides the usual
    ones, which hold no secrets."""

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if "memory" in self.changed and not self.enabled:
            raise ValueError("memory is ignored without enabled = true")
        return self


class ConcurrencyConfig(Section):
    """How many environments and agents are alive at once, and where. Open it when environments are too heavy for the
    machine."""

    in_short_list = ()

    max_open: int = Field(0, ge=0)
    """Environments alive at once, in training, evaluation and demonstrations alike; other attempts wait, and their
    time-outs with them. 0 takes 8 per core where each is a process and 256 where it is not, shared with the other
    entries of the kind that set nothing; max_concurrent_agents where agents drive."""
    max_concurrent_agents: int = Field(64, ge=1)
    """Agents that run at once; the others wait."""
    actors: int = Field(0, ge=0)
    """Processes of a Ray cluster that hold the environments, one CPU each; 0 keeps them in the run's process."""


class EnvironmentConfig(Section):
    """One environment of the mixture that a recipe trains on."""

    name: str
    """A built-in environment, or "module:Class" for your own."""
    dataset: str = ""
    """Name of its tasks in metrics; the name of the environment by default, which two entries must not share."""
    weight: float = Field(1.0, gt=0)
    """Share of the training tasks that come from this environment, relative to the other entries."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's constructor."""
    tasks: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's `tasks` function, besides split and seed."""
    demonstrated: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `tasks` that are others where tasks are drawn to be demonstrated, for instance shorter ones; empty
    demonstrates tasks like those of training."""
    fresh: bool = False
    """Whether every visit of training draws a new task by the environment's `tasks` function, with a seed of its own,
    instead of going through `count` fixed ones again and again."""
    data: str = ""
    """Tasks instead of the environment's: a file of JSON lines or Parquet, hf:NAME for a Hugging Face dataset, or
    "module:function"."""
    heldout: str = ""
    """Held-out tasks in the same forms; empty holds out a fifth of those in data, chosen by their ids."""
    agent: str = ""
    """Agent that makes the attempts through the endpoint: "module:function", or a command with its arguments; empty
    lets the model act in the environment directly."""
    batching: BatchingConfig = BatchingConfig()
    """How its calls are batched."""
    isolation: IsolationConfig = IsolationConfig()
    """Attempts in separate processes."""
    concurrency: ConcurrencyConfig = ConcurrencyConfig()
    """How many environments and agents are alive at once, and where."""

    @property
    def label(self) -> str:
        return self.dataset or self.name.rpartition(":")[2]

    @property
    def is_driven(self) -> bool:
        """Whether an agent drives the attempts: the recipe's, or that of a library which plays itself."""
        return bool(self.agent) or self.name.partition(":")[0] == "verifiers"

    @model_validator(mode="after")
    def tasks_come_from_one_place(self) -> Self:
        if self.heldout and not self.data:
            raise ValueError("heldout is ignored without data; set data too")
        if self.data and self.tasks:
            raise ValueError("tasks is ignored with data, which holds them; remove one")
        if self.data and self.fresh:
            raise ValueError("fresh draws by the environment's tasks, and data holds them; remove one")
        if self.fresh and "count" in self.tasks:
            raise ValueError("tasks.count is ignored with fresh = true, which draws one for each visit; remove it")
        if self.data and self.demonstrated:
            raise ValueError("demonstrated is ignored with data, which holds the tasks; remove one")
        return self

    @model_validator(mode="after")
    def isolation_is_used(self) -> Self:
        if self.isolation.enabled and self.concurrency.actors:
            raise ValueError(
                "isolation.enabled is ignored with concurrency.actors, which are processes of their own; remove one"
            )
        return self

    @model_validator(mode="after")
    def agents_are_here(self) -> Self:
        if not self.is_driven and "max_concurrent_agents" in self.concurrency.changed:
            raise ValueError("concurrency.max_concurrent_agents is ignored without an agent")
        if self.is_driven and self.concurrency.actors:
            raise ValueError("an agent acts in environments of the run's own process; remove concurrency.actors")
        return self


class EndpointConfig(Section):
    """The HTTP endpoint at which agents call the model. Open it when an agent runs on another machine, or asks
    for a model of another name."""

    in_short_list = ()

    host: str = "127.0.0.1"
    """Address that the endpoint listens on; the default can be reached from this machine only."""
    port: int = Field(0, ge=0, le=65535)
    """Port that the endpoint listens on; 0 takes a free one."""
    aliases: tuple[str, ...] = ()
    """Other names under which agents may ask for the model; "*" for any name."""

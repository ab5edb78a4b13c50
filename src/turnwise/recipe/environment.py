"""The environments that a recipe trains on, and where agents find the model."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from turnwise.recipe.section import Section


class BatchingConfig(Section):
    """How calls of an environment with `step_many` or `close_many` are put together."""

    slots: int = Field(4, ge=1)
    """Calls under way at once, of step_many and of close_many each."""
    max_batch: int = Field(256, ge=1)
    """Attempts per call."""
    max_wait: float | Literal["auto"] = "auto"
    """Seconds a call is held back for more to come while a slot is free; auto does not in training, and in validation
    takes half the price of a call, as fitted to those made."""
    policy: Literal["adaptive", "lockstep", "per_attempt"] = "adaptive"
    """adaptive calls when a slot is free, with as many as are worth a call; lockstep waits for all attempts, each turn;
    per_attempt calls for each by itself."""

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


class EnvironmentConfig(Section):
    """One environment of the mixture a recipe trains on."""

    name: str
    """A built-in environment, or "module:Class" for your own."""
    dataset: str = ""
    """What its tasks are called in metrics; the name, unless two entries share one."""
    weight: float = Field(1.0, gt=0)
    """Share of the training tasks that come from here, relative to the other entries."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's constructor."""
    tasks: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's `tasks` function, beside split and seed."""
    data: str = ""
    """Tasks in place of the environment's own: a file of JSON lines or Parquet, hf:NAME for a Hugging Face dataset, or
    "module:function"."""
    heldout: str = ""
    """Held-out tasks likewise; empty holds out a fifth of those in data, chosen by their ids."""
    batching: BatchingConfig = BatchingConfig()
    """How its calls are put together."""
    actors: int = Field(0, ge=0)
    """Processes of a Ray cluster that its environments live in, one CPU each; 0 keeps them in the run's own process."""
    isolated: bool = False
    """Whether each attempt has a process of its own: an environment that ends its process, computes for ever or takes
    all memory then costs its attempt and nothing else."""
    memory: int = Field(4096, ge=0)
    """MiB that an isolated attempt may allocate; 0 for no limit."""
    max_open: int = Field(0, ge=0)
    """Environments alive at once, in training, evaluation and demonstrations alike; other attempts wait, and their
    deadlines with them. 0 takes 8 per core where each is a process of its own and 256 where it is not, shared with the
    other entries of the kind that say nothing; max_concurrent_agents where agents drive."""
    agent: str = ""
    """Who drives the attempts, through the endpoint: "module:function", or a command with its arguments; empty has the
    model act in the environment directly."""
    max_concurrent_agents: int = Field(64, ge=1)
    """Agents that run together; the others wait."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that the agent's command, or the library's process, gets beside the usual ones:
    those hold no secrets."""

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
        return self

    @model_validator(mode="after")
    def isolation_is_used(self) -> Self:
        if "memory" in self.changed and not self.isolated:
            raise ValueError("memory is ignored without isolated = true")
        if self.isolated and self.actors:
            raise ValueError("isolated is ignored with actors, which are processes of their own; remove one")
        return self

    @model_validator(mode="after")
    def agents_are_here(self) -> Self:
        if not self.is_driven and "max_concurrent_agents" in self.changed:
            raise ValueError("max_concurrent_agents is ignored without an agent")
        if self.is_driven and self.actors:
            raise ValueError("an agent acts in environments of the run's own process; remove actors")
        return self


class EndpointConfig(Section):
    """Where agents of the user's own find the model."""

    host: str = "127.0.0.1"
    """Address that is listened on; the default is reached from this machine only."""
    port: int = Field(0, ge=0, le=65535)
    """Port; 0 takes a free one."""

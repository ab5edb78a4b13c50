"""Recipes: what a run is made of, as frozen pydantic models read from TOML.

A recipe has a fixed set of keys. Where a function is chosen by name (an estimator, a loss, an environment), the other
keys of its table are that function's own arguments and are checked against its signature, so that no setting can be
written that the chosen function would ignore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """A table of a recipe: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @property
    def changed(self) -> list[str]:
        """Keys with another value than their default: what somebody wanted, also after a round trip through a file."""
        return [name for name, f in type(self).model_fields.items() if getattr(self, name) != f.default]


class Choice(Section):
    """A function chosen by name; every other key is an argument of that function."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    name: str
    """Which function."""

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Model(Section):
    """The policy."""

    path: str = "tiny"
    """A folder that transformers can load, a model that `turnwise data` has fetched, for instance "smollm2-135m", or
    "tiny": a model and tokenizer built by code."""
    hidden: int = Field(128, ge=8)
    """Width of the tiny model."""
    layers: int = Field(4, ge=1)
    """Depth of the tiny model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; master weights and optimizer state are float32 either way."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where model and engine live; auto takes cuda where there is one, else cpu."""
    threads: int = Field(0, ge=0)
    """CPU threads per model; 0 takes all cores, divided by two when generation and learning overlap, and one for a tiny
    model, whose kernels are done before a second thread has woken up."""
    checkpointing: bool = False
    """Keep only the inputs of layers for the backward pass, which computes each layer once more: less memory, more
    time, the same result."""

    @model_validator(mode="after")
    def only_tiny_has_a_size(self) -> Self:
        if self.path != "tiny" and {"hidden", "layers"} & set(self.changed):
            raise ValueError('hidden and layers size the tiny model only; remove them or set path = "tiny"')
        return self


class Lora(Section):
    """LoRA adapters, which train while the model's weights stay frozen. The warm start trains the full model before."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 for none."""
    alpha: float = Field(32.0, gt=0)
    """Adapters count by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that have one, for instance q_proj; empty for all but the output layer."""

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if not self.rank and (ignored := self.changed):
            raise ValueError(f"{ignored[0]} is ignored without a rank")
        return self


class Batching(Section):
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


class Environment(Section):
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
    batching: Batching = Batching()
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
    other entries of the kind that say nothing; agents_at_once where agents drive."""
    agent: str = ""
    """Who drives the attempts, through the endpoint: "module:function", or a command with its arguments; empty has the
    model act in the environment directly."""
    agents_at_once: int = Field(64, ge=1)
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
        if not self.is_driven and "agents_at_once" in self.changed:
            raise ValueError("agents_at_once is ignored without an agent")
        if self.is_driven and self.actors:
            raise ValueError("an agent acts in environments of the run's own process; remove actors")
        return self


class Endpoint(Section):
    """Where agents of the user's own find the model."""

    host: str = "127.0.0.1"
    """Address that is listened on; the default is reached from this machine only."""
    port: int = Field(0, ge=0, le=65535)
    """Port; 0 takes a free one."""


class Rollout(Section):
    """How attempts are made."""

    attempts: int = Field(8, ge=1)
    """Attempts per task: the size of a group."""
    history: Literal["extend", "rerender", "managed"] = "extend"
    """extend keeps the exact tokens so far and appends; rerender applies the chat template anew each turn; managed
    shows what the environment hands over, which it must do every turn."""
    tools: Literal["none", "hermes", "llama", "harmony"] = "none"
    """How the model writes tool calls, which environments then get as structure; none leaves messages plain text."""
    trust_text: bool = False
    """Whether control tokens that the text of a message spells, <|im_end|> for one, become those tokens. By default
    they stay text: whoever can write into a prompt could forge a turn otherwise."""
    max_turns: int = Field(8, ge=1)
    """Model calls per attempt."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """Longest prompt that is sent; a longer one ends the attempt."""
    max_action_tokens: int = Field(512, ge=1)
    """Longest action; less where the context ends earlier."""
    max_trajectory_tokens: int = Field(4608, ge=2)
    """Longest conversation: prompt and action of one call together."""
    max_observation_bytes: int = Field(0, ge=0)
    """Largest observation, in bytes of text before it is tokenised; a larger one ends the attempt as
    observation_too_large. 0 is 16 for every token of max_prompt_tokens, and 65536 at least."""
    turn_seconds: float = Field(120.0, gt=0)
    """Deadline of one model call and of one environment call."""
    attempt_seconds: float = Field(1800.0, gt=0)
    """Deadline of a whole attempt."""
    blocked_seconds: float = Field(60.0, gt=0)
    """Seconds for which a coroutine of an environment may hold up the event loop, computing or blocking without an
    await, before it is interrupted and its attempt has timed out. Plain functions run in threads and hold up nobody."""
    retries: int = Field(1, ge=0)
    """How often a failed or timed-out attempt is made again with a fresh environment."""
    min_attempts: int = Field(2, ge=1)
    """A group with fewer attempts that count is dropped and replaced."""
    on_failure: Choice = Choice(name="drop")
    """What becomes of attempts that failed for good: drop leaves them out, pay counts them as paid its value."""
    truncated: Literal["train", "mask", "zero"] = "train"
    """Attempts cut short train with what they earned, train not at all, or count as paid nothing."""
    success_at: float = 1.0
    """An attempt has succeeded when its total reward is at least this."""

    @model_validator(mode="after")
    def limits_fit(self) -> Self:
        if self.min_attempts > self.attempts:
            raise ValueError(f"min_attempts = {self.min_attempts} can never be met with attempts = {self.attempts}")
        if self.max_prompt_tokens >= self.max_trajectory_tokens:
            raise ValueError("max_prompt_tokens must leave room for an action within max_trajectory_tokens")
        return self


class Sampling(Section):
    """How training attempts are sampled. Top-p, top-k and penalties are for evaluation only: the learner could not
    reproduce their logprobs."""

    temperature: float = Field(1.0, ge=1e-6, le=1e6)
    """Logits are divided by it, by the engine and by the learner alike."""


class Vllm(Section):
    """What engine vllm needs beside the settings that it shares with others."""

    server: str = ""
    """URL of a vLLM server that runs already; empty starts a vLLM in processes of its own."""
    transfer: Literal["file", "nccl", "ipc"] = "file"
    """How weights get there: file through memory or a disk; nccl to GPUs of a server; ipc on the learner's own GPU."""
    folder: str = ""
    """Where files of weights pass through, and both sides can see; empty takes the machine's memory."""
    memory: float = Field(0.5, gt=0, le=1)
    """Share of a GPU that vLLM takes, where engine.cache = 0."""
    eager: bool | Literal["auto"] = "auto"
    """Neither compile the model nor capture graphs: a quick start and slower sampling; auto does so on a CPU."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that share one copy of the model."""

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if self.server and (ignored := {"memory", "eager", "tensor_parallel"} & set(self.changed)):
            raise ValueError(f"{min(ignored)} is a setting of the server itself; remove it, or remove server")
        if self.transfer != "file" and self.folder:
            raise ValueError(f'folder is ignored with transfer = "{self.transfer}"')
        if self.server and self.transfer == "ipc":
            raise ValueError('transfer = "ipc" shares memory of one GPU; use "nccl" or "file" with a server')
        if not self.server and self.transfer == "nccl":
            raise ValueError('transfer = "nccl" goes to the GPUs of a server; without one use "ipc" or "file"')
        return self


class Engine(Section):
    """What samples actions."""

    name: Literal["slots", "vllm"] = "slots"
    """slots: in-process continuous batching on the learner's own module; vllm: vLLM, with weights of its own."""
    slots: int = Field(64, ge=1)
    """Requests decoded together; the others wait."""
    context: int = Field(0, ge=0)
    """Tokens that prompt and action may have together; 0 takes max_trajectory_tokens."""
    cache: int = Field(0, ge=0)
    """MiB of keys and values, those of requests under way and those kept to be shared; 0 takes 1024, or four contexts
    if that is more. What was used longest ago goes first."""
    keep_cache: bool = False
    """Share keys and values that older weights computed, where false computes prefixes anew after every step."""
    processes: int = Field(0, ge=0)
    """Processes of this machine that sample, each with a copy of the weights; one that dies is started again. 0 samples
    in the run's own process."""
    pass_tokens: int = Field(2048, ge=2)
    """Tokens computed together: one of every request that samples, the rest of prompts."""
    vllm: Vllm = Vllm()
    """What engine vllm needs beside these."""

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if self.name == "vllm" and self.processes:
            raise ValueError('processes is ignored with name = "vllm", which has processes of its own')
        if self.name != "vllm" and self.vllm.changed:
            raise ValueError(f'vllm.{self.vllm.changed[0]} is ignored with name = "{self.name}"')
        if self.cache and "memory" in self.vllm.changed:
            raise ValueError(f"vllm.memory is ignored with cache = {self.cache}")
        if self.vllm.server and (ignored := {"cache", "pass_tokens"} & set(self.changed)):
            raise ValueError(f"{min(ignored)} is a setting of the server itself; remove it, or remove vllm.server")
        return self

    @model_validator(mode="after")
    def prompts_get_on(self) -> Self:
        if self.pass_tokens <= self.slots:
            raise ValueError(f"pass_tokens = {self.pass_tokens} leaves no room for prompts beside slots = {self.slots}")
        return self


class Sync(Section):
    """How loads of new weights are checked, where the engine has weights of its own."""

    every: int = Field(1, ge=1)
    """Versions between checks."""
    limit: float = Field(0.0, ge=0)
    """Mean difference between the engine's logprobs and the learner's, on tokens sampled for the check, at which the
    run stops; 0 takes 1e-5 in float32, and in bfloat16 four times what is found at the start."""


class Kl(Section):
    """How the policy is kept near a reference."""

    coefficient: float = Field(0.0, ge=0)
    """How strongly; 0 for not at all."""
    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or a charge of k1, the log ratio, on every token's reward."""
    divergence: Literal["k2", "k3"] = "k3"
    """Estimate in the loss. k2 has the divergence's own gradient; k3 is never negative and has the gradient of the
    divergence the other way round."""
    reference: str = "start"
    """A folder that transformers can load, or "start": the policy as it is before the first step."""

    @field_validator("divergence", mode="before")
    @classmethod
    def k1_is_no_loss(cls, value: Any) -> Any:
        if value == "k1":
            raise ValueError(
                'k1 as a loss has an expected gradient of zero; use "k2" or "k3", or place = "reward", which charges k1'
            )
        return value

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if not self.coefficient and (ignored := self.changed):
            raise ValueError(f"{ignored[0]} is ignored without a coefficient")
        if self.place == "reward" and "divergence" in self.changed:
            raise ValueError('divergence is one of the loss; with place = "reward" the charge is k1')
        return self


class Distill(Section):
    """A term of the loss that draws the policy's whole distribution at every action token to the teacher's."""

    coefficient: float = Field(0.0, ge=0)
    """How strongly; 0 for not at all."""
    top_k: int = Field(16, ge=1)
    """How many of the teacher's likeliest tokens are compared one by one; all others are compared as one."""
    direction: Literal["reverse", "forward"] = "reverse"
    """reverse is the KL divergence from policy to teacher, which keeps the policy to what the teacher would do; forward
    is that from teacher to policy, which has it do all of that."""

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if not self.coefficient and (ignored := self.changed):
            raise ValueError(f"{ignored[0]} is ignored without a coefficient")
        return self


class Correction(Section):
    """Credit corrected for the gap between the engine that sampled and the learner that trains, by the ratio of the
    learner's logprobs before the first update to the engine's."""

    truncate: Literal["off", "token", "sequence"] = "off"
    """Importance weights: none, each token's own ratio, or the product over a sequence."""
    cap: float = Field(2.0, gt=0)
    """Ratios count at most this."""
    token_band: tuple[float, float] | None = None
    """Tokens with a ratio outside do not train."""
    sequence_band: tuple[float, float] | None = None
    """Sequences with a geometric mean ratio outside do not train."""
    scope: Literal["turn", "trajectory"] = "trajectory"
    """What a sequence is."""

    @property
    def active(self) -> bool:
        return self.truncate != "off" or self.token_band is not None or self.sequence_band is not None

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if "cap" in self.changed and self.truncate == "off":
            raise ValueError('cap is ignored with truncate = "off"')
        if "scope" in self.changed and self.truncate != "sequence" and self.sequence_band is None:
            raise ValueError('scope is ignored without truncate = "sequence" or a sequence_band')
        for name in ("token_band", "sequence_band"):
            low, high = getattr(self, name) or (0.0, 1.0)
            if not 0.0 <= low < high:
                raise ValueError(f"{name} = [{low:g}, {high:g}]: write two bounds, 0 <= low < high")
        return self


class Optimizer(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the moment estimates."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    clip_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up; linear and cosine end at zero with the last step."""
    warmup: int = Field(0, ge=0)
    """Updates over which the learning rate rises linearly."""


class CriticOptimizer(Optimizer):
    """AdamW for the critic, with a default of its own."""

    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate."""


class Critic(Section):
    """The critic of credit gae: a copy of the policy at the start, with a value head, trained on the same plans."""

    clip: float = Field(0.2, gt=0)
    """How far a value may move from what it was before the step before its error stops shrinking."""
    optimizer: CriticOptimizer = CriticOptimizer()
    """Optimizer of the critic."""


class Evaluation(Section):
    """Held-out attempts, by the same agent loop."""

    every: int = Field(10, ge=0)
    """Steps between evaluations; 0 evaluates only before and after training."""
    tasks: int = Field(128, ge=1)
    """Held-out tasks per environment for evaluations during training."""
    final_tasks: int = Field(512, ge=1)
    """Held-out tasks per environment before and after training."""
    attempts: int = Field(1, ge=1)
    """Attempts per task."""
    temperature: float = Field(1.0, ge=0, le=1e6)
    """Of the sampled evaluation; a greedy one is always made beside it before and after training."""
    top_p: float = Field(1.0, ge=1e-6, le=1)
    """Nucleus of the sampled evaluation."""
    top_k: int = Field(0, ge=0, lt=1 << 31)
    """Most likely tokens the sampled evaluation may draw from; 0 for all."""
    overlap: bool = False
    """Training goes on beside evaluations, which have an engine and a copy of the weights of their own; those before
    and after training have the machine to themselves."""

    @model_validator(mode="after")
    def something_overlaps(self) -> Self:
        if self.overlap and not self.every:
            raise ValueError("overlap is ignored with every = 0, where nothing is evaluated during training")
        return self


class SftOptimizer(Optimizer):
    """AdamW for the warm start, with defaults of its own."""

    learning_rate: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup: int = Field(20, ge=0)
    """Updates over which the learning rate rises linearly."""


class Sft(Section):
    """Warm start on demonstrations, before reinforcement learning."""

    updates: int = Field(0, ge=0)
    """Optimizer steps of the warm start; 0 trains from the model as it is."""
    demonstrations: int = Field(2048, ge=1)
    """Tasks per environment that are demonstrated; met again, each has its mistakes elsewhere."""
    data: str = ""
    """JSON lines with {"messages": [...]} to learn from; empty asks the environments to demonstrate."""
    noise: float = Field(0.0, ge=0, le=1)
    """Chance of a mistake at each demonstrated turn."""
    batch: int = Field(64, ge=1)
    """Demonstrations per update."""
    optimizer: SftOptimizer = SftOptimizer()
    """Optimizer of the warm start."""
    remake: bool = False
    """Make the warm start again, where the cache has one already."""

    @model_validator(mode="after")
    def noise_needs_demonstrators(self) -> Self:
        if self.data and {"noise", "demonstrations"} & set(self.changed):
            raise ValueError("noise and demonstrations apply to demonstrating environments, not to sft.data")
        if self.remake and not self.updates:
            raise ValueError("remake is ignored with updates = 0, which makes no warm start")
        return self


class Runs(Section):
    """What a run leaves behind."""

    checkpoint_every: int = Field(20, ge=1)
    """Steps between checkpoints; one more is written at the end and on Ctrl-C."""
    checkpoints: int = Field(2, ge=1)
    """How many of the newest checkpoints stay, beside the best one."""
    archive_steps: int = Field(1000, ge=1)
    """How many of the newest steps' trajectories stay in the archive."""
    evaluations: int = Field(20, ge=1)
    """How many of the newest evaluations' trajectories stay, beside those of the best."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go beside metrics.jsonl."""
    project: str = "turnwise"
    """Project name for wandb."""


class Cluster(Section):
    """Where the learner and the engines run. By itself, all of a run is in one process."""

    placement: Literal["local", "colocated", "disaggregated"] = "local"
    """local is this machine, without Ray. On a Ray cluster colocated has learner ranks and engine replicas share nodes
    and GPUs, and disaggregated has no replica on a node with a rank."""
    address: str = ""
    """Of the Ray cluster, for instance 10.0.0.7:6379; empty takes the one that this machine is part of, or starts one
    here."""
    ranks: int = Field(1, ge=1)
    """Processes that hold the learner together, each with a part of the weights and of the plans; the result is that of
    one."""
    replicas: int = Field(1, ge=1)
    """Engines on the Ray cluster."""
    cpus: float = Field(1.0, gt=0)
    """CPUs that a rank and a replica have on the Ray cluster, each."""
    gpus: float = Field(0.0, ge=0)
    """GPUs that a rank and a replica have there, each; colocated ones share them."""
    patience: float = Field(120.0, gt=0)
    """Seconds that the Ray cluster has to find room for all of them."""

    @property
    def on_ray(self) -> bool:
        return self.placement != "local"

    @property
    def is_spread(self) -> bool:
        """Whether the learner is in other processes than the run."""
        return self.ranks > 1 or self.on_ray

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if not self.on_ray and (ignored := [name for name in self.changed if name != "ranks"]):
            raise ValueError(f'{ignored[0]} is ignored with placement = "local"')
        return self


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
    patience: float = Field(60.0, gt=0)
    """Seconds without a new group after which a warning says what is waited for."""
    groups_per_step: int = Field(8, ge=1)
    """Groups trained on in each step."""
    groups_per_update: int = Field(0, ge=0)
    """Groups per optimizer step; 0 takes the whole step's."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's groups."""
    layout: Literal["tree", "packed"] = "tree"
    """How turns are laid out: tree computes shared prefixes once, packed every turn by itself; the result is equal."""
    tokens_per_pass: int = Field(16384, ge=1)
    """Tokens per forward and backward pass; bounds memory, never changes the result."""
    nonfinite_limit: int = Field(3, ge=1)
    """Updates in a row that may be skipped for a non-finite loss or gradient before the run stops."""
    dropped_limit: int = Field(512, ge=1)
    """Groups in a row that may be dropped before the run stops."""
    gap_limit: float = Field(0.0, ge=0)
    """Mean difference between the engine's logprobs and the learner's, on tokens of the trained version, at which the
    run stops; 0 takes 1e-3 in float32 and 0.1 in bfloat16."""
    model: Model = Model()
    """The policy."""
    lora: Lora = Lora()
    """Its adapters."""
    env: tuple[Environment, ...] = Field(min_length=1)
    """Environments to train on, mixed by weight."""
    endpoint: Endpoint = Endpoint()
    """Where agents find the model."""
    rollout: Rollout = Rollout()
    """How attempts are made."""
    sampling: Sampling = Sampling()
    """How training attempts are sampled."""
    engine: Engine = Engine()
    """What samples."""
    sync: Sync = Sync()
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
    kl: Kl = Kl()
    """How the policy is kept near a reference."""
    correction: Correction = Correction()
    """Off-policy correction."""
    teacher: str = ""
    """A folder that transformers can load: the model that credit distill and the term of [distill] learn from."""
    distill: Distill = Distill()
    """How the policy's distributions are drawn to the teacher's."""
    critic: Critic = Critic()
    """What credit gae learns values with."""
    optimizer: Optimizer = Optimizer()
    """AdamW and its schedule."""
    evaluation: Evaluation = Evaluation()
    """Held-out attempts."""
    sft: Sft = Sft()
    """Warm start."""
    runs: Runs = Runs()
    """What a run leaves behind."""
    cluster: Cluster = Cluster()
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
        if self.layout == "packed" and self.tokens_per_pass < self.rollout.max_trajectory_tokens:
            raise ValueError(
                f"tokens_per_pass = {self.tokens_per_pass} cannot hold a turn of "
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
        if self.sync.changed and self.engine_shares_weights:
            raise ValueError(
                f"sync.{self.sync.changed[0]} is ignored with max_lag = 0, where the engine computes on the learner's "
                "own weights; remove it"
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
        if self.engine.context and self.engine.context < self.rollout.max_trajectory_tokens:
            raise ValueError(
                f"engine.context = {self.engine.context} is shorter than "
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

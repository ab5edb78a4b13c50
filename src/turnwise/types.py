"""The values that flow through turnwise: tasks, turns, trajectories, groups.

All are frozen, complete at birth and free of torch. Arrays are read-only. Letters in shape comments:
P prompt tokens of a turn, A action tokens of a turn.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]
TOOL_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")


class StopReason(StrEnum):
    """Why the engine stopped sampling an action."""

    end_token = "end_token"
    """The model sampled an end token; it is the last token of the action."""
    stop_string = "stop_string"
    """The action's text came to contain a stop string; its tokens are part of the action."""
    length = "length"
    """The token limit of the call was reached."""
    abort = "abort"
    """The caller aborted; the action holds what was sampled so far."""


class Status(StrEnum):
    """How an attempt ended. The environment says only *finished*; the rest is the agent loop's word."""

    finished = "finished"
    too_many_turns = "too_many_turns"
    too_long = "too_long"
    prompt_too_long = "prompt_too_long"
    timed_out = "timed_out"
    failed = "failed"
    penalised = "penalised"
    """Failed or timed out, and counted all the same, by `rollout.on_failure`."""

    @property
    def counts(self) -> bool:
        """Whether an attempt that ended so enters the statistics of its group."""
        return self in (Status.finished, Status.too_many_turns, Status.too_long, Status.penalised)


class Break(StrEnum):
    """Why a prompt does not begin with the turn before it."""

    none = "none"
    """It does, or there is no turn before."""
    template = "template"
    """The chat template writes the turn before differently once new messages follow."""
    retokenised = "retokenised"
    """The text only grew, but the action was sampled in other tokens than the tokenizer makes of its text."""
    history = "history"
    """The environment chose what the model sees."""
    unknown = "unknown"
    """Nobody recorded why."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool: its name and its arguments, which are JSON values.

    Example:
        ToolCall("get", {"name": "amber"})
    """

    name: str
    arguments: Mapping[str, Any] = field(compare=False)
    text: str = field(init=False, repr=False)
    """The arguments as text. Calls are equal where it is: 1, 1.0 and true are not."""

    def __post_init__(self) -> None:
        if type(self.name) is not str or not self.name:
            raise ValueError(f"a ToolCall needs a name, got {self.name!r}")
        try:
            text = json.dumps(dict(self.arguments), ensure_ascii=False, allow_nan=False)
            own = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the arguments of a ToolCall are a mapping to JSON values ({error})") from None
        object.__setattr__(self, "arguments", MappingProxyType(own))
        object.__setattr__(self, "text", text)

    def __reduce__(self) -> tuple[Any, ...]:
        return ToolCall, (self.name, dict(self.arguments))


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that a model may call: its name, what it does, and a JSON schema of its arguments.

    Example:
        ToolSpec("get", "Where a name leads.", {"type": "object", "properties": {"name": {"type": "string"}}})
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}}, compare=False)
    text: str = field(init=False, repr=False)
    """The parameters as text. Tools are equal where it is, down to the order of their arguments, which is shown."""

    def __post_init__(self) -> None:
        if type(self.name) is not str or not TOOL_NAME.fullmatch(self.name):
            raise ValueError(f'the name of a ToolSpec is letters, digits, "_", "-" and ".", got {self.name!r}')
        if type(self.description) is not str:
            raise ValueError(f"the description of a ToolSpec is a string, got {type(self.description).__name__}")
        try:
            text = json.dumps(dict(self.parameters), ensure_ascii=False, allow_nan=False)
            own = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the parameters of the tool {self.name} are a JSON schema ({error})") from None
        if own.get("type") != "object" or not isinstance(own.get("properties", {}), dict):
            raise ValueError(
                f'the parameters of the tool {self.name} are a JSON schema like {{"type": "object", "properties": ...}}'
            )
        object.__setattr__(self, "parameters", MappingProxyType(own))
        object.__setattr__(self, "text", text)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI's interface have it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def __reduce__(self) -> tuple[Any, ...]:
        return ToolSpec, (self.name, self.description, dict(self.parameters))


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, as a chat template sees it.

    Example:
        Message("user", "Start at amber. Follow 2 links.")
        Message("assistant", "", thinking="amber first", calls=(ToolCall("get", {"name": "amber"}),))
    """

    role: str
    content: str
    thinking: str = ""
    """Reasoning, where it is known apart from the content."""
    calls: tuple[ToolCall, ...] = ()
    fault: str = ""
    """What is wrong with a call that could not be read, in a line for the model; the content then has all the text."""

    def __post_init__(self) -> None:
        if not isinstance(self.role, str) or not isinstance(self.content, str):
            raise ValueError(
                f"a Message is two strings, got {type(self.role).__name__} and {type(self.content).__name__}"
            )
        if type(self.thinking) is not str or type(self.fault) is not str:
            raise ValueError("the thinking and the fault of a Message are strings")
        if type(self.calls) is not tuple:
            object.__setattr__(self, "calls", tuple(self.calls))
        if any(type(call) is not ToolCall for call in self.calls):
            raise ValueError("the calls of a Message are ToolCall values")


@dataclass(frozen=True, slots=True)
class Task:
    """One dataset item an agent attempts.

    Example:
        Task(id="hops-5f2c01", dataset="hops", data={"start": "amber", "links": 2})
    """

    id: str
    """Stable across runs and processes; equal ids are the same task."""
    dataset: str
    """Which environment of the recipe opens this task."""
    data: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)
    """What the environment needs to open it: JSON values."""

    def __post_init__(self) -> None:
        if not self.id or not isinstance(self.id, str):
            raise ValueError(f"a Task needs a non-empty string id, got {self.id!r}")
        if not isinstance(self.data, Mapping):
            raise ValueError(f"task {self.id}: data must be a mapping, got {type(self.data).__name__}")
        object.__setattr__(self, "data", dict(self.data))


@dataclass(frozen=True, slots=True)
class TurnTiming:
    """Seconds a turn spent waiting for the engine, in prefill, in decode and in the environment."""

    queued: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    environment: float = 0.0


def is_frozen(array: NDArray[Any]) -> bool:
    """Whether nobody can write to an array, through it or through what it is a view of."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return False
        base = base.base
    return True


def frozen_array(values: Any, dtype: Any, what: str) -> NDArray[Any]:
    """A read-only one-dimensional array: the argument itself where it is one already, a copy otherwise."""
    if type(values) is np.ndarray and values.dtype == dtype and values.ndim == 1 and is_frozen(values):
        return values
    given = values if isinstance(values, np.ndarray) else np.array(values)
    if given.ndim != 1:
        raise ValueError(f"{what} must be one-dimensional, got shape {given.shape}")
    with np.errstate(over="ignore", invalid="ignore"):
        array = given.astype(dtype)
    if np.issubdtype(dtype, np.integer) and len(given) and not np.array_equal(array, given):
        raise ValueError(f"{what} must hold whole numbers of {np.dtype(dtype).itemsize * 8} bits")
    array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One model call, what was sampled, and what the environment answered.

    The action holds sampled tokens and nothing else; observations live in the next turn's prompt.

    Example:
        Turn(prompt=[1, 17, 4], action=[9, 2], logprobs=[-0.1, -0.7], versions=[3, 3], stop=StopReason.end_token,
             reward=0.0, said=Message("assistant", "get amber"), heard=(Message("user", "amber: cedar"),))
    """

    prompt: Tokens
    """[P] exactly what the engine got."""
    action: Tokens
    """[A] sampled tokens; a sampled end token included, none ever appended."""
    logprobs: Floats
    """[A] under the distribution each token was sampled from; NaN where nobody knows (demonstrations)."""
    versions: Tokens
    """[A] version of the weights that sampled each token."""
    stop: StopReason
    reward: float
    """Paid by the environment for this turn."""
    said: Message
    heard: tuple[Message, ...] = ()
    timing: TurnTiming = TurnTiming()
    broke: Break = Break.none
    """Why the prompt does not begin with the turn before."""

    def __repr__(self) -> str:
        """Short: asyncio writes out the result of a whole run when that ends."""
        return f"Turn({len(self.prompt)} + {len(self.action)} tokens, {self.stop}, reward {self.reward:g})"

    def __post_init__(self) -> None:
        fix = object.__setattr__
        fix(self, "prompt", frozen_array(self.prompt, np.int32, "Turn.prompt"))
        fix(self, "action", frozen_array(self.action, np.int32, "Turn.action"))
        fix(self, "logprobs", frozen_array(self.logprobs, np.float32, "Turn.logprobs"))
        fix(self, "versions", frozen_array(self.versions, np.int32, "Turn.versions"))
        fix(self, "stop", StopReason(self.stop))
        fix(self, "broke", Break(self.broke))
        fix(self, "heard", tuple(self.heard))
        size = len(self.action)
        if len(self.logprobs) != size or len(self.versions) != size:
            raise ValueError(
                f"a Turn has one logprob and one version per action token, got {size} tokens, "
                f"{len(self.logprobs)} logprobs and {len(self.versions)} versions"
            )
        if len(self.prompt) == 0:
            raise ValueError("a Turn needs a prompt of at least one token")
        if self.prompt.min() < 0 or (size and self.action.min() < 0):
            raise ValueError("token ids must not be negative")
        if size and np.fmax.reduce(self.logprobs) > 1e-4:
            raise ValueError("log probabilities must not be positive")
        if not math.isfinite(self.reward):
            raise ValueError(f"a reward must be finite, got {self.reward}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Turn, tuple(getattr(self, name) for name in Turn.__slots__)


LARGEST_PAY = 1e30
"""The largest reward, outcome or mark of an environment: squares and sums of such numbers are finite in float64."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One attempt at a task: its turns in order, how it ended and what it was paid.

    Turns whose prompt extends the turn before share one token buffer, in memory and when pickled. One that does not,
    and does not say why, has broken for an unknown reason.

    Example:
        Trajectory(turns=(first, second), status=Status.finished, outcome=1.0, marks={"lookups": 2.0})
    """

    turns: tuple[Turn, ...]
    status: Status
    outcome: float = 0.0
    """Paid once, for the whole attempt."""
    marks: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the outcome, for people; nothing trains on them."""
    failure: str = ""
    """Why it failed: what was raised and where, then a colon and what it said. Empty where it did not."""

    def __post_init__(self) -> None:
        fix = object.__setattr__
        fix(self, "status", Status(self.status))
        fix(self, "marks", MappingProxyType({str(name): float(value) for name, value in self.marks.items()}))
        if not math.isfinite(self.outcome):
            raise ValueError(f"an outcome must be finite, got {self.outcome}")
        if not math.isfinite(self.total):
            raise ValueError("the rewards of a trajectory must add up to a finite number")
        if not self.turns and self.status.counts:
            raise ValueError(f"a trajectory that ended as {self.status} has at least one turn")
        fix(self, "turns", share_storage(tuple(self.turns)))

    @property
    def total(self) -> float:
        """R: the outcome and all turn rewards."""
        try:
            return self.outcome + math.fsum(turn.reward for turn in self.turns)
        except OverflowError:
            return math.inf

    @property
    def reason(self) -> str:
        """Why it failed, without what was said: two attempts with the same one failed alike."""
        return self.failure.partition(": ")[0]

    @property
    def num_action_tokens(self) -> int:
        return sum(len(turn.action) for turn in self.turns)

    def __reduce__(self) -> tuple[Any, ...]:
        buffer, spans = pack_tokens(self.turns)
        rest = [(t.logprobs, t.versions, t.stop, t.reward, t.said, t.heard, t.timing, t.broke) for t in self.turns]
        return rebuild_trajectory, (buffer, spans, rest, self.status, self.outcome, dict(self.marks), self.failure)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The attempts at one task that are compared with each other.

    Example:
        Group(task=task, trajectories=(first, second), failed=())
    """

    task: Task
    trajectories: tuple[Trajectory, ...]
    """Attempts that count."""
    failed: tuple[Trajectory, ...] = ()
    """Attempts that do not: failed, timed_out, prompt_too_long."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "trajectories", tuple(self.trajectories))
        object.__setattr__(self, "failed", tuple(self.failed))
        for trajectory in self.trajectories:
            if not trajectory.status.counts:
                raise ValueError(f"an attempt that ended as {trajectory.status} belongs in Group.failed")
        for trajectory in self.failed:
            if trajectory.status.counts:
                raise ValueError(f"an attempt that ended as {trajectory.status} belongs in Group.trajectories")


def turns_of(groups: Sequence[Group]) -> Iterator[Turn]:
    """The turns that train, in the one order every per-turn list of the system follows."""
    for group in groups:
        for trajectory in group.trajectories:
            yield from trajectory.turns


def pack_tokens(turns: Sequence[Turn]) -> tuple[Tokens, NDArray[np.int64]]:
    """One token buffer and, per turn, [start, end of prompt, end of action] in it.

    A turn whose prompt begins with the whole turn before it continues that turn's place in the buffer, so a
    history that only grew is stored once.
    """
    spans = np.zeros((len(turns), 3), np.int64)
    parts: list[Tokens] = []
    size = 0
    start = 0
    for index, turn in enumerate(turns):
        before = turns[index - 1] if index else None
        if before is None or not extends(turn, before):
            start, parts_of_turn = size, [turn.prompt, turn.action]
        else:
            parts_of_turn = [turn.prompt[len(before.prompt) + len(before.action) :], turn.action]
        parts.extend(parts_of_turn)
        size += sum(len(part) for part in parts_of_turn)
        spans[index] = start, size - len(turn.action), size
    buffer = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    buffer.flags.writeable = False
    return buffer, spans


def extends(turn: Turn, before: Turn) -> bool:
    """Whether the prompt of `turn` begins with the prompt and action of `before`."""
    p, a = len(before.prompt), len(before.action)
    return (
        len(turn.prompt) >= p + a
        and np.array_equal(turn.prompt[:p], before.prompt)
        and np.array_equal(turn.prompt[p : p + a], before.action)
    )


def lost_tokens(turn: Turn, before: Turn) -> int:
    """Tokens of the turn before, prompt and action, that the prompt of `turn` does not begin with."""
    known = np.concatenate([before.prompt, before.action])
    size = min(len(known), len(turn.prompt))
    differs = known[:size] != turn.prompt[:size]
    return len(known) - (int(differs.argmax()) if differs.any() else size)


def share_storage(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The same turns with prompts and actions as views of one buffer."""
    buffer, spans = pack_tokens(turns)
    shared = []
    begun = 0
    for turn, (start, middle, end) in zip(turns, spans.tolist(), strict=True):
        broke = Break.unknown if start != begun and turn.broke is Break.none else turn.broke
        shared.append(with_tokens(turn, buffer[start:middle], buffer[middle:end], broke))
        begun = start
    return tuple(shared)


def with_tokens(turn: Turn, prompt: Tokens, action: Tokens, broke: Break) -> Turn:
    """The same turn with its tokens stored elsewhere; nothing is checked again."""
    moved = object.__new__(Turn)
    for name in Turn.__slots__:
        object.__setattr__(moved, name, getattr(turn, name))
    object.__setattr__(moved, "prompt", prompt)
    object.__setattr__(moved, "action", action)
    object.__setattr__(moved, "broke", broke)
    return moved


def rebuild_trajectory(
    buffer: Tokens,
    spans: NDArray[np.int64],
    rest: list[tuple[Any, ...]],
    status: Status,
    outcome: float,
    marks: dict[str, float],
    failure: str = "",
) -> Trajectory:
    """Inverse of `Trajectory.__reduce__`, also used by the archive."""
    buffer.flags.writeable = False
    turns = tuple(Turn(buffer[a:b], buffer[b:c], *fields) for (a, b, c), fields in zip(spans, rest, strict=True))
    return Trajectory(turns, status, outcome, marks, failure)

"""The values that flow through turnwise: tasks, turns, trajectories, groups.

All are frozen, complete at birth and free of torch. Arrays are read-only. Letters in shape comments:
P prompt tokens of a turn, A action tokens of a turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.allowed import Allowed
from turnwise.messages import Message, ToolSpec
from turnwise.routes import Routes, frozen_routes, pack_routes, unpack_routes, without_known
from turnwise.tokens import Floats, Tokens, frozen_array, pack_tokens


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
    observation_too_large = "observation_too_large"
    """An observation had more bytes than are tokenised; nothing of it was shown."""
    prompt_too_long = "prompt_too_long"
    timed_out = "timed_out"
    failed = "failed"
    penalised = "penalised"
    """Failed or timed out, and counted all the same, by `rollout.failures.on_failure`."""

    @property
    def counts(self) -> bool:
        """Whether an attempt that ended so enters the statistics of its group."""
        return self not in (Status.prompt_too_long, Status.timed_out, Status.failed)

    @property
    def cut_short(self) -> bool:
        """Whether a limit of the agent loop ended an attempt that counts."""
        return self in (Status.too_many_turns, Status.too_long, Status.observation_too_large)


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

    def __reduce__(self) -> tuple[Any, ...]:
        return TurnTiming, (self.queued, self.prefill, self.decode, self.environment)


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
    allowed: Allowed | None = None
    """The tokens that a grammar allowed for each action token; None where all were. Logprobs are under it."""
    routes: Routes | None = None
    """[n, layers, k] the experts that the n tokens before the last one took, in a mixture of experts; in a trajectory
    only of tokens that the turn before has none for. None where the engine gave none."""

    def __repr__(self) -> str:
        """Short: asyncio writes out the result of a whole run when that ends."""
        return f"Turn({len(self.prompt)} + {len(self.action)} tokens, {self.stop}, reward {self.reward:g})"

    def __post_init__(self) -> None:
        fix = object.__setattr__
        fix(self, "prompt", frozen_array(self.prompt, np.int32, "Turn.prompt"))
        fix(self, "action", frozen_array(self.action, np.int32, "Turn.action"))
        fix(self, "logprobs", frozen_array(self.logprobs, np.float32, "Turn.logprobs"))
        fix(self, "versions", frozen_array(self.versions, np.int32, "Turn.versions"))
        if type(self.stop) is not StopReason:
            fix(self, "stop", StopReason(self.stop))
        if type(self.broke) is not Break:
            fix(self, "broke", Break(self.broke))
        if type(self.heard) is not tuple:
            fix(self, "heard", tuple(self.heard))
        size = len(self.action)
        if len(self.logprobs) != size or len(self.versions) != size:
            raise ValueError(
                f"a Turn has one logprob and one version per action token, got {size} tokens, "
                f"{len(self.logprobs)} logprobs and {len(self.versions)} versions"
            )
        if self.allowed is not None and len(self.allowed.places) != size:
            raise ValueError(f"a Turn has one set of allowed tokens per action token, got {len(self.allowed.places)}")
        if self.routes is not None:
            fix(self, "routes", frozen_routes(self.routes))
            if len(self.routes) > max(0, len(self.prompt) + size - 1):
                raise ValueError(f"a Turn of {len(self.prompt) + size} tokens has no routes of {len(self.routes)}")
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
    seat: int = 0
    """Which side of a game it played, if several seats of a game are attempts. Only attempts of the same seat are
    compared with each other."""
    opening: tuple[Message, ...] = ()
    """The messages of the first prompt, for people and other formats; empty where nobody recorded them."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools that the first prompt offered."""
    buffer: Tokens = field(init=False, repr=False)
    """[N] the tokens of all turns; a history that only grew is in it once."""
    spans: NDArray[np.int64] = field(init=False, repr=False)
    """[turns, 3] where each turn starts in the buffer, where its prompt ends, and where its action ends. A turn starts
    where the turn before does if, and only if, its prompt begins with that turn."""

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
        buffer, spans = pack_tokens(self.turns)
        fix(self, "buffer", buffer)
        fix(self, "spans", spans)
        fix(self, "turns", share_storage(tuple(self.turns), buffer, spans))

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
        logprobs = np.concatenate([np.zeros(0, np.float32), *(turn.logprobs for turn in self.turns)])
        versions = np.concatenate([np.zeros(0, np.int32), *(turn.versions for turn in self.turns)])
        rest = [
            (t.stop, t.reward, of_message(t.said), [*map(of_message, t.heard)], of_timing(t.timing), t.broke, t.allowed)
            for t in self.turns
        ]
        end = self.status, self.outcome, dict(self.marks), self.failure, self.seat, self.opening, self.tools
        return unpickled_trajectory, (self.buffer, self.spans, logprobs, versions, rest, end, pack_routes(self.turns))


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The attempts at one task, seat by seat; those of a seat are compared with each other.

    Example:
        Group(task=task, trajectories=(first, second), failed=())
    """

    task: Task
    trajectories: tuple[Trajectory, ...]
    """Attempts that count."""
    failed: tuple[Trajectory, ...] = ()
    """Attempts that do not: failed, timed_out, prompt_too_long."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "trajectories", tuple(sorted(self.trajectories, key=lambda one: one.seat)))
        object.__setattr__(self, "failed", tuple(self.failed))
        for trajectory in self.trajectories:
            if not trajectory.status.counts:
                raise ValueError(f"an attempt that ended as {trajectory.status} belongs in Group.failed")
        for trajectory in self.failed:
            if trajectory.status.counts:
                raise ValueError(f"an attempt that ended as {trajectory.status} belongs in Group.trajectories")


def by_seat(groups: Sequence[Group]) -> list[Group]:
    """One group for each seat of each group: what statistics compare. The turns are the same in the same order, so that
    what is one per turn fits both; a group of one seat is itself."""
    parts: list[Group] = []
    for group in groups:
        seats = sorted({one.seat for one in (*group.trajectories, *group.failed)})
        if len(seats) < 2:
            parts.append(group)
            continue
        for seat in seats:
            of_seat = [tuple(one for one in those if one.seat == seat) for those in (group.trajectories, group.failed)]
            parts.append(Group(group.task, *of_seat))
    return parts


def turns_of(groups: Sequence[Group]) -> Iterator[Turn]:
    """The turns that train, in the one order every per-turn list of the system follows."""
    for group in groups:
        for trajectory in group.trajectories:
            yield from trajectory.turns


def share_storage(turns: tuple[Turn, ...], buffer: Tokens, spans: NDArray[np.int64]) -> tuple[Turn, ...]:
    """The same turns with prompts and actions as views of the buffer that they were packed into, and with routes of new
    tokens only."""
    shared: list[Turn] = []
    begun = 0
    for turn, (start, middle, end) in zip(turns, spans.tolist(), strict=True):
        broke = Break.unknown if start != begun and turn.broke is Break.none else turn.broke
        routes = without_known(turn, shared[-1] if shared else None)
        shared.append(with_tokens(turn, buffer[start:middle], buffer[middle:end], broke, routes))
        begun = start
    return tuple(shared)


def with_tokens(turn: Turn, prompt: Tokens, action: Tokens, broke: Break, routes: Routes | None) -> Turn:
    """The same turn with its tokens stored elsewhere; nothing is checked again."""
    first, last = (turn.logprobs, turn.versions, turn.stop, turn.reward, turn.said, turn.heard), turn.allowed
    moved: Turn = unchecked(Turn, prompt, action, *first, turn.timing, broke, last, routes)
    return moved


def unchecked(kind: Any, *values: Any) -> Any:
    """A value of a class with slots whose fields were checked when it was first made."""
    made = object.__new__(kind)
    for name, value in zip(kind.__slots__, values, strict=True):
        object.__setattr__(made, name, value)
    return made


of_message, of_timing = attrgetter(*Message.__slots__), attrgetter(*TurnTiming.__slots__)


def unpickled_trajectory(
    buffer: Tokens,
    spans: NDArray[np.int64],
    logprobs: Floats,
    versions: Tokens,
    rest: list[tuple[Any, ...]],
    end: tuple[Any, ...],
    packed_routes: tuple[Routes | None, list[int]],
) -> Trajectory:
    """Inverse of `Trajectory.__reduce__`. All of it was checked where the trajectory was made, and is not again: a run
    gets the groups of all its rollout workers."""
    for array in (buffer, spans, logprobs, versions):
        array.flags.writeable = False
    turns, first = [], 0
    routes = unpack_routes(*packed_routes)
    for (a, b, c), (stop, reward, said, heard, timing, broke, allowed), own in zip(
        spans.tolist(), rest, routes, strict=True
    ):
        last = first + c - b
        spoken, answers = unchecked(Message, *said), tuple(unchecked(Message, *fields) for fields in heard)
        sampled = buffer[a:b], buffer[b:c], logprobs[first:last], versions[first:last]
        clock = unchecked(TurnTiming, *timing)
        turns.append(unchecked(Turn, *sampled, stop, reward, spoken, answers, clock, broke, allowed, own))
        first = last
    status, outcome, marks, *more = end
    made: Trajectory = unchecked(
        Trajectory, tuple(turns), status, outcome, MappingProxyType(marks), *more, buffer, spans
    )
    return made


def rebuild_trajectory(
    buffer: Tokens,
    spans: NDArray[np.int64],
    rest: list[tuple[Any, ...]],
    status: Status,
    outcome: float,
    marks: dict[str, float],
    failure: str = "",
    seat: int = 0,
    opening: tuple[Message, ...] = (),
    tools: tuple[ToolSpec, ...] = (),
    packed_routes: tuple[Routes | None, list[int]] | None = None,
) -> Trajectory:
    """A trajectory of an archive, checked as a new one is."""
    buffer.flags.writeable = False
    routes = [None] * len(rest) if packed_routes is None else unpack_routes(*packed_routes)
    turns = tuple(
        Turn(buffer[a:b], buffer[b:c], *fields, routes=routes_of_turn)  # type: ignore[misc]
        for (a, b, c), fields, routes_of_turn in zip(spans, rest, routes, strict=True)
    )
    return Trajectory(turns, status, outcome, marks, failure, seat, opening, tools)

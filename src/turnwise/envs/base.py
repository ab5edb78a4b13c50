"""The border to environments: what an environment is, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from turnwise.envs.raised import Raised, unpacked
from turnwise.messages import Message, ToolSpec
from turnwise.types import LARGEST_PAY, Task


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment answers to `open`, `step` or `close`. Checked when made: replies are hostile input.

    Example:
        Reply((Message("user", "amber: cedar"),), reward=0.1)
        Reply(finished=True, outcome=1.0)
    """

    messages: tuple[Message, ...] = ()
    """What the model hears before its next turn."""
    reward: float = 0.0
    """Paid for the last turn."""
    outcome: float = 0.0
    """Paid for the whole attempt; adds up over replies."""
    finished: bool = False
    """Whether the attempt is over."""
    marks: Mapping[str, float] = field(default_factory=dict)
    """Named measurements, for people; a later mark replaces an earlier one."""
    history: tuple[Message, ...] | None = None
    """What the model sees next, instead of everything so far (a window, a summary)."""
    stop: tuple[str, ...] = ()
    """Strings that end the next action."""
    tools: tuple[ToolSpec, ...] | None = None
    """The tools that the model may call from now on; None: as before. At first there are none."""
    raised: tuple[Raised, ...] = ()
    """Errors that the environment survived, for the log: those inside a tool, of which the model hears a line."""
    seats: tuple[Reply, ...] = ()
    """In a game whose seats are all played by models: what each seat hears now. Empty everywhere else."""
    moves_next: int = 0
    """The seat that acts next, if there are seats."""

    def __post_init__(self) -> None:
        fix = object.__setattr__
        try:
            fix(self, "messages", plain_messages(self.messages))
            fix(self, "reward", plain_number(self.reward))
            fix(self, "outcome", plain_number(self.outcome))
            if type(self.finished) is not bool:
                raise ValueError(f"Reply.finished is a bool, got {type(self.finished).__name__}")
            fix(self, "marks", plain_marks(self.marks))
            if self.history is not None:
                fix(self, "history", plain_messages(self.history))
            fix(self, "stop", plain_stop(self.stop))
            if self.tools is not None:
                fix(self, "tools", plain_tools(self.tools))
            fix(self, "raised", plain_raised(self.raised))
            fix(self, "seats", plain_seats(self.seats, self.moves_next))
        except ValueError:
            raise
        except Exception as error:  # reading a value runs its own code, and that may raise anything
            raise ValueError("a Reply holds a value that cannot be read; give it plain messages and numbers") from error


# What an environment gives is copied into values of our own types: a subclass may do anything when it is compared,
# hashed or pickled later. Types are asked of the value's class, because an instance can lie about `__class__`.


def is_plain(reply: Reply) -> bool:
    """Whether a reply is as `Reply` makes it, and holds nothing but plain values; checked without calling any code of
    theirs. False for the rarer fields, which are checked by making a new one."""
    if type(reply) is not Reply:
        return False
    try:
        return (
            reply.tools is None
            and type(reply.messages) is tuple
            and all(map(is_plain_message, reply.messages))
            and (reply.history is None or (type(reply.history) is tuple and all(map(is_plain_message, reply.history))))
            and is_plain_number(reply.reward)
            and is_plain_number(reply.outcome)
            and type(reply.finished) is bool
            and type(reply.marks) is dict
            and all(type(name) is str and is_plain_number(value) for name, value in reply.marks.items())
            and type(reply.stop) is tuple
            and all(type(text) is str and text for text in reply.stop)
            and type(reply.raised) is tuple
            and not reply.raised
            and type(reply.seats) is tuple
            and not reply.seats
            and type(reply.moves_next) is int
            and reply.moves_next == 0
        )
    except AttributeError:  # a value that was made without its fields
        return False


def is_plain_message(message: Any) -> bool:
    """Whether a message without calls is as `Message` makes it; one that was made without its fields is not."""
    return (
        type(message) is Message
        and type(message.role) is str
        and type(message.content) is str
        and type(message.thinking) is str
        and type(message.fault) is str
        and type(message.calls) is tuple
        and not message.calls
    )


def is_plain_number(number: Any) -> bool:
    return type(number) is float and abs(number) <= LARGEST_PAY


def plain_messages(given: Any) -> tuple[Message, ...]:
    """The messages, checked one by one, so that an endless iterable is refused at its first wrong item."""
    if isinstance(given, (str, Message)):
        raise ValueError("Reply.messages and Reply.history are sequences, not a single message or string")
    messages: list[Message] = []
    for message in given:
        if is_plain_message(message):
            messages.append(message)
            continue
        if not issubclass(type(message), Message):
            raise ValueError(f"a Reply holds Message values, got {type(message).__name__}")
        parts = {name: getattr(message, name) for name in Message.__slots__}
        texts = {name: plain_text(parts[name]) for name in ("role", "content")}
        messages.append(Message(**{**parts, **texts}))
    return tuple(messages)


def plain_number(given: Any) -> float:
    if not issubclass(type(given), Real) or type(given) is bool:
        raise ValueError(f"rewards, outcomes and marks are finite numbers, got {type(given).__name__}")
    try:
        number = float(given)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST_PAY:
        raise ValueError(f"rewards, outcomes and marks are finite numbers up to {LARGEST_PAY:g}, got {number:g}")
    return number


def plain_text(given: Any) -> str:
    if not issubclass(type(given), str):
        raise ValueError(f"texts and names in a Reply are strings, got {type(given).__name__}")
    return str.__str__(given)


def plain_marks(given: Any) -> dict[str, float]:
    if not issubclass(type(given), Mapping):
        raise ValueError(f"Reply.marks maps names to numbers, got {type(given).__name__}")
    return {plain_text(name): plain_number(value) for name, value in given.items()}


def plain_stop(given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        raise ValueError("Reply.stop is a sequence of strings, not a single one")
    stop: list[str] = []
    for text in given:
        if not issubclass(type(text), str) or not plain_text(text):
            raise ValueError("Reply.stop holds non-empty strings")
        stop.append(plain_text(text))
    return tuple(stop)


def plain_tools(given: Any) -> tuple[ToolSpec, ...]:
    if issubclass(type(given), (str, Mapping, ToolSpec)):
        raise ValueError("Reply.tools is a sequence of ToolSpec values, not a single one")
    tools: dict[str, ToolSpec] = {}
    for tool in given:
        if not issubclass(type(tool), ToolSpec):
            raise ValueError(f"Reply.tools holds ToolSpec values, got {type(tool).__name__}")
        copy = ToolSpec(plain_text(tool.name), plain_text(tool.description), tool.parameters)
        if copy.name in tools:
            raise ValueError(f"Reply.tools has two tools with the name {copy.name}")
        tools[copy.name] = copy
    return tuple(tools.values())


def plain_raised(given: Any) -> tuple[Raised, ...]:
    if issubclass(type(given), (str, Mapping)):
        raise ValueError("Reply.raised is a sequence of Raised values")
    errors: list[Raised] = []
    for error in given:
        if not issubclass(type(error), Raised):
            raise ValueError(f"Reply.raised holds Raised values, got {type(error).__name__}")
        errors.append(unpacked([getattr(error, name) for name in Raised.__slots__]))
    return tuple(errors)


def plain_seats(given: Any, moves_next: Any) -> tuple[Reply, ...]:
    if type(moves_next) is not int or not 0 <= moves_next < max(1, len(given)):
        raise ValueError("Reply.moves_next is the number of a seat")
    seats: list[Reply] = []
    for reply in given:
        if not issubclass(type(reply), Reply) or reply.seats:
            raise ValueError("Reply.seats holds one Reply for each seat, which has no seats itself")
        seats.append(Reply(**{name: getattr(reply, name) for name in Reply.__slots__}))
    return tuple(seats)


class Environment(Protocol):
    """One object per attempt. Methods may be plain functions: those run in a thread and block nobody else. The
    constructor must be quick; slow work belongs in `open`.

    A class may offer more, such as tasks, demonstrations and batched calls: see `turnwise.envs.capabilities`.
    """

    async def open(self, task: Task) -> Reply:
        """Start the attempt: the first messages."""
        ...

    async def step(self, message: Message) -> Reply:
        """Answer one action."""
        ...

    async def close(self) -> Reply | None:
        """Free all resources; called exactly once. A reply may pay a late outcome."""
        ...

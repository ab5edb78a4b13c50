"""The border to environments: what an environment is, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from turnwise.types import Message, Task


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment answers to `open`, `step` or `close`; checked at birth, because replies are hostile input.

    Example:
        Reply((Message("user", "amber: cedar"),), reward=0.1)
        Reply(finished=True, outcome=1.0)
    """

    messages: tuple[Message, ...] = ()
    """What the model hears before its next turn."""
    reward: float = 0.0
    """Paid for the turn that was just made."""
    outcome: float = 0.0
    """Paid for the attempt as a whole; adds up over replies."""
    finished: bool = False
    """Whether the attempt is over."""
    marks: Mapping[str, float] = field(default_factory=dict)
    """Named measurements, for people; a later mark replaces an earlier one."""
    history: tuple[Message, ...] | None = None
    """What the model shall see next, in place of everything so far (a window, a summary)."""
    stop: tuple[str, ...] = ()
    """Strings that end the next action."""

    def __post_init__(self) -> None:
        if isinstance(self.messages, (str, Message)) or isinstance(self.stop, str):
            raise ValueError("Reply.messages and Reply.stop are sequences, not a single message or string")
        object.__setattr__(self, "messages", tuple(self.messages))
        object.__setattr__(self, "stop", tuple(self.stop))
        if self.history is not None:
            object.__setattr__(self, "history", tuple(self.history))
        for message in (*self.messages, *(self.history or ())):
            if not isinstance(message, Message):
                raise ValueError(f"a Reply holds Message values, got {type(message).__name__}")
        for amount in (self.reward, self.outcome, *self.marks.values()):
            if isinstance(amount, bool) or not isinstance(amount, Real) or not math.isfinite(amount):
                raise ValueError(f"rewards, outcomes and marks are finite numbers, got {amount!r}")
        if not isinstance(self.finished, bool):
            raise ValueError(f"Reply.finished is a bool, got {self.finished!r}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError("Reply.stop holds non-empty strings")


class Environment(Protocol):
    """One object per attempt. Methods may be plain functions; those run in a thread and hold up nobody else. The
    constructor must be quick: what takes time belongs in `open`.

    Beside these a class offers `tasks(split, seed, ...) -> Iterable[Task]`, with "train" and "heldout" splits that
    share no task, and may offer `demonstrate(noise, random) -> str`, what an expert would say now.
    """

    async def open(self, task: Task) -> Reply:
        """Start the attempt: the first messages."""
        ...

    async def step(self, message: Message) -> Reply:
        """Answer one action."""
        ...

    async def close(self) -> Reply | None:
        """Let go of everything; called once, always. A reply may pay a late outcome."""
        ...


class EnvironmentClass(Protocol):
    """What a recipe names: a constructor and its tasks."""

    def __call__(self, **settings: Any) -> Environment: ...

    def tasks(self, split: str, seed: int, **arguments: Any) -> Iterable[Task]: ...

"""The skeletons of the conversations that are going on, each extended by its new messages only.

Two conversations with the same skeleton have the same number, so that what is known of one is found for the other
without reading all of it again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from turnwise.messages import Message

Messages = tuple[Message, ...]
MOST_NUMBERS = 1 << 16
"""Numbers that are remembered; then all are forgotten, and none is given twice."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownHistory:
    """A conversation, its skeleton, and the number of that skeleton."""

    messages: Messages
    skeleton: Messages
    number: int
    num_bytes: int
    """About as much memory as it takes."""


@dataclass(frozen=True, slots=True)
class Addition:
    """The last `size` messages of a skeleton, and those before them. Equal numbers are equal skeletons."""

    number: int
    size: int
    skeleton: Messages = field(compare=False)

    @property
    def shown(self) -> Messages:
        return self.skeleton[: len(self.skeleton) - self.size]

    @property
    def more(self) -> Messages:
        return self.skeleton[len(self.skeleton) - self.size :]


NOTHING = KnownHistory((), (), 0, 0)


class Histories:
    """The histories of conversations, found again by the tuple of messages that the agent loop holds. One that goes on
    replaces the one before; beyond `max_bytes` the oldest are forgotten and made anew if they go on.

    Example:
        histories.addition(shown, (*shown, answer, question)).shown == tuple(map(skeleton_of, shown))
    """

    def __init__(self, skeleton_of: Callable[[Message], Message], max_bytes: int) -> None:
        self.skeleton_of = skeleton_of
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.kept: OrderedDict[int, KnownHistory] = OrderedDict()
        """By the identity of their messages, which they hold."""
        self.numbers: dict[tuple[int, Message], int] = {}
        """By the number of the skeleton before, and the skeleton of the message after it."""
        self.counter = count(1)
        self.lock = threading.Lock()

    def addition(self, shown: Messages, messages: Messages) -> Addition:
        """What the messages after `shown`, with which `messages` begin, add to it."""
        known = self.kept.get(id(shown))
        before = known if known is not None and known.messages is shown else self.extended(NOTHING, shown)
        history = self.extended(before, messages)
        self.replace(shown, history)
        return Addition(history.number, len(messages) - len(shown), history.skeleton)

    def extended(self, before: KnownHistory, messages: Messages) -> KnownHistory:
        number, num_bytes, new = before.number, before.num_bytes, []
        for message in messages[len(before.messages) :]:
            skeleton = self.skeleton_of(message)
            number = self.number_after(number, skeleton)
            num_bytes += 256 + len(message.content) + len(message.thinking)
            new.append(skeleton)
        return KnownHistory(messages, (*before.skeleton, *new), number, num_bytes)

    def number_after(self, number: int, skeleton: Message) -> int:
        found = self.numbers.get((number, skeleton))
        if found is None:
            if len(self.numbers) >= MOST_NUMBERS:
                self.numbers = {}
            found = self.numbers[number, skeleton] = next(self.counter)
        return found

    def replace(self, shown: Messages, history: KnownHistory) -> None:
        with self.lock:
            for old in (self.kept.pop(id(shown), None), self.kept.pop(id(history.messages), None)):
                self.num_bytes -= 0 if old is None else old.num_bytes
            self.kept[id(history.messages)] = history
            self.num_bytes += history.num_bytes
            while self.num_bytes > self.max_bytes:
                _, oldest = self.kept.popitem(last=False)
                self.num_bytes -= oldest.num_bytes

"""The conversations of a session: which turn a request goes on from."""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass, field

from turnwise.serve.dialects.ask import Messages
from turnwise.types import Message, ToolSpec, Turn


@dataclass(eq=False, slots=True)
class ServedTurn:
    """A turn that was made, with what its prompt showed."""

    turn: Turn
    shown: Messages
    tools: tuple[ToolSpec, ...]
    continued: bool = False
    """Whether a request went on from it."""


@dataclass(eq=False, slots=True)
class ConversationNode:
    """A place in the conversations: messages that begin alike share the way here."""

    children: dict[Hashable, ConversationNode] = field(default_factory=dict)
    ended: list[ServedTurn] = field(default_factory=list)
    """Turns whose answer is the last message on the way here."""


class History:
    """A tree of messages. Forks, sub-agents and compacted conversations are branches of it."""

    def __init__(self) -> None:
        self.root = ConversationNode()

    def add(self, served: ServedTurn) -> None:
        node = self.root
        for message in (*served.shown, served.turn.said):
            node = node.children.setdefault(seen(message), ConversationNode())
        node.ended.append(served)

    def find(self, messages: Messages) -> ServedTurn | None:
        """The turn with the longest conversation that these messages go on from."""
        node, found = self.root, None
        for message in messages:
            following = node.children.get(seen(message))
            if following is None:
                break
            node = following
            fit = [served for served in node.ended if message.thinking in ("", served.turn.said.thinking)]
            # Two samples of one prompt may say the same: each goes on from its own.
            found = next((served for served in fit if not served.continued), fit[-1] if fit else found)
        return found


def seen(message: Message) -> Hashable:
    """What a client cannot help sending back as it was. Thinking it may drop, the white space around an answer it may
    strip, and the arguments of calls it may write anew."""
    if message.role != "assistant":
        return message
    calls = tuple((call.name, json.dumps(dict(call.arguments), sort_keys=True)) for call in message.calls)
    return message.content.strip(), calls

"""The conversations of a session: which turn a request continues."""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass, field

from turnwise.messages import Message, ToolSpec
from turnwise.serve.dialects.ask import Messages
from turnwise.types import Turn


@dataclass(eq=False, slots=True)
class ServedTurn:
    """A recorded turn with the messages of its prompt."""

    turn: Turn
    messages: Messages
    tools: tuple[ToolSpec, ...]
    sent: Messages
    """The messages of its prompt as the client sent them."""
    told: Message
    """The answer as the client read it: the one that it sends back."""
    continued: bool = False
    """Whether a request has continued it."""


@dataclass(eq=False, slots=True)
class ConversationNode:
    """A node in the tree of conversations: those with the same first messages share a path."""

    children: dict[Hashable, ConversationNode] = field(default_factory=dict)
    ended: list[ServedTurn] = field(default_factory=list)
    """Turns whose answer is the last message of the path."""


class History:
    """A tree of messages. Forks, sub-agents and compacted conversations are branches of it."""

    def __init__(self) -> None:
        self.root = ConversationNode()

    def add(self, served: ServedTurn) -> None:
        node = self.root
        for message in (*served.sent, served.told):
            node = node.children.setdefault(comparison_key(message), ConversationNode())
        node.ended.append(served)

    def find(self, messages: Messages) -> ServedTurn | None:
        """The turn with the longest conversation that these messages continue."""
        node, longest = self.root, None
        for message in messages:
            following = node.children.get(comparison_key(message))
            if following is None:
                break
            node = following
            fit = [served for served in node.ended if message.thinking in ("", served.told.thinking)]
            # Two samples of one prompt may be equal: prefer one that was not continued yet.
            longest = next((served for served in fit if not served.continued), fit[-1] if fit else longest)
        return longest


def comparison_key(message: Message) -> Hashable:
    """The part of a message that every client sends back unchanged. It may drop the thinking, strip white space around
    an answer, and rewrite the JSON of tool arguments."""
    if message.role != "assistant":
        return message
    calls = tuple((call.name, json.dumps(dict(call.arguments), sort_keys=True)) for call in message.calls)
    return message.content.strip(), calls

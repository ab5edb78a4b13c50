"""Skeletons of messages: only the parts of a message on which a chat template's decisions can depend.

A template treats two conversations with the same skeleton alike, so a result for one holds for the other.
"""

from __future__ import annotations

import re

from turnwise.messages import Message, ToolCall
from turnwise.rollout.render.remembered import Remembered

TAG = re.compile(r"</?[^<>\s'\"{}]{1,64}>|\[/?[A-Za-z_]{1,32}\]")
TESTED = re.compile(
    r"""(?:startswith|endswith|split|replace)\(\s*(?:'((?:[^'\\]|\\.)+)'|"((?:[^"\\]|\\.)+)")"""
    r"""|(?:'((?:[^'\\]|\\.)+)'|"((?:[^"\\]|\\.)+)")\s+(?:not\s+)?in\b"""
)
MOST_KEPT = 8 << 20
"""The size of the cache of messages and their skeletons, in bytes."""


class Skeletons:
    """Skeletons for one template. Tags and strings that its source mentions stay, and so does the white space around
    them.

    Example:
        "<think>\\nwell, well\\n</think>\\n\\nget amber" becomes "<think>\\nx\\n</think>\\n\\nx"
    """

    def __init__(self, source: str) -> None:
        marks = sorted(looked_for(source), key=len, reverse=True)
        self.marks = re.compile("|".join(map(re.escape, marks)))
        self.of = Remembered(self.message, MOST_KEPT)

    def message(self, message: Message) -> Message:
        """The skeleton of a message."""
        calls = tuple(ToolCall("f", {"x": "x"} if call.arguments else {}) for call in message.calls)
        return Message(message.role, self.text(message.content), self.text(message.thinking), calls)

    def text(self, text: str) -> str:
        parts = []
        position = 0
        for mark in self.marks.finditer(text):
            parts += [shortened(text[position : mark.start()]), mark[0]]
            position = mark.end()
        return "".join([*parts, shortened(text[position:])])


def looked_for(source: str) -> set[str]:
    """Strings that a template may look for in the text of a message."""
    return {*TAG.findall(source), *tested_strings(source), "<think>", "</think>"}


def tested_strings(source: str) -> set[str]:
    """Strings that a template compares with."""
    return {text for groups in TESTED.findall(source) for text in groups if text.strip()}


def shortened(text: str) -> str:
    """A text with everything but the white space around it replaced by one letter."""
    words = text.strip()
    return text.replace(words, "x", 1) if words else text

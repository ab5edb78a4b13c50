"""Skeletons of messages: all of a message that a chat template can tell apart from another, and nothing else.

Two conversations with the same skeleton are treated alike by the template, so that what holds for one need not be
tried on the other.
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
"""Bytes of messages and their skeletons."""


class Skeletons:
    """Skeletons for one template: tags and strings that its source mentions stay, and white space at their edges.

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
        made = []
        place = 0
        for mark in self.marks.finditer(text):
            made += [shortened(text[place : mark.start()]), mark[0]]
            place = mark.end()
        return "".join([*made, shortened(text[place:])])


def looked_for(source: str) -> set[str]:
    """Strings that a template may look for in the text of a message."""
    return {*TAG.findall(source), *tested_strings(source), "<think>", "</think>"}


def tested_strings(source: str) -> set[str]:
    """Strings by which a template decides."""
    return {text for groups in TESTED.findall(source) for text in groups if text.strip()}


def shortened(text: str) -> str:
    """A letter in place of all text but the white space around it."""
    words = text.strip()
    return text.replace(words, "x", 1) if words else text

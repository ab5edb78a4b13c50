"""The JSON of prompts that grow: of each conversation only the tokens that are new are written again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from turnwise.tokens import Tokens

MOST_BYTES = 64 << 20
"""Bytes of text that are kept; the conversation that was asked for longest ago goes first."""
NOTHING: Tokens = np.zeros(0, np.int32)


class PromptTexts:
    """Bodies of requests with a prompt, as JSON. A prompt of 12,000 tokens takes json over a millisecond, and every
    turn has it again with some tokens more.

    Example:
        texts.body("train/hops/t-1/0/0/0", {"seed": 1}, "token_ids", prompt)   b'{"seed": 1, "token_ids": [5, 6, 7]}'
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.kept: dict[str, tuple[Tokens, bytes]] = {}
        """By conversation: its last prompt and the JSON of that, without the bracket at its end."""
        self.num_bytes = 0

    def body(self, session: str, rest: Mapping[str, Any], name: str, prompt: Tokens) -> bytes:
        """The JSON of `{**rest, name: prompt}`."""
        known, text = self.kept.pop(session, (NOTHING, b""))
        self.num_bytes -= len(text)
        if not len(known) or not np.array_equal(prompt[: len(known)], known):
            known, text = NOTHING, b"["
        new = prompt[len(known) :]
        if len(new):
            text += (b", " if len(known) else b"") + json.dumps(new.tolist()).encode()[1:-1]
        self.kept[session] = prompt, text
        self.num_bytes += len(text)
        while self.num_bytes > self.most_bytes and len(self.kept) > 1:
            _, oldest = self.kept.pop(next(iter(self.kept)))
            self.num_bytes -= len(oldest)
        head = json.dumps(dict(rest)).encode()[:-1]
        return b"".join((head, b", " if rest else b"", json.dumps(name).encode(), b": ", text, b"]}"))

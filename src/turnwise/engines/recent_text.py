"""The end of an action's text, token by token: where stop strings are looked for."""

from __future__ import annotations

from collections.abc import Callable

Decode = Callable[[list[int]], str]

WINDOW = 16
"""Tokens that are decoded together at most."""
KEPT = 8
"""Tokens that stay when the window moves: more than the bytes of a character, or the words that a decoder joins."""
HALF = "\ufffd"
"""What bytes that are not yet a character decode to."""


class RecentText:
    """The last characters of the text of all tokens so far.

    One token does not tell which text it adds: it may be a byte of a character, begin with a space that decoders strip
    at the start of a text, or decode to nothing. So a window of tokens is decoded again with each new token, and moves
    on where the rest of it decodes to the same end. The cost of a token does not depend on how many came before.
    """

    def __init__(self, keep: int) -> None:
        """`keep`: how many characters before those of the newest token the text must have."""
        self.keep = keep
        self.before = ""
        self.window: list[int] = []
        self.text = ""

    def add(self, token: int, decode: Decode) -> str:
        """The end of the text after one more token."""
        text = decode([*self.window, token])
        if not (text and text == self.text and not decode([token])):  # a token without text is not kept
            self.window.append(token)
            self.text = text
        end = self.before + text
        if len(self.window) > WINDOW:
            self.move(decode)
        return end

    def move(self, decode: Decode) -> None:
        if not self.text:  # only tokens without text so far; one of them may have been a space
            self.window = self.window[:KEPT] + self.window[-KEPT:]
            return
        for cut in range(len(self.window) - KEPT, 0, -1):
            rest = decode(self.window[cut:])
            if rest and not rest.startswith(HALF) and self.text.endswith(rest):
                break
        else:
            cut = len(self.window) - KEPT
            rest = decode(self.window[cut:])
        passed = self.text[: max(0, len(self.text) - len(rest))]
        self.before = (self.before + passed)[-self.keep :] if self.keep else ""
        self.window, self.text = self.window[cut:], rest

"""The end of an action's text, token by token: where stop strings are looked for."""

from __future__ import annotations

from collections.abc import Callable

Decode = Callable[[list[int]], str]

WINDOW = 16
"""Tokens that are decoded together at most."""
KEPT = 8
"""Tokens of it that stay when it moves on: more than the bytes of a character, or the words that a decoder joins."""
HALF = "\ufffd"
"""What bytes that are not yet a character decode to."""


class RecentText:
    """The last characters of the text of all tokens so far.

    A token by itself does not say what it adds: it may be a byte of a character, begin with a space that decoders strip
    where a text begins, or be nothing at all. So a window of tokens is decoded, again with each, and moves on where
    what is left decodes to the same end. The cost of a token does not depend on how many came before.
    """

    def __init__(self, keep: int) -> None:
        """`keep` is how many characters before the newest token's are wanted at least."""
        self.keep = keep
        self.before = ""
        self.window: list[int] = []
        self.text = ""

    def add(self, token: int, decode: Decode) -> str:
        """The end of the text, with what a further token changes in it."""
        text = decode([*self.window, token])
        if not (text and text == self.text and not decode([token])):  # a token that is nothing takes no place
            self.window.append(token)
            self.text = text
        found = self.before + text
        if len(self.window) > WINDOW:
            self.move(decode)
        return found

    def move(self, decode: Decode) -> None:
        if not self.text:  # nothing but tokens that are nothing; one of them may yet have been a space
            self.window = self.window[:KEPT] + self.window[-KEPT:]
            return
        for cut in range(len(self.window) - KEPT, 0, -1):
            rest = decode(self.window[cut:])
            if rest and not rest.startswith(HALF) and self.text.endswith(rest):
                break
        else:
            cut = len(self.window) - KEPT
            rest = decode(self.window[cut:])
        left = self.text[: max(0, len(self.text) - len(rest))]
        self.before = (self.before + left)[-self.keep :] if self.keep else ""
        self.window, self.text = self.window[cut:], rest

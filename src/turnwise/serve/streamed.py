"""The text of an action while it is sampled: which parts of it are certain and can be sent to a client.

Text that is sent cannot be taken back. So it is held back while it may be half of a character, the beginning of a stop
string, the beginning of a call or of thinking, or white space that the format of calls strips. What is held back at the
end is sent with the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from turnwise.allowed import join_allowed
from turnwise.engines.base import SampledPart
from turnwise.messages import Message
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.render.toolcalls import CLOSED, THINK
from turnwise.tokens import Tokens

HALF = "\ufffd"
"""What bytes that are not yet a character decode to."""
MOST_PENDING = 8
"""Tokens that may wait for the rest of a character; more bytes than a character has are broken text."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer.

    Example:
        Piece(content="get ")
    """

    thinking: str = ""
    content: str = ""

    def __bool__(self) -> bool:
        return bool(self.thinking or self.content)


class GrowingText:
    """Decodes tokens as they come. The text of a token depends on those before it, so a few are decoded again."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.known: list[int] = []
        """The last tokens whose text is known."""
        self.pending: list[int] = []

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add."""
        self.pending += tokens
        before, text = self.decode(self.known), self.decode([*self.known, *self.pending])
        if not text.startswith(before):
            before = ""
            text = self.decode(self.pending)
        waits = text.endswith(HALF) or len(text) == len(before)
        if waits and len(self.pending) <= MOST_PENDING:
            return ""
        self.known, self.pending = self.pending, []
        return text[len(before) :]


class StreamedText:
    """Splits the growing text of an action into thinking and content. `told` is all that was sent so far."""

    def __init__(self, renderer: Renderer, prompt: Tokens, stops: Sequence[str], *, raw: bool) -> None:
        """`raw`: the client wrote the prompt itself, and the whole text is content."""
        tool_format = None if raw else renderer.template.format
        self.openings = () if tool_format is None else tool_format.openings
        self.stops = tuple(stops)
        self.growing = GrowingText(renderer.decode)
        self.is_end = frozenset(renderer.end_tokens)
        self.held = "" if tool_format is None else renderer.opened(prompt)
        """Text that is not sent yet."""
        self.stage = "start" if THINK in self.openings else "content"
        """start: it may begin with thinking; then thinking, after (white space behind thinking), content, and calls,
        where nothing more is certain."""
        self.thinking = ""
        self.content = ""

    @property
    def told(self) -> Message:
        return Message("assistant", self.content, self.thinking)

    def add(self, tokens: Sequence[int]) -> Piece:
        """What is certain after these tokens and was not before."""
        self.held += self.growing.add([token for token in tokens if token not in self.is_end])
        thought, said = len(self.thinking), len(self.content)
        while self.advance():
            pass
        return Piece(self.thinking[thought:], self.content[said:])

    def advance(self) -> bool:
        """Go on in the held text; whether the stage changed."""
        stage = self.stage
        if stage == "start":
            begin = self.held.lstrip()
            if begin.startswith(THINK):
                self.held, self.stage = begin.removeprefix(THINK).lstrip("\n"), "thinking"
            elif begin and not THINK.startswith(begin):
                self.stage = "content"
        elif stage == "thinking":
            if not self.thinking:
                self.held = self.held.lstrip("\n")
            self.thinking += self.take((CLOSED, *self.stops), white="\n")
            if self.held.lstrip("\n").startswith(CLOSED):
                self.held, self.stage = self.held.lstrip("\n").removeprefix(CLOSED), "after"
        elif stage == "after":
            self.held = self.held.lstrip("\n")
            if self.held:
                self.stage = "content"
        elif stage == "content":
            marks = (*self.openings, *self.stops)
            self.content += self.take(marks, white="" if not self.openings else None)
            if any(mark in self.held for mark in marks):
                self.stage = "calls"
        return self.stage != stage

    def take(self, marks: Sequence[str], *, white: str | None) -> str:
        """The held text before any of the marks, a half of one, and white space in front of it or at the end."""
        end = min((at for mark in marks if (at := self.held.find(mark)) >= 0), default=-1)
        if end < 0:
            end = len(self.held) - half_of(marks, self.held)
        certain = self.held[:end]
        certain = certain if white == "" else certain.rstrip(white)
        self.held = self.held[len(certain) :]
        return certain

    def finish(self, said: Message) -> Piece:
        """The rest of the answer, whose message is known now. If that does not begin with what was sent, because a call
        could not be read or thinking had no opening, the text that was held back is sent as content."""
        fits = said.thinking.startswith(self.thinking) and said.content.startswith(self.content)
        fits = fits and (not self.content or said.thinking == self.thinking)
        if fits:
            rest = Piece(said.thinking[len(self.thinking) :], said.content[len(self.content) :])
        else:
            text = self.held + self.growing.decode(self.growing.pending)
            ends = [at for stop in self.stops if (at := text.find(stop)) >= 0]
            rest = Piece("", text[: min(ends, default=len(text))])
        self.thinking += rest.thinking
        self.content += rest.content
        return rest


def half_of(marks: Sequence[str], text: str) -> int:
    """Characters at the end of a text with which a mark may begin."""
    longest = max(map(len, marks), default=1) - 1
    tail = text[-longest:] if longest else ""
    for start in range(len(tail)):
        if any(mark.startswith(tail[start:]) for mark in marks):
            return len(tail) - start
    return 0


class LiveAnswer:
    """An answer while it is sampled: the tokens so far, and the pieces that any number of clients read."""

    def __init__(self, text: StreamedText) -> None:
        self.text = text
        self.sampled: list[SampledPart] = []
        self.num_sampled = 0
        self.pieces: list[tuple[Piece, int]] = []
        """(piece, tokens sampled when it was certain)"""
        self.num_taken = 0
        """Pieces that a client took."""
        self.broken = False
        self.is_over = False
        self.changed = asyncio.Event()

    def hear(self, sampled: SampledPart) -> None:
        """Is called with tokens as they are sampled. It does not raise: the engine serves others too."""
        self.sampled.append(sampled)
        self.num_sampled += len(sampled.tokens)
        try:
            piece = Piece() if self.broken else self.text.add(sampled.tokens.tolist())
        except Exception:  # of a tokenizer; the answer then comes in one piece, or fails with the same error
            self.broken, piece = True, Piece()
        if piece:
            self.publish(piece)

    def publish(self, piece: Piece) -> None:
        self.pieces.append((piece, self.num_sampled))
        self.wake()

    def finish(self, said: Message) -> Message:
        """The answer as its client reads it, once the whole of it is known."""
        if rest := self.text.finish(said):
            self.publish(rest)
        return replace(said, content=self.text.content, thinking=self.text.thinking)

    def end(self) -> None:
        """There will be no more pieces."""
        self.is_over = True
        self.wake()

    def wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def after(self, index: int) -> list[Piece]:
        """The pieces from a number on, as soon as there is one; none if there are no more."""
        while len(self.pieces) <= index and not self.is_over:
            await self.changed.wait()
        self.num_taken = max(self.num_taken, len(self.pieces))
        return [piece for piece, _ in self.pieces[index:]]

    def taken(self) -> tuple[SampledPart, Message]:
        """(the tokens, the text) that clients took."""
        pieces = self.pieces[: self.num_taken]
        count = pieces[-1][1] if pieces else 0
        told = Message(
            "assistant", "".join(piece.content for piece, _ in pieces), "".join(piece.thinking for piece, _ in pieces)
        )
        nothing_yet = SampledPart(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))
        parts = [nothing_yet, *self.sampled]
        masks = [part.allowed for part in self.sampled if part.allowed is not None]
        taken = SampledPart(
            np.concatenate([part.tokens for part in parts])[:count],
            np.concatenate([part.logprobs for part in parts])[:count],
            np.concatenate([part.versions for part in parts])[:count],
            join_allowed(masks, count) if masks else None,
        )
        return taken, told

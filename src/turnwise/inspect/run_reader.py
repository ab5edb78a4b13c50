"""A run that is looked at while it is written or afterwards: its recipe, metrics, attempts, tokens as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.inspect.attempts import AttemptKey, Attempts, file_of
from turnwise.inspect.metric_log import MetricLog
from turnwise.inspect.recorded_attempt import RecordedAttempt
from turnwise.runs.archive import Record, read_group
from turnwise.runs.checkpoint import checkpoint_path, written_steps
from turnwise.runs.folder import RunFolder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GROUPS_KEPT = 4
"""Groups that stay in memory after they were read; one may have hundreds of megabytes."""
REPLACED = "\ufffd"
LONGEST_CHARACTER = 6
"""Tokens that the bytes of one character, or of two that share a token, may be in."""


class RunReader:
    """A run folder, read only. It needs no checkpoint, no lock and no torch, and follows a run that goes on.

    Example:
        run = RunReader.open("runs/quickstart")
        run.refresh()
        run.attempt(AttemptKey("train", 12, 3, 0)).trajectory.turns
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.attempts = Attempts(folder)
        self.metrics = MetricLog(folder.metrics)
        self.read = lru_cache(GROUPS_KEPT)(self.read_again)
        self.tokenizer: TokenText | None = None
        self.searched: list[int] = []
        """The checkpoints that were searched for a tokenizer."""

    @classmethod
    def open(cls, path: Path | str) -> RunReader:
        return cls(RunFolder.open(path))

    def refresh(self, limit: int | None = None) -> bool:
        """Read what the run has written since, at most `limit` files of attempts. Whether there was anything."""
        return self.metrics.refresh() | self.attempts.refresh(limit)

    # ------------------------------------------------------------ what it is

    @property
    def config(self) -> dict[str, Any]:
        """The recipe as it was resolved at the start; empty where it cannot be read."""
        return json_object(self.folder.config)

    @property
    def summary(self) -> dict[str, Any]:
        """The result of a run that is over; empty while it goes on."""
        return json_object(self.folder.summary)

    @property
    def text_of(self) -> TokenText:
        """Tokens as text, by the tokenizer of any checkpoint; a run that has begun may have none yet."""
        if self.tokenizer is None or self.tokenizer.tokenizer is None:
            steps = written_steps(self.folder.checkpoints)
            if self.tokenizer is None or steps != self.searched:  # one that cannot be read is not tried for ever
                self.searched, self.tokenizer = steps, self.find_tokenizer()
        return self.tokenizer

    def find_tokenizer(self) -> TokenText:
        for step in reversed(written_steps(self.folder.checkpoints)):
            file = checkpoint_path(self.folder.checkpoints, step) / "tokenizer.json"
            if file.is_file():
                return TokenText.of_file(file)
        return TokenText(None)

    # ------------------------------------------------------------ attempts

    def group(self, kind: str, step: int, group: int) -> Record:
        """One group with all its attempts."""
        path = file_of(self.folder, kind, step)
        return self.read(path, path.stat().st_mtime_ns, group)

    @staticmethod
    def read_again(path: Path, written: int, group: int) -> Record:
        return read_group(path, group)

    def attempt(self, key: AttemptKey) -> RecordedAttempt:
        """One attempt with its credit and token weights."""
        return RecordedAttempt.of_record(self.group(key.kind, key.step, key.group), key.attempt)


class TokenText:
    """The text of single tokens. A character that several tokens make up stands with the first of them; the others
    have no text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.known: dict[int, str] = {}

    @classmethod
    def of_file(cls, file: Path) -> TokenText:
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception:  # tokenizers raises plain Exceptions for a file it cannot read
            return cls(None)

    def pieces(self, tokens: Sequence[int] | np.ndarray[Any, Any]) -> list[str]:
        """The text of each token; its number where there is no tokenizer."""
        known = self.known
        numbers: list[int] = np.asarray(tokens).tolist()
        for token in set(numbers) - known.keys():
            known[token] = self.one(token)
        texts = [known[token] for token in numbers]
        for place, text in enumerate(texts):
            if REPLACED in text:
                self.join_character(numbers, texts, place)
        return texts

    def join_character(self, numbers: Sequence[int], texts: list[str], place: int) -> None:
        """Put a character whose bytes are in several tokens, from a place on, with the first of them."""
        for end in range(place + 2, min(len(numbers), place + LONGEST_CHARACTER) + 1):
            whole = self.text(numbers[place:end])
            if REPLACED not in whole:
                texts[place:end] = [whole, *[""] * (end - place - 1)]
                return

    def one(self, token: int) -> str:
        if self.tokenizer is None:
            return f"{token} "
        try:
            text: str = self.tokenizer.decode([token], skip_special_tokens=False)
        except (OverflowError, ValueError):
            return f"{token} "
        return text if text or self.tokenizer.id_to_token(token) is not None else f"{token} "

    def text(self, tokens: Sequence[int] | np.ndarray[Any, Any]) -> str:
        """The text of tokens together."""
        numbers: list[int] = np.asarray(tokens).tolist()
        if self.tokenizer is None:
            return " ".join(map(str, numbers))
        text: str = self.tokenizer.decode(numbers, skip_special_tokens=False)
        return text


def json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

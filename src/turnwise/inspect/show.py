"""What `turnwise show` prints: a table of attempts, or one attempt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from turnwise.inspect.attempts import AttemptKey, Page
from turnwise.inspect.recorded_attempt import RecordedAttempt
from turnwise.inspect.run_reader import RunReader
from turnwise.runs.screen import table
from turnwise.runs.transcript import LONGEST_TEXT, Line, Styled, transcript, visible

HEAD = ("attempt", "task", "status", "reward", "turns", "tokens", "context", "breaks", "seconds", "trained")
TASK_WIDTH = 32


def table_lines(page: Page) -> list[str]:
    """A page of attempts for a person, and what was left out."""
    if not page.rows:
        return ["no attempts"]
    rows = [
        (
            str(row.key),
            shortened(visible(row.task)),
            row.status,
            f"{row.reward:.4g}",
            str(row.turns),
            str(row.action_tokens),
            str(row.context_tokens),
            str(row.breaks or "-"),
            f"{row.seconds:.3g}",
            "yes" if row.trained else "no",
        )
        for row in page.rows
    ]
    lines = table(HEAD, rows)
    left = page.total - len(page.rows)
    return [*lines, f"{left:,} more; --limit shows them"] if left > 0 else lines


def failure_lines(page: Page) -> list[str]:
    """Why each attempt of a page failed."""
    return [f"{row.key}: {visible(row.failure) or row.status}" for row in page.rows]


def shortened(text: str) -> str:
    return text if len(text) <= TASK_WIDTH else f"{text[: TASK_WIDTH - 1]}…"


def page_json(page: Page) -> Iterator[str]:
    """The attempts of a page as lines of JSON."""
    for row in page.rows:
        yield json.dumps({**asdict(row), "key": str(row.key)}, ensure_ascii=False)


def attempt_lines(run: RunReader, key: AttemptKey, *, tokens: bool, everything: bool) -> Iterator[Line]:
    """One attempt as a conversation."""
    attempt = run.attempt(key)
    trained = "trained on" if attempt.trained else "not trained on"
    task = f"task {visible(attempt.task.id)} of {visible(attempt.task.dataset)}"
    yield (Styled(f"{key}", "bold"), Styled(f"  {task}, {trained}", "dim"))
    yield from transcript(
        attempt.trajectory,
        run.text_of.pieces,
        attempt.credit,
        tokens=tokens,
        longest=None if everything else LONGEST_TEXT,
    )


def token_rows(run: RunReader, attempt: RecordedAttempt) -> Iterator[dict[str, Any]]:
    """Every sampled token of an attempt with its numbers, for a pipe."""
    for number, turn in enumerate(attempt.trajectory.turns):
        credit, weights = (
            values[number] if attempt.trained else np.full(len(turn.action), np.nan)
            for values in (attempt.credit, attempt.token_weights)
        )
        columns = turn.action.tolist(), run.text_of.pieces(turn.action), turn.logprobs.tolist(), turn.versions.tolist()
        for place, (token, text, logprob, version) in enumerate(zip(*columns, strict=True)):
            yield {
                "turn": number + 1,
                "place": place,
                "token": token,
                "text": text,
                "logprob": finite(logprob),
                "version": version,
                "credit": finite(float(credit[place])),
                "token_weight": finite(float(weights[place])),
            }


def finite(value: float) -> float | None:
    """A number for JSON, which has none that is not finite."""
    return value if np.isfinite(value) else None

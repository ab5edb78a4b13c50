"""The tokens of an attempt in the order in which the model saw them: what was given, what it sampled, with numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from turnwise.inspect.attempts import AttemptKey
from turnwise.inspect.recorded_attempt import RecordedAttempt
from turnwise.tokens import Tokens
from turnwise.view.channels import values_of
from turnwise.view.table import whole_number
from turnwise.view.watched_run import WatchedRun

TOKENS_AT_ONCE = 4096
"""Tokens that are sent in one answer."""
GIVEN_FIRST, GIVEN_LAST = 600, 200
"""Tokens that are shown of the beginning and the end of a long stretch that was given."""


def token_page(run: WatchedRun, key: AttemptKey, parameters: Mapping[str, str]) -> dict[str, Any]:
    """The tokens from a turn on, and of that turn from a place on; `next` is where the following answer begins.

    A turn begins where the turn before has ended. Long observations are cut in their middle: `span_page` has the rest.
    """
    attempt = run.reader.attempt(key)
    turn = whole_number("turn", parameters.get("turn") or "0")
    begin = whole_number("from", parameters.get("from") or "0")
    turns, known = attempt.trajectory.turns, attempt.new_from
    stretches: list[dict[str, Any]] = []
    room = TOKENS_AT_ONCE
    while 0 <= turn < len(turns) and room > 0:
        prompt, whole = len(turns[turn].prompt), len(turns[turn].prompt) + len(turns[turn].action)
        if begin <= known[turn]:
            shown = given(run, attempt, turn, known[turn])
            stretches += shown
            room -= sum(len(stretch["tokens"]) for stretch in shown)
            begin = prompt
        end = min(whole, max(begin, prompt) + max(room, 256))
        stretches.append(stretch(run, attempt, turn, max(begin, prompt), end))
        room -= end - max(begin, prompt)
        turn, begin = (turn, end) if end < whole else (turn + 1, 0)
    return {"stretches": stretches, "next": {"turn": turn, "from": begin} if turn < len(turns) else None}


def given(run: WatchedRun, attempt: RecordedAttempt, turn: int, start: int) -> list[dict[str, Any]]:
    """The prompt of a turn from where the turn before ends; only its beginning and its end where it is long."""
    end = len(attempt.trajectory.turns[turn].prompt)
    if end - start <= GIVEN_FIRST + GIVEN_LAST:
        return [stretch(run, attempt, turn, start, end)] if end > start else []
    first = stretch(run, attempt, turn, start, start + GIVEN_FIRST)
    last = stretch(run, attempt, turn, end - GIVEN_LAST, end)
    return [first | {"left_out": end - GIVEN_LAST - start - GIVEN_FIRST}, last]


def span_page(run: WatchedRun, key: AttemptKey, parameters: Mapping[str, str]) -> dict[str, Any]:
    """The tokens of a turn's prompt between two places, as many as are sent at once."""
    attempt = run.reader.attempt(key)
    turn, start, end = (whole_number(name, parameters.get(name) or "0") for name in ("turn", "from", "to"))
    turns = attempt.trajectory.turns
    if not 0 <= turn < len(turns) or not 0 <= start <= end <= len(turns[turn].prompt):
        raise ValueError(f"turn {turn} of this attempt has no tokens {start} to {end} in its prompt")
    stop = min(end, start + TOKENS_AT_ONCE)
    return stretch(run, attempt, turn, start, stop) | {"left_out": end - stop}


def stretch(run: WatchedRun, attempt: RecordedAttempt, turn: int, start: int, end: int) -> dict[str, Any]:
    """Tokens of one turn, all of its prompt or all of its action."""
    of_turn = attempt.trajectory.turns[turn]
    prompt = len(of_turn.prompt)
    sampled = start >= prompt
    tokens: Tokens = of_turn.action[start - prompt : end - prompt] if sampled else of_turn.prompt[start:end]
    return {
        "turn": turn,
        "sampled": sampled,
        "start": start - prompt if sampled else start,
        "tokens": np.asarray(tokens).tolist(),
        "texts": run.reader.text_of.pieces(tokens),
        "values": values_of(attempt, turn, start - prompt, end - prompt) if sampled else {},
    }

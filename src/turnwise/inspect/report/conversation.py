"""Attempts of a run as conversations: those that were paid most and least, and those that failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from turnwise.inspect.attempts import NOT_COUNTED, TRAINING, AttemptRow, Query
from turnwise.inspect.recorded_attempt import RecordedAttempt
from turnwise.inspect.report.line_chart import number
from turnwise.inspect.report.markup import Html, element, joined, note, text
from turnwise.inspect.run_reader import RunReader
from turnwise.messages import Message
from turnwise.runs.transcript import describe_end, describe_turn
from turnwise.types import Turn

SHOWN = 3
"""Attempts of each sort."""
TEXT_LENGTH = 3000
"""Characters of one message that are shown."""
SHORT_LENGTH = 300
"""Characters of a role, an id or a reason that are shown."""
PROMPT_TOKENS = 1500
"""Tokens of the first prompt that are shown."""
MOST_TURNS = 24
"""Turns of one attempt that are shown, half of them from its end."""
MOST_MESSAGES = 16
"""Messages of one answer, or calls of one message, that are shown."""


def attempts_shown(run: RunReader) -> Html:
    """The best and the worst attempts of the newest held-out evaluation, or of the newest training step before there
    is one, and the newest that failed."""
    kind, step = newest(run)
    if step is None:
        return note("No attempts are recorded yet.")
    where = f"training step {step}" if kind == TRAINING else f"the {kind} evaluation of the weights after step {step}"
    if kind != TRAINING and step == 0:
        where = f"the {kind} evaluation before training"
    of_step = {"kind": kind, "first_step": step, "last_step": step, "order": "reward"}
    best = run.attempts.select(Query(**of_step), limit=SHOWN)  # type: ignore[arg-type]
    worst = run.attempts.select(Query(**of_step, descending=False), limit=SHOWN).rows  # type: ignore[arg-type]
    failed = run.attempts.select(Query(statuses=NOT_COUNTED), limit=SHOWN)
    parts = [note(f"Of the {best.total:,} attempts in {where}. Long texts are cut; turnwise show has all of them.")]
    parts += listed(run, "Paid most", best.rows)
    if worst[0].reward < best.rows[0].reward:
        parts += listed(run, "Paid least", worst)
    else:
        parts.append(note(f"All of them were paid {number(best.rows[0].reward)}, so that there is no worst one."))
    if failed.rows:
        parts += listed(run, f"Failed (the newest of {failed.total:,} in training and evaluations)", failed.rows)
    return joined(parts)


def newest(run: RunReader) -> tuple[str, int | None]:
    """(kind, step) of the newest evaluation, or of the newest training step where there is none."""
    for kind in ("sampled", "greedy", TRAINING):
        rows = run.attempts.select(Query(kind=kind, order="step"), limit=1).rows
        if rows:
            return kind, rows[0].key.step
    return TRAINING, None


def listed(run: RunReader, title: str, rows: Sequence[AttemptRow]) -> list[Html]:
    """Attempts below a title, the first of them open: it is the one that paper shows."""
    shown = (conversation(run, row, is_open=place == 0) for place, row in enumerate(rows))
    return [element("h3", title), *shown]


def conversation(run: RunReader, row: AttemptRow, *, is_open: bool) -> Html:
    """One attempt, folded under a line that sums it up unless it is open."""
    summary = f"{row.key} · reward {number(row.reward)} · {row.status} · {row.turns} turns · task "
    head = element("summary", summary, text(row.task, SHORT_LENGTH))
    try:
        body = joined(messages(run, run.attempt(row.key)))
    except (ValueError, OSError) as error:
        body = note(f"This attempt cannot be read: {error}")
    return element("details", head, body, class_="attempt", open="" if is_open else None)


def messages(run: RunReader, attempt: RecordedAttempt) -> Iterator[Html]:
    turns = attempt.trajectory.turns
    if turns:
        yield first_prompt(run, turns[0])
    left = len(turns) - MOST_TURNS
    for number_, turn in enumerate(turns, start=1):
        if left > 0 and number_ == MOST_TURNS // 2 + 1:
            yield note(f"… {left:,} turns more …")
        if left > 0 and MOST_TURNS // 2 < number_ <= MOST_TURNS // 2 + left:
            continue
        credit = attempt.credit[number_ - 1] if number_ <= len(attempt.credit) else None
        yield message(turn.said, f"turn {number_}: {describe_turn(turn, credit)}")
        yield from (message(heard, heard.role) for heard in turn.heard[:MOST_MESSAGES])
        if (more := len(turn.heard) - MOST_MESSAGES) > 0:
            yield note(f"… {more:,} messages more …")
    yield note(text(f"end: {describe_end(attempt.trajectory)}", TEXT_LENGTH))


def first_prompt(run: RunReader, turn: Turn) -> Html:
    shown = run.text_of.text(turn.prompt[:PROMPT_TOKENS])
    left = len(turn.prompt) - PROMPT_TOKENS
    more = [note(f"… {left:,} tokens more")] if left > 0 else []
    who = element("div", f"prompt: {len(turn.prompt):,} tokens", class_="who")
    return element("div", who, element("pre", text(shown, TEXT_LENGTH)), *more, class_="message prompt")


def message(said: Message, who: str) -> Html:
    """A message with its thinking, its text, its calls and what is wrong with them."""
    parts = [element("div", text(who, SHORT_LENGTH), class_="who")]
    if said.thinking:
        parts.append(element("pre", text(said.thinking, TEXT_LENGTH), class_="thinking"))
    if said.content:
        parts.append(element("pre", text(said.content, TEXT_LENGTH)))
    parts += [
        element("pre", "→ ", text(f"{call.name} {call.text}", TEXT_LENGTH), class_="call")
        for call in said.calls[:MOST_MESSAGES]
    ]
    if (more := len(said.calls) - MOST_MESSAGES) > 0:
        parts.append(note(f"… {more:,} calls more …"))
    if said.fault:
        parts.append(element("p", "! ", text(said.fault, TEXT_LENGTH), class_="bad"))
    role = "assistant" if said.role == "assistant" else "other"
    return element("div", *parts, class_=f"message {role}")

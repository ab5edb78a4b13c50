"""An attempt as a conversation that a person reads in a terminal: lines of styled text.

What models and environments wrote is shown as text: escape sequences, controls and characters that reorder a line are
made visible.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.messages import Message
from turnwise.tokens import Floats, Tokens, extends
from turnwise.types import Group, Trajectory, Turn, TurnTiming

Pieces = Callable[[Tokens], list[str]]
"""The text of each token."""
LONGEST_TEXT = 4000
"""Characters of one message that are shown unless all are asked for."""
GLANCE = 300
"""Characters of one message that are shown during training."""
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_PICTURES = 0x2400
"""Where Unicode has pictures of the control characters."""


@dataclass(frozen=True, slots=True)
class Styled:
    """Text with the style that a terminal gives it, in rich's words; a pipe gets the text alone.

    Example:
        Styled("get amber", "bold")
    """

    text: str
    style: str = ""


Line = tuple[Styled, ...]


def visible(text: str) -> str:
    """The text with controls as pictures, so that it can neither move a cursor nor hide what it says."""
    return _CONTROLS.sub(_picture, text)


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(_PICTURES + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"


def transcript(
    trajectory: Trajectory,
    pieces: Pieces | None,
    credit: Sequence[Floats] = (),
    *,
    tokens: bool = False,
    longest: int | None = LONGEST_TEXT,
) -> Iterator[Line]:
    """The lines of an attempt: the first prompt, then each action and the environment's answer. With `tokens`, the
    tokens of each action are coloured by their credit."""
    for number, turn in enumerate(trajectory.turns):
        if number == 0:
            yield from heading("prompt", f"{len(turn.prompt)} tokens")
            text = "".join(pieces(turn.prompt)) if pieces else f"{len(turn.prompt)} tokens without a tokenizer"
            yield from body(text.rstrip("\n"), "dim", longest)
        elif not extends(turn, trajectory.turns[number - 1]):
            yield from heading(
                "history", f"rewritten ({turn.broke}): the prompt has {len(turn.prompt)} tokens", "yellow"
            )
        values = credit[number] if number < len(credit) else None
        yield from heading(f"turn {number + 1}", describe_turn(turn, values), "bold")
        if tokens and pieces:
            yield from coloured(pieces(turn.action), values)
        else:
            yield from message_lines(turn.said, longest)
        for message in turn.heard:
            yield from heading(message.role, "")
            yield from message_lines(message, longest)
    yield from heading("end", describe_end(trajectory), "bold")


def best_and_worst(groups: Sequence[Group], decode: Callable[[Tokens], str]) -> Iterator[str]:
    """Plain lines of the attempt that was paid most and of the one that was paid least; of one only where all were paid
    alike."""
    attempts = [(group.task.id, trajectory) for group in groups for trajectory in group.trajectories]
    if not attempts:
        return
    best, worst = (choose(attempts, key=lambda attempt: attempt[1].total) for choose in (max, min))
    alike = best[1].total == worst[1].total
    for name, (task, trajectory) in (("best", best),) if alike else (("best", best), ("worst", worst)):
        yield f"{'an' if alike else name} attempt, task {visible(task)}"
        for line in transcript(trajectory, lambda tokens: [decode(tokens)], longest=GLANCE):
            yield f"  {''.join(styled.text for styled in line)}"


def describe_turn(turn: Turn, credit: Floats | None) -> str:
    """What is known of a turn, in one line."""
    parts = [f"{len(turn.action)} tokens", str(turn.stop)]
    if turn.reward:
        parts.append(f"reward {turn.reward:+g}")
    if credit is not None and len(credit):
        low, high = float(np.min(credit)), float(np.max(credit))
        parts.append(f"credit {low:+.3f}" if low == high else f"credit {low:+.3f} to {high:+.3f}")
    if len(turn.versions):
        first, last = int(turn.versions.min()), int(turn.versions.max())
        parts.append(f"version {first}" if first == last else f"versions {first} to {last}")
    return ", ".join([*parts, *timings(turn.timing)])


def timings(timing: TurnTiming) -> list[str]:
    """The stages of a turn that took time."""
    named = (("queued", timing.queued), ("prefill", timing.prefill), ("decode", timing.decode))
    shown = [f"{name} {milliseconds(seconds)}" for name, seconds in named if seconds]
    return shown + ([f"environment {milliseconds(timing.environment)}"] if timing.environment else [])


def milliseconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def describe_end(trajectory: Trajectory) -> str:
    """How an attempt ended and what it was paid."""
    parts = [str(trajectory.status), f"reward {trajectory.total:g}"]
    if trajectory.outcome != trajectory.total:
        parts.append(f"of which outcome {trajectory.outcome:g}")
    parts += [f"{visible(name)} {value:g}" for name, value in trajectory.marks.items()]
    return ", ".join(parts) + (f": {visible(trajectory.failure)}" if trajectory.failure else "")


def heading(what: str, rest: str, style: str = "") -> Iterator[Line]:
    yield (Styled(f"── {visible(what)} ", f"{style} cyan".strip()), Styled(rest, "dim"))


def message_lines(message: Message, longest: int | None) -> Iterator[Line]:
    """The lines of a message: thinking, text, tool calls, and what is wrong with a call."""
    if message.thinking:
        yield from body(message.thinking, "italic dim", longest)
    if message.content:
        yield from body(message.content, "", longest)
    for call in message.calls:
        yield (Styled("→ ", "green"), Styled(visible(f"{call.name} {call.text}")[:longest], "green"))
    if message.fault:
        yield (Styled(f"! {visible(message.fault)}", "red"),)


def body(text: str, style: str, longest: int | None) -> Iterator[Line]:
    rest = 0 if longest is None else len(text) - longest
    for line in visible(text if rest <= 0 else text[:longest]).split("\n"):
        yield (Styled(line, style),)
    if rest > 0:
        yield (Styled(f"… {rest:,} characters more (turnwise show --all)", "yellow"),)


# ---------------------------------------------------------------- tokens by credit


def coloured(pieces: Sequence[str], credit: Floats | None) -> Iterator[Line]:
    """The tokens of an action, each on a ground of the colour of its credit: blue above zero, orange below."""
    largest = float(np.max(np.abs(credit), initial=0.0)) if credit is not None else 0.0
    line: list[Styled] = []
    for place, piece in enumerate(pieces):
        style = ground(float(credit[place]) / largest) if credit is not None and largest else ""
        *before, last = visible(piece).split("\n")
        for part in before:
            yield (*line, Styled(f"{part}⏎", style))
            line = []
        line.append(Styled(last, style))
    yield tuple(line)


def ground(share: float) -> str:
    """rich's words for the ground of a token with that share of the largest credit, -1 to 1. The two hues differ in
    lightness too, for those who do not tell them apart."""
    strength = min(1.0, abs(share))
    far = (33, 102, 172) if share >= 0 else (230, 130, 40)
    red, green, blue = (round(255 + (end - 255) * strength) for end in far)
    letters = "white" if share >= 0 and strength > 0.6 else "black"
    return f"{letters} on #{red:02x}{green:02x}{blue:02x}"

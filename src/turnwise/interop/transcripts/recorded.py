"""Recorded attempts as transcripts."""

from __future__ import annotations

from turnwise.interop.transcripts.transcript import Transcript
from turnwise.messages import Message
from turnwise.types import Break, Trajectory


def transcript_of_attempt(attempt: Trajectory, name: str) -> Transcript:
    """An attempt as a conversation in which every action is trained. ValueError with the reason where it was not one
    conversation, or where its beginning is unknown."""
    if not attempt.turns:
        raise ValueError("it has no turn")
    if not attempt.opening:
        raise ValueError("the messages of its first prompt were not recorded")
    if any(turn.broke is Break.history for turn in attempt.turns):
        raise ValueError("the model saw another history than the conversation")
    messages: list[Message] = list(attempt.opening)
    trained = [False] * len(messages)
    for turn in attempt.turns:
        messages += [turn.said, *turn.heard]
        trained += [bool(turn.said.content or turn.said.thinking or turn.said.calls), *(False for _ in turn.heard)]
    return Transcript(tuple(messages), tuple(trained), attempt.tools, attempt.total, attempt.marks, name)

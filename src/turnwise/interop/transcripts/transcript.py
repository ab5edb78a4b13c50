"""A transcript: one conversation of other systems or of a recorded attempt, and which of its messages are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from turnwise.messages import Message, ToolSpec

THINK, CLOSED = "<think>\n", "\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation, the tools that were offered, and what is known of its worth.

    A tool result is a message with the role "tool"; results follow their calls, in the order of the calls.

    Example:
        Transcript((Message("user", "start amber, links 1"), Message("assistant", "answer cedar")), (False, True))
    """

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]
    """Per message: whether it is trained. Only messages of the assistant are, and at least one is."""
    tools: tuple[ToolSpec, ...] = ()
    reward: float | None = None
    """What the whole conversation was paid; None where nobody knows."""
    marks: Mapping[str, float] = field(default_factory=dict)
    """Named measurements."""
    name: str = ""
    """What its source calls it."""
    place: str = field(default="", compare=False)
    """Where it was read, for people: talks.jsonl, row 3."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "marks", MappingProxyType(dict(self.marks)))
        if len(self.messages) != len(self.trained):
            raise ValueError(f"{len(self.messages)} messages and {len(self.trained)} words about which are trained")
        for message, trained in zip(self.messages, self.trained, strict=True):
            if trained and message.role != "assistant":
                raise ValueError(f"a message of the {message.role} is to be trained; only the assistant's are")
        if not any(self.trained):
            raise ValueError("no message of the assistant is trained")

    @property
    def first_trained(self) -> int:
        """The index of the first message that is trained."""
        return self.trained.index(True)


def usually_trained(message: Message, index: int) -> bool:
    """Whether a message is trained where its source does not say. One that opens a conversation answers nobody."""
    return message.role == "assistant" and index > 0


def check_writable(transcript: Transcript) -> None:
    """ValueError where no format of others can hold a conversation: roles that they do not know, and calls without
    exactly one result each, unless the conversation ends with them."""
    waiting, answered = 0, False
    for message in transcript.messages:
        if message.role not in ("system", "user", "assistant", "tool"):
            raise ValueError(f"the role {message.role[:40]!a} is unknown to other formats")
        if message.role != "assistant" and (message.calls or message.thinking):
            raise ValueError("only messages of the assistant have calls and thinking")
        if message.role == "tool":
            if not waiting and answered:
                raise ValueError("there are more results than calls")
            waiting, answered = max(0, waiting - 1), answered or bool(waiting)
            continue
        if waiting:
            raise ValueError("a call has no result")
        waiting, answered = len(message.calls), False
    if waiting and answered:
        raise ValueError("a call has no result")


# ---------------------------------------------------------------- what a format may lose


def without_name(transcript: Transcript) -> Transcript:
    return replace(transcript, name="")


def without_reward(transcript: Transcript) -> Transcript:
    return replace(transcript, reward=None)


def without_marks(transcript: Transcript) -> Transcript:
    return replace(transcript, marks={})


def without_weights(transcript: Transcript) -> Transcript:
    """All messages of the assistant are trained, as far as one comes after another message."""
    usual = [usually_trained(message, index) for index, message in enumerate(transcript.messages)]
    return replace(transcript, trained=tuple(usual) if any(usual) else transcript.trained)


def without_thinking(transcript: Transcript) -> Transcript:
    """Thinking as part of the text."""
    return replace(transcript, messages=tuple(with_thinking_inside(message) for message in transcript.messages))


def with_thinking_inside(message: Message) -> Message:
    if not message.thinking:
        return message
    return replace(message, content=f"{THINK}{message.thinking}{CLOSED}{message.content}", thinking="")


def without_faults(transcript: Transcript) -> Transcript:
    return replace(transcript, messages=tuple(replace(message, fault="") for message in transcript.messages))


def without_plain_results(transcript: Transcript) -> Transcript:
    """Tool results that answer no call, as messages of the user."""
    messages, waiting = [], 0
    for message in transcript.messages:
        if message.role == "tool" and not waiting:
            message = replace(message, role="user")
        elif message.role == "tool":
            waiting -= 1
        else:
            waiting = len(message.calls)
        messages.append(message)
    return replace(transcript, messages=tuple(messages))


LOSSES = {
    "name": (without_name, "the name of the conversation"),
    "reward": (without_reward, "the reward"),
    "marks": (without_marks, "named measurements"),
    "weights": (without_weights, "which messages are trained, if not all after the first trained one are"),
    "thinking": (without_thinking, "thinking apart from the text: it becomes `<think>...</think>` in the text"),
    "faults": (without_faults, "the line that the model heard about a call that could not be read"),
    "results": (without_plain_results, "the role of a tool result that answers no call: it becomes the user's"),
}
"""By name: what makes two transcripts the same that differ in this only, and what is lost, for people."""

"""The answer to a request, with every field that some dialect sends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.messages import Message
from turnwise.types import StopReason


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is known of an answer before its first token.

    Example:
        AnswerHead("ab12", 1760000000, "policy", prompt_tokens=40)
    """

    id: str
    created: int
    """When it was made, in seconds since 1970."""
    model: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ServedAnswer(AnswerHead):
    """An action on its way to a client.

    Example:
        ServedAnswer("ab12", 1760000000, "policy", 40, said=Message("assistant", "get amber"), ...)
    """

    said: Message
    """The answer as the client reads it, without a stop string."""
    stop: StopReason
    stopped_by: str
    """The stop string that ended it, if any."""
    num_tokens: int
    """A, the number of tokens of the action, including an end token."""
    pieces: tuple[str, ...]
    """[A] the text of each token, if the client asked for logprobs."""
    logprobs: tuple[float, ...]
    """[A] the logprob of each token, if the client asked for logprobs."""
    version: int
    """The version of the weights that sampled the last token."""
    overridden: Mapping[str, Any]
    """Settings of the client that were overridden."""
    ignored: tuple[str, ...] = ()
    """Fields of the request that nobody here knows."""
    cached_tokens: int = 0
    """Tokens of the prompt that the engine did not compute again."""

    @property
    def content(self) -> str:
        return self.said.content

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """(id, name, arguments as text) of each call."""
        return [(f"call_{self.id}_{index}", call.name, call.text) for index, call in enumerate(self.said.calls)]

    @property
    def note(self) -> dict[str, Any]:
        """Values that no dialect has a field for."""
        note: dict[str, Any] = {"version": self.version, "overridden": dict(self.overridden)}
        note |= {"ignored": list(self.ignored)} if self.ignored else {}
        return note | ({"fault": "; ".join(self.said.faults)} if self.said.faults else {})


def headers_of(overridden: Mapping[str, Any], ignored: tuple[str, ...]) -> dict[str, str]:
    """Headers that say which settings were overridden and which fields were ignored."""
    headers = {"x-turnwise-overridden": ", ".join(sorted(overridden)), "x-turnwise-ignored": ", ".join(ignored)}
    return {name: value for name, value in headers.items() if value}


def event(data: Mapping[str, Any] | str, name: str = "") -> str:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


Events = Iterator[tuple[str, bool]]
"""(an event, whether it completes the answer), in the order of sending."""


class AnswerStream(Protocol):
    """Writes an answer as events while it is sampled."""

    def begin(self) -> Iterator[str]:
        """The events before the first token."""
        ...

    def more(self, thinking: str, content: str) -> Iterator[str]:
        """The events of a part of the text. Thinking comes before content."""
        ...

    def end(self, answer: ServedAnswer) -> Events:
        """The events after the text: calls, and how the answer ended."""
        ...

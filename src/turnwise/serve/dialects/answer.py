"""The answer to a request, with every field that some dialect sends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.messages import Message
from turnwise.types import StopReason

PIECES = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """An action on its way to a client.

    Example:
        ServedAnswer("ab12", 1760000000, "policy", said=Message("assistant", "get amber"), text="get amber", ...)
    """

    id: str
    created: int
    """When it was made, in seconds since 1970."""
    model: str
    said: Message
    text: str
    """The whole text of the action, with calls and thinking, without an end token or a stop string."""
    stop: StopReason
    stopped_by: str
    """The stop string that ended it, if any."""
    prompt_tokens: int
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

    @property
    def content(self) -> str:
        """The visible text, up to the stop string."""
        before, match, _ = self.said.content.partition(self.stopped_by) if self.stopped_by else ("", "", "")
        return before if match else self.said.content

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """(id, name, arguments as text) of each call."""
        return [(f"call_{self.id}_{index}", call.name, call.text) for index, call in enumerate(self.said.calls)]

    @property
    def note(self) -> dict[str, Any]:
        """Values that no dialect has a field for."""
        note: dict[str, Any] = {"version": self.version, "overridden": dict(self.overridden)}
        return note | ({"fault": self.said.fault} if self.said.fault else {})

    @property
    def headers(self) -> dict[str, str]:
        names = ", ".join(sorted(self.overridden))
        return {"x-turnwise-version": str(self.version), **({"x-turnwise-overridden": names} if names else {})}


def in_pieces(text: str) -> list[str]:
    """The pieces in which a text is streamed."""
    return PIECES.findall(text)


def event(data: Mapping[str, Any] | str, name: str = "") -> str:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


Events = Iterator[tuple[str, bool]]
"""(an event, whether it completes the answer), in the order of sending."""

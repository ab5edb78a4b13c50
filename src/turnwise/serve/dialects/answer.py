"""What was sampled for a request, with all that any dialect says of it."""

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
    """Seconds since 1970."""
    model: str
    said: Message
    text: str
    """All that was spoken, calls and thinking included, without an end token or a stop string."""
    stop: StopReason
    stopped_by: str
    """The stop string that ended it, if one did."""
    prompt_tokens: int
    num_tokens: int
    """A, the tokens of the action, an end token included."""
    pieces: tuple[str, ...]
    """[A] the text of each, where logprobs are asked for."""
    logprobs: tuple[float, ...]
    """[A] likewise."""
    version: int
    """Of the weights that sampled the last token."""
    overridden: Mapping[str, Any]
    """Settings that the client asked for and did not get."""

    @property
    def content(self) -> str:
        """What is said to people, up to the stop string."""
        before, found, _ = self.said.content.partition(self.stopped_by) if self.stopped_by else ("", "", "")
        return before if found else self.said.content

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """(id, name, arguments as text) of each call."""
        return [(f"call_{self.id}_{place}", call.name, call.text) for place, call in enumerate(self.said.calls)]

    @property
    def note(self) -> dict[str, Any]:
        """What no dialect has a field for."""
        note: dict[str, Any] = {"version": self.version, "overridden": dict(self.overridden)}
        return note | ({"fault": self.said.fault} if self.said.fault else {})

    @property
    def headers(self) -> dict[str, str]:
        names = ", ".join(sorted(self.overridden))
        return {"x-turnwise-version": str(self.version), **({"x-turnwise-overridden": names} if names else {})}


def in_pieces(text: str) -> list[str]:
    """A text in the pieces that it is streamed in."""
    return PIECES.findall(text)


def event(data: Mapping[str, Any] | str, name: str = "") -> str:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


Events = Iterator[tuple[str, bool]]
"""(an event, whether it tells the client that the answer is complete) in the order they are sent."""

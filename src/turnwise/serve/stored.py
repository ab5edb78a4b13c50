"""Responses that a client may refer to later: `previous_response_id`, and GET and DELETE of a response."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from turnwise.engines.base import shown
from turnwise.messages import Message
from turnwise.serve.dialects.answer import ServedAnswer
from turnwise.serve.dialects.ask import Ask, Messages, Refusal, in_order

MOST_RESPONSES = 1024
MOST_BYTES = 64 << 20
"""Text of all stored conversations together, of one key."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """An answer with the conversation before it."""

    ask: Ask
    answer: ServedAnswer
    messages: Messages
    """Messages of the prompt, without the instructions of its request."""
    said: Message
    """The answer as a message, as the model said it."""

    @property
    def size(self) -> int:
        """Bytes of text, roughly."""
        return sum(len(message.content) + len(message.thinking) + 100 for message in (*self.messages, self.said))


class StoredResponses:
    """The newest responses of a key, by id. The oldest are dropped when there are too many or they are too large."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self.by_id: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def add(self, stored: StoredResponse) -> None:
        """Keep a response if its client wants it stored."""
        if not stored.ask.store:
            return
        self.by_id[stored.answer.id] = stored
        self.num_bytes += stored.size
        while len(self.by_id) > self.most or self.num_bytes > self.most_bytes:
            _, oldest = self.by_id.popitem(last=False)
            self.num_bytes -= oldest.size

    def find(self, name: str, param: str | None = None) -> StoredResponse:
        """The response with an id."""
        stored = self.by_id.get(name.removeprefix("resp_"))
        if stored is None:
            problem = f"there is no response {shown(name)} here: it was not stored, was deleted, or is too old"
            code = "previous_response_not_found" if param else "not_found"
            raise Refusal(404, problem, code, param)
        return stored

    def remove(self, name: str) -> None:
        """Forget a response."""
        stored = self.find(name)
        del self.by_id[stored.answer.id]
        self.num_bytes -= stored.size

    def followed(self, ask: Ask) -> Messages:
        """The whole conversation of a request, which may name the response that it continues."""
        if not ask.after:
            return ask.messages
        stored = self.find(f"resp_{ask.after}", "previous_response_id")
        ids = [name for name, _, _ in stored.answer.calls]
        results = in_order(ask.results, ids, "input")
        instructions, new = ask.messages[: ask.instructions], ask.messages[ask.instructions :]
        return (*instructions, *stored.messages, stored.said, *results, *new)

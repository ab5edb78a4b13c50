"""OpenAI's /v1/responses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from turnwise.engines.base import shown
from turnwise.messages import Message, ToolCall
from turnwise.serve.dialects import chat
from turnwise.serve.dialects.answer import AnswerHead, Events, ServedAnswer, event
from turnwise.serve.dialects.ask import (
    ROLES,
    Ask,
    Fields,
    Messages,
    Refusal,
    call_of,
    function_tools,
    in_order,
    text_of,
    unfit,
)
from turnwise.serve.dialects.chat import error
from turnwise.serve.dialects.structured import openai_format
from turnwise.serve.seal import ThinkingSeal
from turnwise.types import StopReason

__all__ = ["error", "error_event", "read", "stream", "write"]

TEXTS = ("input_text", "output_text", "text", "refusal")
HARMLESS = (*chat.HARMLESS, "include", "prompt_cache_options", "stream_options")
KNOWN_OF_ITEMS = ("caller", "id", "namespace", "phase", "status", "summary")
"""Fields of items that say nothing to the model."""
ENCRYPTED = "reasoning.encrypted_content"


def read(body: Any, seal: ThinkingSeal) -> Ask:
    fields = Fields(body)
    model = fields.required("model")
    instructions = fields.text("instructions")
    system = (Message("system", instructions),) if instructions else ()
    items = fields.take("input", (str, list), "a string or an array of items") or []
    after = fields.text("previous_response_id").removeprefix("resp_")
    conversation = Conversation(fields, seal, continues=bool(after))
    messages = (Message("user", items),) if isinstance(items, str) else conversation.read(items)
    if not messages and not conversation.leading:
        raise unfit("input is missing or empty", "missing_required_parameter")
    choice = fields.left.pop("tool_choice", None)
    tools = function_tools(fields.items("tools"), lambda entry: entry.left)
    settings = chat.settings_of(fields) | chat.call_settings_of(fields, choice)
    if reasoning := fields.table("reasoning"):
        settings["reasoning"] = reasoning
    form = fields.table("text").get("format")
    grammar, ignored = openai_format(fields, form, "text.format", bool(tools) and choice != "none")
    settings |= ignored
    include = fields.items("include")
    logprobs = "message.output_text.logprobs" in include
    if fields.integer("top_logprobs", 0):
        raise unfit("top_logprobs is not supported: only the sampled token's logprob is known")
    limit, stream = fields.integer("max_output_tokens", 1), fields.flag("stream")
    store = fields.take("store", bool, "true or false")
    fields.refuse("background", unless=(False,))
    fields.refuse("truncation", unless=("disabled",))
    fields.refuse("conversation", "prompt", "max_tool_calls", "context_management", "moderation")
    fields.ignore(*HARMLESS)
    fields.note_unknown()
    return Ask(
        model,
        (*system, *messages),
        () if choice == "none" else tools,
        max_tokens=limit,
        settings=settings,
        logprobs=logprobs,
        stream=stream,
        after=after,
        instructions=len(system),
        grammar=grammar,
        results=tuple(conversation.leading),
        store=store is not False,
        packed_thinking=ENCRYPTED in include,
        ignored=fields.ignored.listed,
    )


class Conversation:
    """Combines items into messages: in this dialect, thinking, text and calls of one answer are separate items."""

    def __init__(self, request: Fields, seal: ThinkingSeal, *, continues: bool) -> None:
        """`continues`: whether the first items may be results of calls of an earlier response."""
        self.request = request
        self.seal = seal
        self.continues = continues
        self.leading: list[tuple[str, Message]] = []
        """(id of a call, its result) for calls that are not among the items."""
        self.messages: list[Message] = []
        self.thinking = ""
        self.content: str | None = None
        self.calls: list[ToolCall] = []
        self.ids: list[str] = []
        self.results: list[tuple[str, Message]] = []

    def read(self, items: list[Any]) -> Messages:
        for index, item in enumerate(items):
            self.add(self.request.under(item, f"input.{index}"))
        self.end_answer()
        self.end_results(f"input.{len(items) - 1}")
        return tuple(self.messages)

    def add(self, fields: Fields) -> None:
        where, kind = fields.where, fields.text("type", "message")
        if kind == "reasoning":
            self.end_answer()
            self.thinking = self.thinking_of(fields)
        elif kind == "function_call":
            if not self.calls:
                self.end_results(where)
                self.ids = []
            self.ids.append(fields.required("call_id"))
            self.calls.append(call_of(fields.required("name"), fields.text("arguments"), where))
        elif kind == "function_call_output":
            self.end_answer()
            output = text_of(fields.left.pop("output", None), f"{where}.output", TEXTS)
            result = fields.required("call_id"), Message("tool", output)
            is_leading = self.continues and not self.messages and not self.ids
            (self.leading if is_leading else self.results).append(result)
        elif kind == "message":
            self.say(fields)
        else:
            raise unfit(f"{where}: items of type {shown(kind)} are not supported", "unsupported_value")
        fields.ignore(*KNOWN_OF_ITEMS)
        fields.note_unknown()

    def thinking_of(self, fields: Fields) -> str:
        """The thinking of an item: its text, or what was packed for clients that do not keep text."""
        packed = fields.text("encrypted_content")
        text = text_of(fields.left.pop("content", None), f"{fields.where}.content", ("reasoning_text",))
        thinking = None if text or not packed else self.seal.unpack(packed)
        if packed and not text and thinking is None:
            fields.ignored.add(f"{fields.where}.encrypted_content")
        return text or thinking or ""

    def say(self, fields: Fields) -> None:
        role = fields.text("role")
        if role not in ROLES or role == "tool":
            raise unfit(f"{fields.where}.role must be system, developer, user or assistant", "invalid_value")
        content = text_of(fields.left.pop("content", None), f"{fields.where}.content", TEXTS)
        if self.content is not None or self.calls or role != "assistant":
            self.end_answer()
        self.end_results(fields.where)
        if role == "assistant":
            self.content = content
        else:
            self.messages.append(Message(ROLES[role], content))

    def end_answer(self) -> None:
        if self.thinking or self.content is not None or self.calls:
            self.messages.append(Message("assistant", self.content or "", self.thinking, tuple(self.calls)))
        self.thinking, self.content, self.calls = "", None, []

    def end_results(self, where: str) -> None:
        self.messages += in_order(self.results, self.ids, where)
        self.results = []


# ---------------------------------------------------------------- answers


def reasoning_item(ask: Ask, name: str, thinking: str, seal: ThinkingSeal) -> dict[str, Any]:
    item: dict[str, Any] = {"type": "reasoning", "id": f"rs_{name}", "summary": []}
    item["content"] = [{"type": "reasoning_text", "text": thinking}]
    return item | ({"encrypted_content": seal.pack(thinking)} if ask.packed_thinking else {})


def message_item(name: str, content: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": content, "annotations": []}
    return {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [part]}


def items_of(ask: Ask, answer: ServedAnswer, seal: ThinkingSeal) -> list[dict[str, Any]]:
    """The items of an answer: thinking, text, and each call."""
    items: list[dict[str, Any]] = []
    if answer.said.thinking:
        items.append(reasoning_item(ask, answer.id, answer.said.thinking, seal))
    if answer.content or not answer.said.calls:
        items.append(message_item(answer.id, answer.content))
        if ask.logprobs:
            items[-1]["content"][0]["logprobs"] = chat.logprobs_of(answer)["content"]
    for index, (name, function, arguments) in enumerate(answer.calls):
        call = {"type": "function_call", "id": f"fc_{answer.id}_{index}", "call_id": name}
        items.append({**call, "name": function, "arguments": arguments})
    status = "incomplete" if is_cut(answer) else "completed"
    return [{**item, "status": status} for item in items]


def is_cut(answer: ServedAnswer) -> bool:
    return answer.stop in (StopReason.length, StopReason.abort)


def usage_of(answer: ServedAnswer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.num_tokens,
    }


def frame(ask: Ask, answer: AnswerHead, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    """A response object, without its usage."""
    tools = [{"type": "function", **tool.schema["function"], "strict": False} for tool in ask.tools]
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": ask.messages[0].content if ask.instructions else None,
        "model": answer.model,
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": f"resp_{ask.after}" if ask.after else None,
        "store": ask.store,
        "tool_choice": "auto",
        "tools": tools,
        "usage": None,
        "metadata": {},
    }


def write(ask: Ask, answer: ServedAnswer, seal: ThinkingSeal) -> dict[str, Any]:
    status = "incomplete" if is_cut(answer) else "completed"
    whole = frame(ask, answer, status, items_of(ask, answer, seal))
    return whole | {"usage": usage_of(answer), "turnwise": answer.note}


class ResponseStream:
    """Events of a response, item by item."""

    def __init__(self, ask: Ask, opening: AnswerHead, seal: ThinkingSeal) -> None:
        self.ask = ask
        self.opening = opening
        self.seal = seal
        self.numbers = count()
        self.num_items = 0
        self.item: dict[str, Any] = {}
        """The open item, with the text so far."""

    def event(self, kind: str, **data: Any) -> str:
        return event({"type": kind, "sequence_number": next(self.numbers), **data}, kind)

    def begin(self) -> Iterator[str]:
        empty = frame(self.ask, self.opening, "in_progress", [])
        yield self.event("response.created", response=empty)
        yield self.event("response.in_progress", response=empty)

    def more(self, thinking: str, content: str) -> Iterator[str]:
        if thinking:
            if not self.item:
                yield from self.open_item(reasoning_item(self.ask, self.opening.id, "", self.seal))
            yield self.text_delta(thinking)
        if content:
            if self.item.get("type") != "message":
                yield from self.close_item()
                yield from self.open_item(message_item(self.opening.id, ""))
            yield self.text_delta(content)

    def open_item(self, item: dict[str, Any]) -> Iterator[str]:
        self.item = item
        empty = {**item, "content": [], "status": "in_progress"}
        yield self.event("response.output_item.added", output_index=self.num_items, item=empty)
        yield self.event("response.content_part.added", **self.where, part=dict(item["content"][0]))

    @property
    def where(self) -> dict[str, Any]:
        """The place of the open text."""
        return {"item_id": self.item["id"], "output_index": self.num_items, "content_index": 0}

    def text_event(self, end: str, **data: Any) -> str:
        is_thinking = self.item["type"] == "reasoning"
        kind = "response.reasoning_text" if is_thinking else "response.output_text"
        return self.event(f"{kind}.{end}", **self.where, **({} if is_thinking else {"logprobs": []}), **data)

    def text_delta(self, text: str) -> str:
        self.item["content"][0]["text"] += text
        return self.text_event("delta", delta=text)

    def close_item(self, whole: dict[str, Any] | None = None) -> Iterator[str]:
        """Close the open item, which is `whole` in the end, where that is known."""
        if self.item:
            part = self.item["content"][0]
            yield self.text_event("done", text=part["text"])
            yield self.event("response.content_part.done", **self.where, part=part)
            item = whole or {
                **reasoning_item(self.ask, self.opening.id, part["text"], self.seal),
                "status": "completed",
            }
            yield self.event("response.output_item.done", output_index=self.num_items, item=item)
            self.num_items += 1
        self.item = {}

    def end(self, answer: ServedAnswer) -> Events:
        items = items_of(self.ask, answer, self.seal)
        if self.item:
            for text in self.close_item(items[self.num_items]):
                yield text, False
        if self.num_items < len(items) and items[self.num_items]["type"] == "message":  # an answer without a word
            for text in (*self.open_item(message_item(answer.id, "")), *self.close_item(items[self.num_items])):
                yield text, False
        for item in items[self.num_items :]:
            for text in self.call_events(item):
                yield text, False
        response = write(self.ask, answer, self.seal)
        yield self.event(f"response.{response['status']}", response=response), True

    def call_events(self, item: dict[str, Any]) -> Iterator[str]:
        where = {"output_index": self.num_items, "item_id": item["id"]}
        empty = {**item, "arguments": "", "status": "in_progress"}
        yield self.event("response.output_item.added", output_index=self.num_items, item=empty)
        yield self.event("response.function_call_arguments.delta", **where, delta=item["arguments"])
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield self.event("response.function_call_arguments.done", **where, **done)
        yield self.event("response.output_item.done", output_index=self.num_items, item=item)
        self.num_items += 1


stream = ResponseStream


def error_event(refusal: Refusal) -> str:
    details = error(refusal)["error"]
    return event(
        {"type": "error", "sequence_number": 0, "param": None, **details, "code": details["code"] or ""}, "error"
    )

"""OpenAI's /v1/responses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from turnwise.engines.base import shown
from turnwise.messages import Message, ToolCall
from turnwise.serve.dialects import chat
from turnwise.serve.dialects.answer import Events, ServedAnswer, event, in_pieces
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
from turnwise.types import StopReason

__all__ = ["error", "error_event", "read", "stream", "write"]

TEXTS = ("input_text", "output_text", "text", "refusal")
HARMLESS = (*chat.HARMLESS, "include", "prompt_cache_options", "stream_options")


def read(body: Any) -> Ask:
    fields = Fields(body)
    model = fields.required("model")
    instructions = fields.text("instructions")
    system = (Message("system", instructions),) if instructions else ()
    items = fields.take("input", (str, list), "a string or an array of items") or []
    messages = (Message("user", items),) if isinstance(items, str) else Conversation().read(items)
    if not messages:
        raise unfit("input is missing or empty", "missing_required_parameter")
    choice = fields.left.pop("tool_choice", None)
    tools = function_tools(fields.items("tools"), lambda entry: entry.left)
    settings = chat.settings_of(fields) | chat.call_settings_of(fields, choice)
    if reasoning := fields.table("reasoning"):
        settings["reasoning"] = reasoning
    form = fields.table("text").get("format")
    grammar, ignored = openai_format(fields, form, "text.format", bool(tools) and choice != "none")
    settings |= ignored
    logprobs = "message.output_text.logprobs" in fields.items("include")
    if fields.integer("top_logprobs", 0):
        raise unfit("top_logprobs is not supported: only the sampled token's logprob is known")
    limit, stream = fields.integer("max_output_tokens", 1), fields.flag("stream")
    after = fields.text("previous_response_id").removeprefix("resp_")
    fields.refuse("background", unless=(False,))
    fields.refuse("truncation", unless=("disabled",))
    fields.refuse("conversation", "prompt", "max_tool_calls", "context_management", "moderation")
    fields.ignore(*HARMLESS)
    fields.refuse_unknown()
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
    )


class Conversation:
    """Combines items into messages: in this dialect, thinking, text and calls of one answer are separate items."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.thinking = ""
        self.content: str | None = None
        self.calls: list[ToolCall] = []
        self.ids: list[str] = []
        self.results: list[tuple[str, Message]] = []

    def read(self, items: list[Any]) -> Messages:
        for index, item in enumerate(items):
            self.add(Fields(item, f"input.{index}"))
        self.end_answer()
        self.end_results(f"input.{len(items) - 1}")
        return tuple(self.messages)

    def add(self, fields: Fields) -> None:
        where, kind = fields.where, fields.text("type", "message")
        if kind == "reasoning":
            self.end_answer()
            self.thinking = text_of(fields.left.get("content"), f"{where}.content", ("reasoning_text",))
        elif kind == "function_call":
            if not self.calls:
                self.end_results(where)
                self.ids = []
            self.ids.append(fields.required("call_id"))
            self.calls.append(call_of(fields.required("name"), fields.text("arguments"), where))
        elif kind == "function_call_output":
            self.end_answer()
            output = text_of(fields.left.get("output"), f"{where}.output", TEXTS)
            self.results.append((fields.required("call_id"), Message("tool", output)))
        elif kind == "message":
            self.say(fields)
        else:
            raise unfit(f"{where}: items of type {shown(kind)} are not supported", "unsupported_value")

    def say(self, fields: Fields) -> None:
        role = fields.text("role")
        if role not in ROLES or role == "tool":
            raise unfit(f"{fields.where}.role must be system, developer, user or assistant", "invalid_value")
        content = text_of(fields.left.get("content"), f"{fields.where}.content", TEXTS)
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


def items_of(ask: Ask, answer: ServedAnswer) -> list[dict[str, Any]]:
    """The items of an answer: thinking, text, and each call."""
    items: list[dict[str, Any]] = []
    if answer.said.thinking:
        part = {"type": "reasoning_text", "text": answer.said.thinking}
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": [part]})
    if answer.content or not answer.said.calls:
        text_part: dict[str, Any] = {"type": "output_text", "text": answer.content, "annotations": []}
        if ask.logprobs:
            text_part["logprobs"] = chat.logprobs_of(answer)["content"]
        items.append({"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": [text_part]})
    for index, (name, function, arguments) in enumerate(answer.calls):
        call = {"type": "function_call", "id": f"fc_{answer.id}_{index}", "call_id": name}
        items.append({**call, "name": function, "arguments": arguments})
    status = "incomplete" if is_cut(answer) else "completed"
    return [{**item, "status": status} for item in items]


def is_cut(answer: ServedAnswer) -> bool:
    return answer.stop in (StopReason.length, StopReason.abort)


def frame(ask: Ask, answer: ServedAnswer, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    """A response object."""
    output_tokens = answer.num_tokens
    usage = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + output_tokens,
    }
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
        "tool_choice": "auto",
        "tools": tools,
        "usage": None if status == "in_progress" else usage,
        "metadata": {},
        "turnwise": answer.note,
    }


def write(ask: Ask, answer: ServedAnswer) -> dict[str, Any]:
    return frame(ask, answer, "incomplete" if is_cut(answer) else "completed", items_of(ask, answer))


def stream(ask: Ask, answer: ServedAnswer) -> Events:
    numbers = count()

    def typed_event(kind: str, **data: Any) -> str:
        return event({"type": kind, "sequence_number": next(numbers), **data}, kind)

    empty_response = frame(ask, answer, "in_progress", [])
    yield typed_event("response.created", response=empty_response), False
    yield typed_event("response.in_progress", response=empty_response), False
    for index, item in enumerate(items_of(ask, answer)):
        for kind, data in item_events(item):
            yield typed_event(kind, output_index=index, **data), False
    response = write(ask, answer)
    yield typed_event(f"response.{response['status']}", response=response), True


def item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of one streamed item."""
    name = item["id"]
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    yield "response.output_item.added", {"item": {**item, **empty, "status": "in_progress"}}
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {"item_id": name, "delta": item["arguments"]}
        arguments = {"item_id": name, "name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", arguments
    else:
        [part] = item["content"]
        where = {"item_id": name, "content_index": 0}
        kind = "response.reasoning_text" if item["type"] == "reasoning" else "response.output_text"
        more: dict[str, Any] = {} if item["type"] == "reasoning" else {"logprobs": []}
        yield "response.content_part.added", {**where, "part": {**part, "text": ""}}
        for piece in in_pieces(part["text"]):
            yield f"{kind}.delta", {**where, **more, "delta": piece}
        yield f"{kind}.done", {**where, **more, "text": part["text"]}
        yield "response.content_part.done", {**where, "part": part}
    yield "response.output_item.done", {"item": item}


def error_event(refusal: Refusal) -> str:
    details = error(refusal)["error"]
    return event(
        {"type": "error", "sequence_number": 0, "param": None, **details, "code": details["code"] or ""}, "error"
    )

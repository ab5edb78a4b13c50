"""Anthropic's /v1/messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnwise.engines.base import shown
from turnwise.messages import Message, ToolSpec
from turnwise.serve.dialects.answer import AnswerHead, Events, ServedAnswer, event
from turnwise.serve.dialects.ask import (
    Ask,
    Fields,
    Messages,
    Refusal,
    call_of,
    in_order,
    kind_of,
    text_of,
    tool_of,
    unfit,
)
from turnwise.serve.dialects.structured import anthropic_format
from turnwise.serve.seal import ThinkingSeal
from turnwise.types import StopReason

HARMLESS = ("betas", "cache_control", "container", "inference_geo", "metadata", "service_tier", "speed")

NO_THREADS = "thread_unsupported_request"
"""The code after which Anthropic's SDK sends whole conversations: a field that stands for messages is never ignored."""


def read(body: Any, seal: ThinkingSeal) -> Ask:
    ask = read_to_count(body, seal)
    if ask.max_tokens is None:
        raise unfit("max_tokens: field required", "missing_required_parameter")
    return ask


def read_to_count(body: Any, seal: ThinkingSeal) -> Ask:
    """A request whose tokens are only counted: it need not have max_tokens."""
    fields = Fields(body)
    if "thread" in fields.left:
        raise unfit("thread is not supported: send the whole conversation", NO_THREADS)
    model = fields.required("model")
    limit = fields.integer("max_tokens", 1)
    system = text_of(fields.left.pop("system", None), "system")
    messages = messages_of(fields, seal)
    tools = tools_of(fields.items("tools"))
    choice = fields.table("tool_choice")
    config = fields.table("output_config")
    grammar, ignored = anthropic_format(fields, config, bool(tools) and choice.get("type") != "none")
    settings = {
        "temperature": fields.number("temperature", 0, 1),
        "top_p": fields.number("top_p", 1e-6, 1),
        "top_k": fields.integer("top_k", 0),
        "thinking": thought if (thought := fields.table("thinking")).get("type", "disabled") != "disabled" else None,
        "tool_choice": choice if choice.get("type", "auto") not in ("auto", "none") else None,
        "disable_parallel_tool_use": True if choice.get("disable_parallel_tool_use") else None,
        "effort": config.get("effort"),
        "min_p": fields.number("min_p", 0, 1) or None,
        **ignored,
    }
    stop, stream = fields.texts("stop_sequences"), fields.flag("stream")
    fields.refuse("mcp_servers", "context_management")
    fields.ignore(*HARMLESS)
    fields.note_unknown()
    instructions = (Message("system", system),) if system else ()
    return Ask(
        model,
        (*instructions, *messages),
        () if choice.get("type") == "none" else tools,
        max_tokens=limit,
        stop=stop,
        settings={name: value for name, value in settings.items() if value is not None},
        stream=stream,
        grammar=grammar,
        ignored=fields.ignored.listed,
    )


def messages_of(request: Fields, seal: ThinkingSeal) -> Messages:
    """Messages with one message per tool result, in the order of the calls."""
    entries = request.items("messages")
    if not entries:
        raise unfit("messages: at least one message is required", "missing_required_parameter")
    messages: list[Message] = []
    ids: list[str] = []
    for index, entry in enumerate(entries):
        where = f"messages.{index}"
        fields = request.under(entry, where)
        role, content = fields.text("role"), fields.left.pop("content", "")
        fields.ignore("cache_control")
        fields.note_unknown()
        if role not in ("user", "assistant"):
            raise unfit(f"{where}.role must be user or assistant, got {shown(role)}", "invalid_value")
        if role == "assistant":
            ids = []
            messages.append(answer_of(fields, content, ids, seal))
        else:
            messages += questions_of(content, where, ids)
            ids = []
    if messages[-1].role == "assistant":
        raise unfit("the last message is the assistant's: prefilling an answer is not supported; remove it")
    return tuple(messages)


def blocks_of(content: Any, where: str) -> list[Fields]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise unfit(f"{where}.content must be a string or an array of blocks, got {kind_of(content)}", "invalid_type")
    return [Fields(block, f"{where}.content.{index}") for index, block in enumerate(content)]


def answer_of(message: Fields, content: Any, ids: list[str], seal: ThinkingSeal) -> Message:
    """A message of the assistant. Thinking that this model did not sign is left out and noted: another model may have
    written it, or somebody changed it."""
    texts, thoughts, calls = [], [], []
    for block in blocks_of(content, message.where):
        kind = block.text("type")
        if kind == "text":
            texts.append(block.text("text"))
        elif kind == "thinking":
            thought, signature = block.text("thinking"), block.text("signature")
            if seal.accepts(thought, signature):
                thoughts.append(thought)
            else:
                message.ignored.add(f"{message.where}.thinking")
        elif kind == "tool_use":
            ids.append(block.required("id"))
            calls.append(call_of(block.required("name"), block.table("input"), block.where))
        elif kind == "redacted_thinking":
            thought_or_none = seal.unpack(block.text("data"))
            thoughts += [] if thought_or_none is None else [thought_or_none]
            if thought_or_none is None:
                message.ignored.add(f"{message.where}.redacted_thinking")
        else:
            raise unfit(f"{block.where}: blocks of type {shown(kind)} are not supported", "unsupported_value")
    return Message("assistant", "".join(texts), "".join(thoughts), tuple(calls))


def questions_of(content: Any, where: str, ids: list[str]) -> list[Message]:
    """The tool results of a user message, then its text."""
    texts, results = [], []
    for block in blocks_of(content, where):
        kind = block.text("type")
        if kind == "text":
            texts.append(block.text("text"))
        elif kind == "tool_result":
            result = text_of(block.left.get("content"), f"{block.where}.content")
            results.append((block.required("tool_use_id"), Message("tool", result)))
        else:
            raise unfit(f"{block.where}: blocks of type {shown(kind)} are not supported; this model reads text")
    user_messages = [Message("user", "\n".join(texts))] if texts else []
    return in_order(results, ids, where) + user_messages


def tools_of(entries: list[Any]) -> tuple[ToolSpec, ...]:
    tools = []
    for index, entry in enumerate(entries):
        where = f"tools.{index}"
        fields = Fields(entry, where)
        if fields.text("type", "custom") != "custom":
            raise unfit(f"{where}: tools that the server runs are not supported", "unsupported_value")
        left = fields.left
        tools.append(tool_of(left.get("name"), left.get("description"), left.get("input_schema"), where))
    return tuple(tools)


# ---------------------------------------------------------------- answers


def stop_of(answer: ServedAnswer) -> str:
    if answer.said.calls:
        return "tool_use"
    reasons = {StopReason.end_token: "end_turn", StopReason.stop_string: "stop_sequence"}
    return reasons.get(answer.stop, "max_tokens")


def usage_of(answer: ServedAnswer) -> dict[str, int]:
    """In this dialect the input tokens are those that were not cached."""
    cached = answer.cached_tokens
    tokens = {"input_tokens": answer.prompt_tokens - cached, "output_tokens": answer.num_tokens}
    return {**tokens, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}


def uses_of(answer: ServedAnswer) -> list[dict[str, Any]]:
    """The blocks of the calls."""
    return [
        {"type": "tool_use", "id": name, "name": function, "input": dict(call.arguments)}
        for (name, function, _), call in zip(answer.calls, answer.said.calls, strict=True)
    ]


def blocks(answer: ServedAnswer, seal: ThinkingSeal) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    if thinking := answer.said.thinking:
        content.append({"type": "thinking", "thinking": thinking, "signature": seal.sign(thinking)})
    if answer.content:
        content.append({"type": "text", "text": answer.content})
    return content + uses_of(answer)


def head(answer: AnswerHead) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def end_of(answer: ServedAnswer) -> dict[str, Any]:
    return {"stop_reason": stop_of(answer), "stop_sequence": answer.stopped_by or None}


def write(ask: Ask, answer: ServedAnswer, seal: ThinkingSeal) -> dict[str, Any]:
    rest = {**end_of(answer), "usage": usage_of(answer), "turnwise": answer.note}
    return {**head(answer), "content": blocks(answer, seal), **rest}


class MessageStream:
    """Events of a message, block by block."""

    def __init__(self, ask: Ask, opening: AnswerHead, seal: ThinkingSeal) -> None:
        self.opening = opening
        self.seal = seal
        self.num_blocks = 0
        self.kind = ""
        """The kind of the open block."""
        self.thinking = ""

    def event(self, kind: str, **data: Any) -> str:
        return event({"type": kind, **data}, kind)

    def begin(self) -> Iterator[str]:
        usage = {"input_tokens": self.opening.prompt_tokens, "output_tokens": 0}
        empty = {**head(self.opening), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield self.event("message_start", message=empty)

    def open_block(self, kind: str, block: dict[str, Any]) -> Iterator[str]:
        self.kind = kind
        yield self.event("content_block_start", index=self.num_blocks, content_block=block)

    def delta(self, **delta: Any) -> str:
        return self.event("content_block_delta", index=self.num_blocks, delta=delta)

    def close_block(self) -> Iterator[str]:
        if self.kind == "thinking":
            yield self.delta(type="signature_delta", signature=self.seal.sign(self.thinking))
        if self.kind:
            yield self.event("content_block_stop", index=self.num_blocks)
            self.num_blocks += 1
        self.kind = ""

    def more(self, thinking: str, content: str) -> Iterator[str]:
        for kind, text in (("thinking", thinking), ("text", content)):
            if not text:
                continue
            if self.kind != kind:
                yield from self.close_block()
                empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
                yield from self.open_block(kind, {"type": kind, **empty})
            self.thinking += thinking if kind == "thinking" else ""
            yield self.delta(**{"type": f"{kind}_delta", kind: text})

    def end(self, answer: ServedAnswer) -> Events:
        for text in self.close_block():
            yield text, False
        for block, (_, _, arguments) in zip(uses_of(answer), answer.calls, strict=True):
            for text in self.open_block("tool_use", {**block, "input": {}}):
                yield text, False
            yield self.delta(type="input_json_delta", partial_json=arguments), False
            for text in self.close_block():
                yield text, False
        usage = usage_of(answer)
        yield self.event("message_delta", delta=end_of(answer), usage=usage, turnwise=answer.note), True
        yield self.event("message_stop"), False


stream = MessageStream


# ---------------------------------------------------------------- errors

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
}


def error(refusal: Refusal) -> dict[str, Any]:
    kind = KINDS.get(refusal.status, "invalid_request_error")
    details = {"details": {"error_code": NO_THREADS, "unsupported": ["thread"]}} if refusal.code == NO_THREADS else {}
    return {"type": "error", "error": {"type": kind, "message": str(refusal), "code": refusal.code or None, **details}}


def error_event(refusal: Refusal) -> str:
    return event(error(refusal), "error")

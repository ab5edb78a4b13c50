"""Anthropic's /v1/messages."""

from __future__ import annotations

from typing import Any

from turnwise.engines.base import shown
from turnwise.messages import Message, ToolSpec
from turnwise.serve.dialects.answer import Events, ServedAnswer, event, in_pieces
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
from turnwise.types import StopReason

HARMLESS = ("metadata", "service_tier", "container", "inference_geo", "speed")


def read(body: Any) -> Ask:
    fields = Fields(body)
    model = fields.required("model")
    limit = fields.integer("max_tokens", 1)
    if limit is None:
        raise unfit("max_tokens: field required", "missing_required_parameter")
    system = text_of(fields.left.pop("system", None), "system")
    messages = messages_of(fields.items("messages"))
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
        **ignored,
    }
    stop, stream = fields.texts("stop_sequences"), fields.flag("stream")
    fields.refuse("mcp_servers", "context_management")
    fields.ignore(*HARMLESS)
    fields.refuse_unknown()
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
    )


def messages_of(entries: list[Any]) -> Messages:
    """Messages with one message per tool result, in the order of the calls."""
    if not entries:
        raise unfit("messages: at least one message is required", "missing_required_parameter")
    messages: list[Message] = []
    ids: list[str] = []
    for index, entry in enumerate(entries):
        where = f"messages.{index}"
        fields = Fields(entry, where)
        role, content = fields.text("role"), fields.left.pop("content", "")
        fields.refuse_unknown()
        if role not in ("user", "assistant"):
            raise unfit(f"{where}.role must be user or assistant, got {shown(role)}", "invalid_value")
        if role == "assistant":
            ids = []
            messages.append(answer_of(content, where, ids))
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


def answer_of(content: Any, where: str, ids: list[str]) -> Message:
    texts, thoughts, calls = [], [], []
    for block in blocks_of(content, where):
        kind = block.text("type")
        if kind == "text":
            texts.append(block.text("text"))
        elif kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif kind == "tool_use":
            ids.append(block.required("id"))
            calls.append(call_of(block.required("name"), block.table("input"), block.where))
        elif kind != "redacted_thinking":
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


def blocks(answer: ServedAnswer) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    if answer.said.thinking:
        content.append({"type": "thinking", "thinking": answer.said.thinking, "signature": ""})
    if answer.content:
        content.append({"type": "text", "text": answer.content})
    for (name, function, _), call in zip(answer.calls, answer.said.calls, strict=True):
        content.append({"type": "tool_use", "id": name, "name": function, "input": dict(call.arguments)})
    return content


def head(answer: ServedAnswer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def end_of(answer: ServedAnswer) -> dict[str, Any]:
    return {"stop_reason": stop_of(answer), "stop_sequence": answer.stopped_by or None}


def write(ask: Ask, answer: ServedAnswer) -> dict[str, Any]:
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.num_tokens}
    return {**head(answer), "content": blocks(answer), **end_of(answer), "usage": usage, "turnwise": answer.note}


def stream(ask: Ask, answer: ServedAnswer) -> Events:
    def typed_event(kind: str, **data: Any) -> str:
        return event({"type": kind, **data}, kind)

    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
    empty = {**head(answer), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield typed_event("message_start", message=empty), False
    for index, block in enumerate(blocks(answer)):
        yield typed_event("content_block_start", index=index, content_block=emptied(block)), False
        for delta in deltas(block, answer):
            yield typed_event("content_block_delta", index=index, delta=delta), False
        yield typed_event("content_block_stop", index=index), False
    usage_at_end = {"output_tokens": answer.num_tokens}
    yield typed_event("message_delta", delta=end_of(answer), usage=usage_at_end, turnwise=answer.note), True
    yield typed_event("message_stop"), False


def emptied(block: dict[str, Any]) -> dict[str, Any]:
    field = {"thinking": "thinking", "text": "text", "tool_use": "input"}[block["type"]]
    return {**block, field: {} if field == "input" else ""}


def deltas(block: dict[str, Any], answer: ServedAnswer) -> list[dict[str, Any]]:
    if block["type"] == "tool_use":
        [arguments] = [text for name, _, text in answer.calls if name == block["id"]]
        return [{"type": "input_json_delta", "partial_json": arguments}]
    kind = block["type"]
    return [{"type": f"{kind}_delta", kind: piece} for piece in in_pieces(block[kind])]


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
    return {"type": "error", "error": {"type": kind, "message": str(refusal), "code": refusal.code or None}}


def error_event(refusal: Refusal) -> str:
    return event(error(refusal), "error")

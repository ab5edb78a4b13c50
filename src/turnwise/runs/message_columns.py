"""Arrow columns of messages and tools, and what they hold read back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.runs.columns import fields_of, struct_column, text_column, texts_of


def message_column(messages: Sequence[Message]) -> Any:
    return struct_column(
        {
            "role": text_column([message.role for message in messages]),
            "content": text_column([message.content for message in messages]),
            "thinking": text_column([message.thinking for message in messages]),
            "calls": text_column([calls_to_json(message.calls) for message in messages]),
            "fault": text_column([message.fault for message in messages]),
        }
    )


def messages_of(column: Any) -> list[Message]:
    """Inverse of `message_column`."""
    field = fields_of(column)
    thinking, calls, fault = (texts_if_any(field, name, len(column)) for name in ("thinking", "calls", "fault"))
    read = map(calls_of_json, calls)
    return list(map(Message, texts_of(field["role"]), texts_of(field["content"]), thinking, read, fault))


def texts_if_any(fields: Mapping[str, Any], name: str, count: int, default: str = "") -> list[str]:
    """A field's texts, or as many defaults where the file is from before there was such a field."""
    return texts_of(fields[name]) if name in fields else [default] * count


def calls_to_json(calls: Sequence[ToolCall]) -> str:
    """A JSON list of [name, arguments], with a fault where there is one, or nothing."""
    return f"[{', '.join(map(call_to_json, calls))}]" if calls else ""


def call_to_json(call: ToolCall) -> str:
    fault = f", {json.dumps(call.fault, ensure_ascii=False)}" if call.fault else ""
    return f"[{json.dumps(call.name, ensure_ascii=False)}, {call.text}{fault}]"


def calls_of_json(text: str) -> tuple[ToolCall, ...]:
    """Inverse of `calls_to_json`."""
    return tuple(ToolCall(*call) for call in json.loads(text)) if text else ()


def tools_to_json(tools: Sequence[ToolSpec]) -> str:
    """A JSON list of [name, description, parameters], or nothing."""
    listed = [[tool.name, tool.description, dict(tool.parameters)] for tool in tools]
    return json.dumps(listed, ensure_ascii=False) if listed else ""


def tools_of_json(text: str) -> tuple[ToolSpec, ...]:
    """Inverse of `tools_to_json`."""
    return tuple(ToolSpec(*tool) for tool in json.loads(text)) if text else ()

"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnwise.engines.base import shown
from turnwise.messages import Message
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
from turnwise.serve.dialects.structured import openai_format
from turnwise.serve.seal import ThinkingSeal
from turnwise.types import StopReason

HARMLESS = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields that do not change the sampling."""
EXTRAS = (
    "allowed_token_ids",
    "bad_words",
    "chat_template_kwargs",
    "ignore_eos",
    "length_penalty",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "stop_token_ids",
    "thinking_token_budget",
    "use_beam_search",
)
"""Fields of vLLM's and other servers that change the distribution or the prompt."""
NO_EFFECT = {"repetition_penalty": 1, "length_penalty": 1}
"""The value with which an extra changes nothing, where that is not zero, false or empty."""
IGNORED_OF_MESSAGES = ("name", "annotations", "audio", "cache_control", "function_call", "refusal")


def read(body: Any, seal: ThinkingSeal) -> Ask:
    fields = Fields(body)
    model = fields.required("model")
    messages = messages_of(fields)
    tools = function_tools(fields.items("tools"), lambda entry: entry.table("function"))
    choice = fields.left.pop("tool_choice", None)
    limits = [fields.integer(name, 1) for name in ("max_completion_tokens", "max_tokens")]
    has_tools = bool(tools) and choice != "none"
    grammar, ignored = openai_format(fields, fields.table("response_format"), "response_format", has_tools)
    settings = settings_of(fields) | call_settings_of(fields, choice) | ignored
    if fields.integer("top_logprobs", 0):
        raise unfit("top_logprobs is not supported: only the sampled token's logprob is known")
    usage = Fields(fields.table("stream_options"), "stream_options")
    stop, logprobs, stream = fields.texts("stop"), fields.flag("logprobs"), fields.flag("stream")
    fields.refuse("n", unless=(1,), why="may only be 1: send several requests, each gives a new sample")
    fields.refuse("logit_bias", "functions", "function_call", "audio", "prediction", "web_search_options")
    fields.refuse("modalities", unless=(["text"],))
    fields.ignore(*HARMLESS)
    fields.note_unknown()
    return Ask(
        model,
        messages,
        () if choice == "none" else tools,
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        stop=stop,
        settings=settings,
        logprobs=logprobs,
        stream=stream,
        stream_usage=usage.flag("include_usage"),
        grammar=grammar,
        ignored=fields.ignored.listed,
    )


def settings_of(fields: Fields) -> dict[str, Any]:
    """The sampling settings of the request that have an effect."""
    settings = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 1e-6, 1),
        "top_k": fields.integer("top_k", -1),
        "seed": fields.integer("seed", -(1 << 63), (1 << 64) - 1),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2) or None,
        "presence_penalty": fields.number("presence_penalty", -2, 2) or None,
        "reasoning_effort": fields.text("reasoning_effort") or None,
        "verbosity": fields.text("verbosity") or None,
    }
    for name in EXTRAS:
        value = fields.left.pop(name, None)
        settings[name] = None if not value or value == NO_EFFECT.get(name) else value
    return {name: value for name, value in settings.items() if value is not None}


def call_settings_of(fields: Fields, choice: Any) -> dict[str, Any]:
    """The settings that would force or forbid calls. They have no effect: the model decides."""
    settings = {} if choice in (None, "auto", "none") else {"tool_choice": choice}
    parallel = fields.take("parallel_tool_calls", bool, "true or false")
    return settings | ({"parallel_tool_calls": False} if parallel is False else {})


def messages_of(request: Fields) -> Messages:
    """Messages in the order that a chat template needs: tool results in the order of their calls."""
    entries = request.items("messages")
    if not entries:
        raise unfit("messages is missing or empty", "missing_required_parameter")
    messages: list[Message] = []
    ids: list[str] = []
    results: list[tuple[str, Message]] = []
    for index, entry in enumerate(entries):
        where = f"messages.{index}"
        fields = request.under(entry, where)
        role = fields.text("role")
        if role not in ROLES:
            raise unfit(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", "invalid_value")
        kinds = ("text", "refusal") if role == "assistant" else ("text",)
        content = text_of(fields.left.pop("content", None), f"{where}.content", kinds)
        if role == "tool":
            results.append((fields.required("tool_call_id"), Message("tool", content)))
        else:
            messages += in_order(results, ids, where)
            ids, results = [], []
            thinking = fields.text("reasoning_content") or fields.text("reasoning")
            call_entries = fields.items("tool_calls")
            calls = tuple(
                call_of_entry(call, f"{where}.tool_calls.{number}", ids) for number, call in enumerate(call_entries)
            )
            if role != "assistant" and (calls or thinking):
                raise unfit(f"{where}: only the assistant calls tools and thinks", "invalid_value")
            messages.append(Message(ROLES[role], content, thinking, calls))
        fields.ignore(*IGNORED_OF_MESSAGES, "reasoning")
        fields.note_unknown()
    return (*messages, *in_order(results, ids, f"messages.{len(entries) - 1}"))


def call_of_entry(entry: Any, where: str, ids: list[str]) -> Any:
    fields = Fields(entry, where)
    ids.append(fields.required("id"))
    if fields.text("type", "function") != "function":
        raise unfit(f"{where}.type must be function", "unsupported_value")
    function = Fields(fields.table("function"), f"{where}.function")
    return call_of(function.required("name"), function.text("arguments"), where)


# ---------------------------------------------------------------- answers


def finish_of(answer: ServedAnswer) -> str:
    if answer.said.calls:
        return "tool_calls"
    return "length" if answer.stop in (StopReason.length, StopReason.abort) else "stop"


def usage_of(answer: ServedAnswer) -> dict[str, Any]:
    sampled = answer.num_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def logprobs_of(answer: ServedAnswer) -> dict[str, Any]:
    """The logprob of every sampled token, including an end token."""
    content = [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(answer.pieces, answer.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def calls_of(answer: ServedAnswer) -> list[dict[str, Any]]:
    return [
        {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
        for name, function, arguments in answer.calls
    ]


def write(ask: Ask, answer: ServedAnswer, seal: ThinkingSeal) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.said.thinking:
        message["reasoning_content"] = answer.said.thinking
    if answer.said.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = calls_of(answer)
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": finish_of(answer),
        "logprobs": logprobs_of(answer) if ask.logprobs else None,
    }
    return {**head(answer, "chat.completion"), "choices": [choice], "usage": usage_of(answer), "turnwise": answer.note}


def head(answer: AnswerHead, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


class ChatStream:
    """Chunks of a chat completion."""

    def __init__(self, ask: Ask, opening: AnswerHead, seal: ThinkingSeal) -> None:
        self.ask = ask
        self.start = head(opening, "chat.completion.chunk")

    def chunk(self, delta: dict[str, Any], logprobs: Any = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs}
        return event({**self.start, "choices": [choice]})

    def begin(self) -> Iterator[str]:
        yield self.chunk({"role": "assistant", "content": ""})

    def more(self, thinking: str, content: str) -> Iterator[str]:
        if thinking:
            yield self.chunk({"reasoning_content": thinking})
        if content:
            yield self.chunk({"content": content})

    def end(self, answer: ServedAnswer) -> Events:
        for index, call in enumerate(calls_of(answer)):
            yield self.chunk({"tool_calls": [{"index": index, **call}]}), False
        if self.ask.logprobs:
            yield self.chunk({}, logprobs_of(answer)), False
        choice = {"index": 0, "delta": {}, "finish_reason": finish_of(answer), "logprobs": None}
        yield event({**self.start, "choices": [choice], "turnwise": answer.note}), True
        if self.ask.stream_usage:
            yield event({**self.start, "choices": [], "usage": usage_of(answer)}), False
        yield event("[DONE]"), False


stream = ChatStream


# ---------------------------------------------------------------- errors of all of OpenAI's dialects

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error(refusal: Refusal) -> dict[str, Any]:
    kind = KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code or None}}


def error_event(refusal: Refusal) -> str:
    return event(error(refusal))

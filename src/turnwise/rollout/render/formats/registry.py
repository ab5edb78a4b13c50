"""Every format of tool calls by name, in the order in which "auto" tries them, and readers of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from turnwise.messages import Message, ToolSpec
from turnwise.rollout.render.formats.gemma import FUNCTION_GEMMA, GEMMA
from turnwise.rollout.render.formats.harmony import HARMONY
from turnwise.rollout.render.formats.hermes import HERMES
from turnwise.rollout.render.formats.json_lists import (
    APERTUS,
    COHERE,
    GIGACHAT,
    GRANITE,
    GRANITE_20B,
    INTERNLM,
    JAMBA,
    NEMOTRON,
    PHI4,
    XLAM,
)
from turnwise.rollout.render.formats.kimi_k3 import KIMI_K3
from turnwise.rollout.render.formats.llama import LLAMA
from turnwise.rollout.render.formats.mistral import MISTRAL
from turnwise.rollout.render.formats.pythonic import LFM2_FORMAT, OLMO_FORMAT, PYTHONIC
from turnwise.rollout.render.formats.sections import DEEPSEEK, KIMI_K2
from turnwise.rollout.render.formats.tagged import DSML, GLM, MINIMAX, QWEN_XML, SEED_OSS
from turnwise.rollout.render.toolcalls import CLOSED, THINK, Format

FORMATS: dict[str, Format | None] = {
    "none": None,
    "hermes": HERMES,
    "qwen_xml": QWEN_XML,
    "glm": GLM,
    "seed_oss": SEED_OSS,
    "minimax": MINIMAX,
    "dsml": DSML,
    "deepseek": DEEPSEEK,
    "kimi_k2": KIMI_K2,
    "kimi_k3": KIMI_K3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "functiongemma": FUNCTION_GEMMA,
    "harmony": HARMONY,
    "xlam": XLAM,
    "granite": GRANITE,
    "granite_20b": GRANITE_20B,
    "nemotron": NEMOTRON,
    "jamba": JAMBA,
    "cohere": COHERE,
    "internlm": INTERNLM,
    "apertus": APERTUS,
    "gigachat": GIGACHAT,
    "lfm2": LFM2_FORMAT,
    "olmo": OLMO_FORMAT,
    "phi4": PHI4,
    "llama": LLAMA,
    "pythonic": PYTHONIC,
}
"""Formats whose calls have marks come before those that any JSON or list could be."""
NAMES = ("auto", *FORMATS)


@runtime_checkable
class CallParser(Protocol):
    """A reader of one's own, named `rollout.tools = "module:Parser"`: a class that is made without arguments.

    `read` raises ValueError with a line for the model if a call is broken. It may also have `write(message) -> str`
    (the text of content and calls) and `offer(tools) -> str` (the description of tools), for templates that do neither,
    `tags` (control tokens within an action) and `thinking` (what opens and closes thinking).
    """

    def read(self, text: str, tools: Sequence[ToolSpec], /) -> Message: ...


def find_format(name: str) -> Format | None:
    """The format of this name; ValueError in one line if there is none."""
    if name in FORMATS:
        return FORMATS[name]
    if ":" not in name:
        raise ValueError(f'rollout.tools = "{name}" is not a format; it is one of {", ".join(NAMES)}, or module:Parser')
    module, _, attribute = name.partition(":")
    try:
        made = getattr(import_module(module), attribute)
        parser = made() if isinstance(made, type) else made
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f'rollout.tools = "{name}": {" ".join(str(error).split())}') from None
    if not isinstance(parser, CallParser):
        raise ValueError(f'rollout.tools = "{name}": {attribute} needs a method read(text, tools)')
    opening, closing = getattr(parser, "thinking", (THINK, CLOSED))
    return Format(
        parser.read,
        optional(parser, "write"),
        optional(parser, "offer"),
        tags=frozenset(getattr(parser, "tags", ())),
        thinking=(opening, closing),
    )


def optional(parser: Any, name: str) -> Callable[..., str] | None:
    found = getattr(parser, name, None)
    return found if callable(found) else None

"""Rendering of long prompts outside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from turnwise.messages import Message
from turnwise.rollout.limits import text_bytes
from turnwise.rollout.render.renderer import Messages, Prompt, Renderer
from turnwise.rollout.render.template import Tools
from turnwise.types import Turn

LONG = 1 << 16
"""A conversation of at least this many bytes is rendered in a thread."""


async def render_off_loop(render: Callable[..., Prompt], *arguments: Any) -> Prompt:
    """The prompt that `render(*arguments)` returns. A long conversation is rendered in a thread: tokenising a megabyte
    takes seconds and would block all other attempts."""
    conversations = [each for each in arguments if isinstance(each, tuple) and each and isinstance(each[0], Message)]
    size = sum(map(text_bytes, conversations)) + sum(len(each) for each in arguments if isinstance(each, str))
    return await asyncio.to_thread(render, *arguments) if size > LONG else render(*arguments)


async def next_off_loop(
    renderer: Renderer, before: Turn, shown: Messages, messages: Messages, tools: Tools, shown_tools: Tools
) -> Prompt:
    """The prompt that `renderer.next` returns. A long conversation that only goes on takes no thread for its new
    messages."""
    if text_bytes(messages[len(shown) :]) <= LONG:
        extension = renderer.extension(before, shown, messages, tools, shown_tools)
        if extension is not None:
            return extension
    return await render_off_loop(renderer.next, before, shown, messages, tools, shown_tools)

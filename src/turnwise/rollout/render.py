"""Messages to tokens and back, by the model's own chat template.

`extend` keeps the exact tokens of everything so far and appends the rendered new messages; `rerender` applies the
template to the whole history. Where a template does not allow an extension, or the environment shows another history,
the prompt is rendered afresh and the break has a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np

from turnwise.types import Message, Tokens, Turn


class Break(StrEnum):
    """Why a prompt does not begin with the turn before it."""

    none = "none"
    template = "template"
    """The template renders old turns differently once new messages follow."""
    history = "history"
    """The environment chose what the model sees."""
    rerender = "rerender"
    """The history was tokenised anew and came out differently."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is sent to the engine."""

    tokens: Tokens
    broke: Break = Break.none


class Renderer:
    """A tokenizer with a chat template, and the policy for history.

    Example:
        first = renderer.first((Message("user", "start amber, links 2"),))
    """

    def __init__(self, tokenizer: Any, history: str = "extend") -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template; set tokenizer.chat_template and save it with the model"
            )
        self.tokenizer = tokenizer
        self.history = history
        self.end_token = end_token(tokenizer)
        # The attempts of a group open alike, and environments repeat themselves.
        self.opening = lru_cache(maxsize=1024)(self.render_opening)
        self.suffix_after_action = lru_cache(maxsize=4096)(self.render_suffix)

    def first(self, messages: Sequence[Message]) -> Prompt:
        """The prompt of a first turn."""
        return self.opening(tuple(messages))

    def render_opening(self, messages: tuple[Message, ...]) -> Prompt:
        tokens = self.encode(self.render(messages))
        tokens.flags.writeable = False
        return Prompt(tokens)

    def next(self, before: Turn, messages: Sequence[Message], new: tuple[Message, ...], replaced: bool) -> Prompt:
        """The prompt after a turn: `messages` is everything to show, `new` what came since the action."""
        if replaced:
            return self.fresh(before, messages, Break.history)
        if self.history == "rerender":
            return self.fresh(before, messages, Break.rerender)
        earlier = messages[: len(messages) - len(new)]
        thought = any("</think>" in message.content for message in earlier if message.role == "assistant")
        suffix = self.suffix_after_action(new, thought)
        if suffix is None:
            return self.fresh(before, messages, Break.template)
        closed = len(before.action) > 0 and int(before.action[-1]) == suffix[0]
        return Prompt(np.concatenate([before.prompt, before.action, suffix[1:] if closed else suffix]))

    def fresh(self, before: Turn, messages: Sequence[Message], cause: Break) -> Prompt:
        tokens = self.encode(self.render(messages))
        known = len(before.prompt) + len(before.action)
        same = len(tokens) >= known and np.array_equal(tokens[:known], np.concatenate([before.prompt, before.action]))
        return Prompt(tokens, Break.none if same else cause)

    def said(self, action: Tokens) -> Message:
        """The action as a message; a sampled end token is not part of its text."""
        end = len(action) - 1 if len(action) and int(action[-1]) == self.end_token else len(action)
        return Message("assistant", self.tokenizer.decode(action[:end].tolist(), skip_special_tokens=False))

    def encode(self, text: str) -> Tokens:
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def render(self, messages: Sequence[Message]) -> str:
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise their own exceptions, from jinja and from HF
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        return text

    def render_suffix(self, new: tuple[Message, ...], thought: bool) -> Tokens | None:
        """The end token of an action and all that follows it up to the next action, or None where the template would
        not leave the turns before as they were.

        That is tried on a conversation with a fixed beginning: its generation prompt and its action, with thinking in
        it where the real one has some, must be the beginning of what the template makes of it with the new messages.
        """
        question, answer = Message("user", "q"), "<think>\nt\n</think>\n\na" if thought else "a"
        seen = self.render((question,)) + answer + self.tokenizer.eos_token
        shown = self.render((question, Message("assistant", answer), *new))
        if not shown.startswith(seen):
            return None
        suffix = self.encode(shown[len(seen) - len(self.tokenizer.eos_token) :])
        suffix.flags.writeable = False
        return suffix if len(suffix) and int(suffix[0]) == self.end_token else None


def end_token(tokenizer: Any) -> int:
    """The token that ends an action."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos token; set tokenizer.eos_token to the template's end of turn")
    return int(tokenizer.eos_token_id)

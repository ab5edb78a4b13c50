"""The tokens that a chat template writes for an answer, for training on conversations that nobody sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnwise.messages import Message, ToolSpec
from turnwise.rollout.render.control import GuardedText
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.render.toolcalls import CLOSED
from turnwise.tokens import Tokens


def written_action(renderer: Renderer, messages: Sequence[Message], tools: tuple[ToolSpec, ...] = ()) -> Tokens:
    """The tokens of the last message, the assistant's, as the template writes it at the end of this conversation: what
    follows the prompt, up to the end token that the template writes. Without one there is none.

    A template may write more than the message says, such as an empty block of thinking, and that is what the model has
    to sample. Where the text of the prompt does not go on in the text of the conversation, because the prompt opens
    thinking, the message is written as a model would sample it; without thinking it begins by closing that."""
    *before, message = messages
    if message.calls and renderer.template.format is None:
        raise ValueError(
            'it has tool calls, and no format to write them in; set rollout.tools, for example to "hermes"'
        )
    prompt, whole = renderer.template.render(before, tools), renderer.template.render(messages, tools, opening=False)
    if not whole.text.startswith(prompt.text):
        sampled = renderer.action(message)
        if message.thinking or CLOSED in message.content or not renderer.opened(renderer.encode(prompt)):
            return sampled
        return np.concatenate([renderer.encode(f"{CLOSED}\n\n"), sampled])
    written = whole.after(len(prompt.text))
    place, token = end_of(renderer, written, message)
    text = written if token is None else written.before(place)
    tokens = renderer.encode(text)
    return tokens if token is None else np.append(tokens, np.int32(token))


def end_of(renderer: Renderer, written: GuardedText, message: Message) -> tuple[int, int | None]:
    """(where the first end token stands in a text, which it is); None where the template writes none. The token for
    this kind of message counts before others, which may end a part of it."""
    usual = renderer.end_of_call if message.calls else renderer.end_token
    names = {int(token): name for name, token in renderer.tokenizer.get_added_vocab().items()}
    for candidates in ((usual,), renderer.end_tokens):
        found = [
            (place, token)
            for token in candidates
            if token in names and (place := written.guarded.find(names[token])) >= 0
        ]
        if found:
            return min(found)
    return len(written.text), None

"""Messages to tokens and back, by the model's chat template.

There are three policies for history. `extend` keeps the exact tokens of the turn before and appends the text that the
template writes after the action. `rerender` applies the template to the whole conversation every turn. `managed` is
like `extend`, but the environment must give the messages of every prompt.

A prompt is an exact extension of the turn before, if its text is the template's rendering of the whole conversation.
Otherwise the whole conversation is rendered anew, and the prompt records why it does not begin with the turn before. If
the history that an environment gives begins with the whole conversation so far, it continues the conversation, under
every policy; any other history is an edit.

An action ends with any of `end_tokens`. If an action was cut short, the next prompt closes it with the template's
tokens. If it ended with another end token than the template's, that token stays and the template's token follows it: it
is context and is never trained. If the template has no token that closes a message, such an action cannot stay, and the
conversation is rendered anew.

Control tokens come only from the template or the model: text that spells one stays text (control.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.messages import Message
from turnwise.pretrained import ChatTokenizer
from turnwise.rollout.render.codec import Codec
from turnwise.rollout.render.control import GuardedText
from turnwise.rollout.render.histories import Addition, Histories
from turnwise.rollout.render.remembered import Remembered
from turnwise.rollout.render.skeleton import Skeletons
from turnwise.rollout.render.template import QUESTION, RESULT, Template, Tools
from turnwise.tokens import Tokens
from turnwise.types import Break, Turn

Messages = tuple[Message, ...]
MOST_KEPT = 32 << 20
"""The size of the cache of prompts, in bytes."""
UNSHOWABLE = (
    "this message has text and calls that cannot be shown together; write one call and nothing else, or no call"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens that are sent to the engine."""

    tokens: Tokens
    broke: Break = Break.none


class Renderer:
    """A tokenizer with a chat template, the policy for history, and the format of tool calls.

    Example:
        first = renderer.first((Message("user", "start amber, links 2"),))
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        history: str = "extend",
        tools: str = "none",
        end_tokens: Iterable[int] = (),
        *,
        trust_text: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.history = history
        self.template = Template(tokenizer, tools, trust_text=trust_text)
        self.codec = Codec(tokenizer)
        self.skeletons = Skeletons(self.template.source)
        self.histories = Histories(self.skeletons.of, MOST_KEPT)
        eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        template_ends = self.template.ends()
        self.end_tokens = tuple(dict.fromkeys([*template_ends, *eos, *map(int, end_tokens)]))
        """All tokens that end an action."""
        if not self.end_tokens:
            raise ValueError("the tokenizer has no eos token; set tokenizer.eos_token to the template's end of turn")
        control = self.template.control.tokens
        self.template.spared -= {text for text, token in control.items() if token in self.end_tokens}
        self.end_token = self.end_tokens[0]
        """The token with which the template ends an answer; if it has none, the tokenizer's eos."""
        self.end_of_call = template_ends[-1] if template_ends else self.end_token
        self.closings = frozenset([*template_ends, *self.template.closings()])
        """Tokens with which the template closes a message."""
        self.added = frozenset(map(int, tokenizer.get_added_vocab().values()))
        # The attempts of a group have the same first prompt, and environments repeat their replies.
        self.whole = Remembered(self.render_whole, MOST_KEPT)
        self.addition_after = Remembered(self.render_addition, MOST_KEPT)
        self.treats_alike = Remembered(self.compare, MOST_KEPT // 4)
        self.can_show = Remembered(self.try_to_show, MOST_KEPT // 4)
        self.text_of = Remembered(self.template.try_render, MOST_KEPT // 4)

    def first(self, messages: Sequence[Message], tools: Tools = ()) -> Prompt:
        """The prompt of a first turn that may call `tools`."""
        return Prompt(self.whole(tuple(messages), tools))

    def render_whole(self, messages: Messages, tools: Tools) -> Tokens:
        return frozen(self.encode(self.template.render(messages, tools)))

    def next(
        self, before: Turn, shown: Messages, messages: Messages, tools: Tools = (), shown_tools: Tools = ()
    ) -> Prompt:
        """The prompt with `messages` and `tools`, after a turn whose prompt had `shown` and `shown_tools`."""
        if not self.goes_on(before, shown, messages, tools, shown_tools):
            return rendered_anew(before, self.whole(messages, tools), Break.history)
        if (extension := self.extension(before, shown, messages, tools, shown_tools)) is not None:
            return extension
        spoken = self.decode(self.without_end(before.action).tolist())
        rendered, known_text = self.template.render(messages, tools), self.template.render(shown, tools).text + spoken
        if self.history != "rerender" and rendered.text.startswith(known_text):
            addition = self.encode_addition(rendered.after(len(known_text)))
            if addition is not None and (tokens := self.extended(before, addition)) is not None:
                return Prompt(tokens)
        ended = self.decode(before.action[len(self.without_end(before.action)) :].tolist())
        same_text = rendered.text.startswith(known_text + ended)
        cause = Break.retokenised if same_text else Break.template
        return rendered_anew(before, frozen(self.encode(rendered)), cause)

    def extension(
        self, before: Turn, shown: Messages, messages: Messages, tools: Tools = (), shown_tools: Tools = ()
    ) -> Prompt | None:
        """The same prompt if it can be made of the new messages alone, in a time that does not depend on the length of
        the history; otherwise None."""
        if self.history == "rerender" or not self.goes_on(before, shown, messages, tools, shown_tools):
            return None
        spoken = self.decode(self.without_end(before.action).tolist())
        added = self.quick_addition(shown, messages, spoken, tools)
        tokens = None if added is None else self.extended(before, added)
        return None if tokens is None else Prompt(tokens)

    def goes_on(self, before: Turn, shown: Messages, messages: Messages, tools: Tools, shown_tools: Tools) -> bool:
        """Whether the conversation begins with what the turn before showed and said."""
        if messages[: len(shown) + 1] != (*shown, before.said):
            return False
        return tools is shown_tools or tools == shown_tools or not self.tools_change_text(shown, tools, shown_tools)

    def tools_change_text(self, shown: Messages, tools: Tools, shown_tools: Tools) -> bool:
        """Whether other tools change the text of the earlier messages."""
        return self.template.render(shown, tools).text != self.template.render(shown, shown_tools).text

    def extended(self, before: Turn, addition: Tokens) -> Tokens | None:
        """The tokens of the turn before and of the text after it; None if the action ended with a token that the
        template does not write and no closing token of the template follows."""
        ended = len(before.action) > len(self.without_end(before.action))
        if ended and len(addition) and addition[0] == before.action[-1]:
            addition = addition[1:]
        elif ended and not (len(addition) and int(addition[0]) in self.closings):
            return None
        return frozen(np.concatenate([before.prompt, before.action, addition]))

    # ------------------------------------------------------------ the text after an action, without the whole history

    def quick_addition(self, shown: Messages, messages: Messages, spoken: str, tools: Tools) -> Tokens | None:
        """The tokens that the template writes after an action, rendered with a short conversation in place of `shown`.
        None if the template treats the two conversations differently, or does not keep the action's text."""
        addition = self.histories.addition(shown, messages)
        if not self.treats_alike(addition, tools):
            return None
        return self.addition_after(stand_in(addition.shown), messages[len(shown) :], spoken, tools)

    def compare(self, addition: Addition, tools: Tools) -> bool:
        """Whether the template adds the same text to a conversation and to its stand-in and changes neither of them."""
        shown, short = addition.shown, stand_in(addition.shown)
        if shown == short:
            return True
        first, second = [self.added_text(messages, addition.more, tools) for messages in (shown, short)]
        return first is not None and second is not None and first.text == second.text

    def added_text(self, shown: Messages, more: Messages, tools: Tools) -> GuardedText | None:
        """The text that `more` adds to the text of a conversation; None if it changes the text before."""
        old, rendered = self.text_of(shown, tools), self.template.try_to_write((*shown, *more), tools)
        return (
            rendered.after(len(old))
            if old is not None and rendered is not None and rendered.text.startswith(old)
            else None
        )

    def render_addition(self, shown: Messages, more: Messages, spoken: str, tools: Tools) -> Tokens | None:
        """The tokens between an action, the first message of `more`, and the next one; None if the template does not
        keep the action's text."""
        added = self.added_text(shown, more, tools)
        if added is None or not added.text.startswith(spoken):
            return None
        return self.encode_addition(added.after(len(spoken)))

    def encode_addition(self, addition: GuardedText) -> Tokens | None:
        """The tokens of a text that follows another text. An added token at its start separates the two texts; without
        one, the tokens must decode to exactly this text, otherwise None."""
        tokens = self.encode(addition)
        if len(tokens) and int(tokens[0]) not in self.added and self.decode(tokens.tolist()) != addition.text:
            return None
        return frozen(tokens)

    # ------------------------------------------------------------ actions and messages

    def said(self, prompt: Tokens, action: Tokens, tools: Tools = ()) -> Message:
        """The action as a message, of a turn that could call `tools`; a sampled end token is not part of its text."""
        text = self.decode(self.without_end(action).tolist())
        if self.template.format is None:
            return Message("assistant", text)
        read = self.template.format.parse(self.opened(prompt) + text, tools)
        if (read.calls or not read.fault) and self.can_show(self.skeletons.of(read)):
            return read
        clean = Message("assistant", self.template.format.clean(text), fault=read.fault or UNSHOWABLE)
        return clean if self.can_show(self.skeletons.of(clean)) else Message("assistant", "", fault=clean.fault)

    def action(self, message: Message) -> Tokens:
        """The tokens of a message as a model would sample it, including an end token."""
        end = self.end_of_call if message.calls else self.end_token
        return np.append(self.encode(self.template.spoken(message)), np.int32(end))

    def try_to_show(self, message: Message) -> bool:
        """Whether the template accepts a message of the assistant before a tool result or before a question."""
        results = (RESULT,) * max(1, len(message.calls))
        return any(self.template.try_render((QUESTION, message, *more)) is not None for more in (results, (QUESTION,)))

    def opened(self, prompt: Tokens) -> str:
        """The opening of thinking at the end of a prompt, if it has one; the model continues from there."""
        opened = self.template.opened
        return opened if opened and self.decode(prompt[-8:].tolist()).endswith(opened) else ""

    def without_end(self, action: Tokens) -> Tokens:
        return action[:-1] if len(action) and int(action[-1]) in self.end_tokens else action

    # ------------------------------------------------------------ text and tokens

    def encode(self, text: str | GuardedText) -> Tokens:
        """The tokens of a rendered text, or of a text of the assistant."""
        return self.template.control.encode(self.template.own_words(text) if isinstance(text, str) else text)

    def encode_raw(self, text: str) -> Tokens:
        """The tokens of a whole prompt that a client wrote, including control tokens."""
        return self.template.control.plain(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.codec.decode(tokens)


def rendered_anew(before: Turn, tokens: Tokens, cause: Break) -> Prompt:
    """The prompt of a whole conversation; no break if its tokens still begin with those of the turn before."""
    middle, end = len(before.prompt), len(before.prompt) + len(before.action)
    same = np.array_equal(tokens[:middle], before.prompt) and np.array_equal(tokens[middle:end], before.action)
    return Prompt(tokens, Break.none if same else cause)


def frozen(tokens: Tokens) -> Tokens:
    """The same array, read-only, so that a turn need not copy it."""
    tokens.flags.writeable = False
    return tokens


def stand_in(shown: Messages) -> Messages:
    """A short conversation with the end of a long one: its last question, and the last answer with the messages after
    it."""
    answer = None
    for index in range(len(shown) - 1, -1, -1):
        if shown[index].role == "user":
            return (shown[index], *shown[index + 1 if answer is None else answer :])
        if shown[index].role == "assistant" and answer is None:
            answer = index
    return shown

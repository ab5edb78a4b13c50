"""Messages to tokens and back, by the model's own chat template.

Three policies for history, by name. `extend` keeps the exact tokens of everything so far and appends what the template
writes after the action. `rerender` applies the template to the whole conversation every turn. `managed` extends what
the environment hands over: it must say every turn what to show.

A prompt is either an exact extension, whose text is what the template makes of the whole conversation, or the
conversation rendered afresh, and then it says why it does not begin with the turn before. A handed-over history that
begins with the whole conversation so far is a conversation that goes on, under every policy; any other is an edit.

An action ends with any of `end_tokens`. The next prompt closes one that was cut short with the template's own tokens.
One that ended with another token than the template's keeps it, and the template's own follows: context, never trained.
The text then has the sampled token beside what the template writes, and nothing else. Where the template has no token
of its own that closes a message, such an action cannot stay, and the conversation is rendered afresh.

A control token stands only where the template or the model put it: text that spells one is text (control.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.messages import Message
from turnwise.pretrained import ChatTokenizer
from turnwise.rollout.render.control import Written
from turnwise.rollout.render.remembered import Remembered
from turnwise.rollout.render.skeleton import Skeletons
from turnwise.rollout.render.template import QUESTION, RESULT, Template, Tools
from turnwise.tokens import Tokens
from turnwise.types import Break, Turn

Messages = tuple[Message, ...]
MOST_KEPT = 32 << 20
"""Bytes of prompts that are kept because they may be asked for again."""
UNSHOWABLE = (
    "this message has text and calls that cannot be shown together; write one call and nothing else, or no call"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is sent to the engine."""

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
        self.skeletons = Skeletons(self.template.source)
        eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        own = self.template.ends()
        self.end_tokens = tuple(dict.fromkeys([*own, *eos, *map(int, end_tokens)]))
        """All tokens that end an action."""
        if not self.end_tokens:
            raise ValueError("the tokenizer has no eos token; set tokenizer.eos_token to the template's end of turn")
        control = self.template.control.tokens
        self.template.spared -= {text for text, token in control.items() if token in self.end_tokens}
        self.end_token = self.end_tokens[0]
        """The one that the template ends an answer with, or else the tokenizer's eos."""
        self.end_of_call = own[-1] if own else self.end_token
        self.closings = frozenset([*own, *self.template.closings()])
        """Tokens of the template's own that close a message."""
        self.added = frozenset(map(int, tokenizer.get_added_vocab().values()))
        # The attempts of a group open alike, and environments repeat themselves.
        self.opening = Remembered(self.render_opening, MOST_KEPT)
        self.rest_after = Remembered(self.render_rest, MOST_KEPT)
        self.treats_alike = Remembered(self.compare, MOST_KEPT // 4)
        self.can_show = Remembered(self.try_to_show, MOST_KEPT // 4)

    def first(self, messages: Sequence[Message], tools: Tools = ()) -> Prompt:
        """The prompt of a first turn that may call `tools`."""
        return self.opening(tuple(messages), tools)

    def render_opening(self, messages: Messages, tools: Tools) -> Prompt:
        return Prompt(frozen(self.encode(self.template.render(messages, tools))))

    def next(
        self, before: Turn, shown: Messages, messages: Messages, tools: Tools = (), shown_tools: Tools = ()
    ) -> Prompt:
        """The prompt that shows `messages` and `tools` after a turn whose prompt showed `shown` and `shown_tools`."""
        goes_on = messages[: len(shown) + 1] == (*shown, before.said)
        if not goes_on or (tools != shown_tools and self.retold(shown, tools, shown_tools)):
            return self.afresh(before, self.template.render(messages, tools), Break.history)
        new = messages[len(shown) + 1 :]
        spoken = self.decode(self.without_end(before.action).tolist())
        if self.history != "rerender":
            rest = self.quick_rest(shown, before.said, spoken, new, tools)
            if rest is not None and (tokens := self.extended(before, rest)) is not None:
                return Prompt(tokens)
        whole, known = self.template.render(messages, tools), self.template.render(shown, tools).text + spoken
        if self.history != "rerender" and whole.text.startswith(known):
            rest = self.encode_rest(whole.after(len(known)))
            if rest is not None and (tokens := self.extended(before, rest)) is not None:
                return Prompt(tokens)
        ended = self.decode(before.action[len(self.without_end(before.action)) :].tolist())
        same_text = whole.text.startswith(known + ended)
        return self.afresh(before, whole, Break.retokenised if same_text else Break.template)

    def retold(self, shown: Messages, tools: Tools, shown_tools: Tools) -> bool:
        """Whether other tools change what was shown."""
        return self.template.render(shown, tools).text != self.template.render(shown, shown_tools).text

    def afresh(self, before: Turn, whole: Written, cause: Break) -> Prompt:
        """A whole conversation tokenised anew; no break where it happens to begin with the turn before."""
        tokens = frozen(self.encode(whole))
        known = np.concatenate([before.prompt, before.action])
        return Prompt(tokens, Break.none if np.array_equal(tokens[: len(known)], known) else cause)

    def extended(self, before: Turn, rest: Tokens) -> Tokens | None:
        """The turn before and then what the template writes after it; None where the action ended with a token that
        nothing of the template's follows."""
        ended = len(before.action) > len(self.without_end(before.action))
        if ended and len(rest) and rest[0] == before.action[-1]:
            rest = rest[1:]
        elif ended and not (len(rest) and int(rest[0]) in self.closings):
            return None
        return frozen(np.concatenate([before.prompt, before.action, rest]))

    # ------------------------------------------------------------ what follows an action, without the whole history

    def quick_rest(self, shown: Messages, said: Message, spoken: str, new: Messages, tools: Tools) -> Tokens | None:
        """What the template writes after an action, found with a short conversation in place of `shown`, where the
        template is known to treat both alike; None where it does not, or where it does not keep the action's text."""
        skeleton = tuple(map(self.skeletons.of, shown))
        short = stand_in(skeleton)
        more = tuple(map(self.skeletons.of, (said, *new)))
        alike = self.treats_alike(skeleton, short, more, tools)
        return self.rest_after(short, said, spoken, new, tools) if alike else None

    def compare(self, shown: Messages, short: Messages, more: Messages, tools: Tools) -> bool:
        """Whether the template adds the same text for `more` to both conversations, and leaves both as they were."""
        if shown == short:
            return True
        first, second = [self.added_text(messages, more, tools) for messages in (shown, short)]
        return first is not None and second is not None and first.text == second.text

    def added_text(self, shown: Messages, more: Messages, tools: Tools) -> Written | None:
        """What `more` adds to the text of a conversation; None where that text does not stay as it was."""
        old, whole = self.template.try_render(shown, tools), self.template.try_to_write((*shown, *more), tools)
        return whole.after(len(old)) if old is not None and whole is not None and whole.text.startswith(old) else None

    def render_rest(self, shown: Messages, said: Message, spoken: str, new: Messages, tools: Tools) -> Tokens | None:
        """The tokens after an action up to the next one; None where the template does not write what was spoken."""
        added = self.added_text(shown, (said, *new), tools)
        if added is None or not added.text.startswith(spoken):
            return None
        return self.encode_rest(added.after(len(spoken)))

    def encode_rest(self, rest: Written) -> Tokens | None:
        """The tokens of a text that follows others. An added token keeps apart what is around it; where there is none
        at the beginning, the tokens must be seen to say the same text."""
        tokens = self.encode(rest)
        if len(tokens) and int(tokens[0]) not in self.added and self.decode(tokens.tolist()) != rest.text:
            return None
        return frozen(tokens)

    # ------------------------------------------------------------ what was said

    def said(self, prompt: Tokens, action: Tokens) -> Message:
        """The action as a message; a sampled end token is not part of its text."""
        text = self.decode(self.without_end(action).tolist())
        if self.template.format is None:
            return Message("assistant", text)
        read = self.template.format.parse(self.opened(prompt) + text)
        if not read.fault and self.can_show(self.skeletons.of(read)):
            return read
        clean = Message("assistant", self.template.format.clean(text), fault=read.fault or UNSHOWABLE)
        return clean if self.can_show(self.skeletons.of(clean)) else Message("assistant", "", fault=clean.fault)

    def action(self, said: Message) -> Tokens:
        """The tokens with which a model would say a message, an end token included."""
        end = self.end_of_call if said.calls else self.end_token
        return np.append(self.encode(self.template.spoken(said)), np.int32(end))

    def try_to_show(self, said: Message) -> bool:
        """Whether the template takes a message of the assistant, before a result or before a question."""
        return any(self.template.try_render((QUESTION, said, after)) is not None for after in (RESULT, QUESTION))

    def opened(self, prompt: Tokens) -> str:
        """The opening of thinking at the end of a prompt, if it has one: the model goes on from there."""
        opened = self.template.opened
        return opened if opened and self.decode(prompt[-8:].tolist()).endswith(opened) else ""

    def without_end(self, action: Tokens) -> Tokens:
        return action[:-1] if len(action) and int(action[-1]) in self.end_tokens else action

    # ------------------------------------------------------------ text and tokens

    def encode(self, text: str | Written) -> Tokens:
        """The tokens of what was rendered, or of a text that the assistant says."""
        return self.template.control.encode(self.template.own_words(text) if isinstance(text, str) else text)

    def encode_raw(self, text: str) -> Tokens:
        """The tokens of a whole prompt that somebody wrote by hand, control tokens and all."""
        return self.template.control.plain(text)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def frozen(tokens: Tokens) -> Tokens:
    """The same array, read-only: a turn then takes it as it is."""
    tokens.flags.writeable = False
    return tokens


def stand_in(shown: Messages) -> Messages:
    """A short conversation that ends as a long one does: its last question, the last answer to it, what came since."""
    questions = [place for place, message in enumerate(shown) if message.role == "user"]
    if not questions:
        return shown
    tail = shown[questions[-1] :]
    last = max((place for place, message in enumerate(tail) if message.role == "assistant"), default=1)
    return (tail[0], *tail[last:])

"""A tokenizer's chat template: in which form it takes messages, what it writes, and with which token it ends a turn.

None of that is written down anywhere, so it is found out by trying: short conversations are rendered, and what they
come out as shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.pretrained import ChatTokenizer
from turnwise.rollout.render.control import ControlTokens, Written, texts_of
from turnwise.rollout.render.harmony import TAGS, read_harmony, without_control
from turnwise.rollout.render.skeleton import looked_for, tested_strings
from turnwise.rollout.render.toolcalls import (
    CLOSE,
    CLOSED,
    OPEN,
    PYTHON_TAG,
    THINK,
    Format,
    join_thinking,
    offer_hermes,
    offer_llama,
    read_hermes,
    read_llama,
    write_hermes,
    write_llama,
)

Tools = tuple[ToolSpec, ...]

FORMATS: dict[str, Format | None] = {
    "none": None,
    "hermes": Format(read_hermes, write_hermes, offer_hermes),
    "llama": Format(read_llama, write_llama, offer_llama),
    "harmony": Format(read_harmony, clean=without_control, tags=TAGS),
}
WORD, THOUGHT = "zebra", "quagga"
"""Text that no template has of its own."""
QUESTION, ANSWER, RESULT = Message("user", WORD), Message("assistant", WORD), Message("tool", WORD)
CALL = Message("assistant", "", calls=(ToolCall(WORD, {"x": "y"}),))
TOOL = ToolSpec(WORD, THOUGHT, {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]})
THOUGHTFUL = (
    (QUESTION, Message("assistant", WORD, THOUGHT)),
    (QUESTION, Message("assistant", "", THOUGHT, CALL.calls)),
    (QUESTION, Message("assistant", "", THOUGHT, CALL.calls), RESULT),
)


@dataclass(frozen=True, slots=True)
class Form:
    """The fields in which a template takes a message."""

    in_parts: bool = False
    """Whether content is a list of parts, as models that see images have it."""
    thinking: tuple[str, ...] = ()
    """Where thinking goes; into the content where the template reads no field for it."""
    calls: str = "content"
    """Where calls go: "content", or tool_calls with arguments as a "mapping" or as "text"."""


class Template:
    """How messages become text, in which nothing is a control token that a message only spells."""

    def __init__(self, tokenizer: ChatTokenizer, tools: str = "none", *, trust_text: bool = False) -> None:
        source = getattr(tokenizer, "chat_template", None)
        if not source:
            raise ValueError(
                "the tokenizer has no chat template; set tokenizer.chat_template and save it with the model"
            )
        self.source = "\n".join(source.values()) if isinstance(source, dict) else str(source)
        self.tokenizer = tokenizer
        self.control = ControlTokens(tokenizer, {*looked_for(self.source), OPEN, CLOSE}, trusted=trust_text)
        self.spared: frozenset[str] = frozenset()
        """Control tokens that the assistant's own words may have: those of thinking and calls, none that begin or end a
        message."""
        self.format = FORMATS[tools]
        self.opened = ""
        """The opening of thinking that the prompt ends with, if it does."""
        self.form = self.find_content()
        if self.format is not None:
            self.form = self.find_thinking()
            self.form = self.find_calls(tools, self.format)
        self.offers = self.find_offers()
        """Whether it is the template that tells a model about its tools."""
        opening = self.try_render((QUESTION,)) or ""
        if opening.rstrip().endswith(THINK):
            self.opened = opening[opening.rindex(THINK) :]
        self.spared = self.find_spared()

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, opening: bool = True, form: Form | None = None
    ) -> Written:
        """The conversation as text, with the opening of the assistant's next message or without.

        Where no text has a control token, it is exactly what the template makes of the texts. Where one has, it is what
        the template makes of it without: a template that looks for its own tags in a message does not find those."""
        apply = partial(self.apply, opening=opening, form=form or self.form)
        texts = list(texts_of(messages, tools))
        guard = self.control.guards(texts)
        if guard is None:
            text = apply(messages, tools)
            return Written(text, text)
        guarded_messages = [guard.message(message, self.spared) for message in messages]
        guarded_tools = [guard.tool(tool) for tool in tools]
        written = guard.written(apply(guarded_messages, guarded_tools))
        find = self.control.find
        if all(find(a) == find(b) for a, b in zip(texts, texts_of(guarded_messages, guarded_tools), strict=True)):
            text = apply(messages, tools)
            if text != written.text and find(text) == find(written.guarded):
                return Written(text, text)
        return written

    def apply(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, opening: bool, form: Form) -> str:
        """What the tokenizer's template makes of messages."""
        schemas = [tool.schema for tool in tools] or None
        if tools and messages and not self.offers:
            messages, schemas = self.with_offer(messages, tools), None
        try:
            text: str = self.tokenizer.apply_chat_template(
                self.entries(messages, form),
                tools=schemas,
                tokenize=False,
                add_generation_prompt=opening,
            )
        except Exception as error:  # templates raise their own exceptions, from jinja and from HF
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        return text

    def try_render(
        self, messages: Sequence[Message], tools: Tools = (), *, opening: bool = True, form: Form | None = None
    ) -> str | None:
        """The conversation as text, or None where the template refuses it."""
        written = self.try_to_write(messages, tools, opening=opening, form=form)
        return None if written is None else written.text

    def try_to_write(
        self, messages: Sequence[Message], tools: Tools = (), *, opening: bool = True, form: Form | None = None
    ) -> Written | None:
        """The conversation as it is rendered, or None where the template refuses it."""
        try:
            return self.render(messages, tools, opening=opening, form=form)
        except ValueError:
            return None

    def own_words(self, text: str) -> Written:
        """A text that the assistant says, as it is sampled."""
        guard = self.control.guards([text])
        spared = self.spared if self.format is None else self.spared | self.format.tags
        return Written(text, text) if guard is None else guard.written(guard.text(text, spared))

    # ------------------------------------------------------------ messages as templates want them

    def with_offer(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[Message]:
        """The conversation with its tools told in the first message that instructs the model, for a template that does
        not know of tools, or writes calls otherwise than they are read."""
        if self.format is None or self.format.offer is None:
            raise ValueError(
                "the chat template does not show the tools that the environment offers; "
                f"set rollout.tools to one of {', '.join(name for name, how in FORMATS.items() if how and how.offer)}"
            )
        offer = self.format.offer(tools)
        if not self.takes_system:
            place = next((place for place, message in enumerate(messages) if message.role == "user"), 0)
            question = f"{offer}\n\n{messages[place].content}"
            return (*messages[:place], replace(messages[place], content=question), *messages[place + 1 :])
        if messages[0].role != "system":
            return (Message("system", offer), *messages)
        return (replace(messages[0], content=f"{messages[0].content}\n\n{offer}"), *messages[1:])

    def entries(self, messages: Sequence[Message], form: Form) -> list[dict[str, Any]]:
        """Messages as the dictionaries a template reads. Results of tools get the name of the call they answer."""
        made = []
        waiting: list[dict[str, Any]] = []
        for message in messages:
            entry = self.entry(message, form)
            if message.role != "tool":
                waiting = list(entry.get("tool_calls", ()))
            elif waiting:
                call = waiting.pop(0)
                entry |= {"name": call["function"]["name"], "tool_call_id": call["id"]}
            made.append(entry)
        return made

    def entry(self, message: Message, form: Form) -> dict[str, Any]:
        content = message.content
        entry: dict[str, Any] = {"role": message.role}
        if message.calls and form.calls != "content":
            entry["tool_calls"] = [call_entry(call, place, form) for place, call in enumerate(message.calls)]
        elif message.calls and self.format is not None and self.format.write is not None:
            content = self.format.write(message)
        if message.thinking and form.thinking:
            entry |= dict.fromkeys(form.thinking, message.thinking)
        elif message.thinking:
            content = join_thinking(message.thinking, content)
        elif self.opened and message.role == "assistant" and CLOSED in content and THINK not in content:
            content = self.opened + content
        entry["content"] = [{"type": "text", "text": content}] if form.in_parts else content
        return entry

    # ------------------------------------------------------------ what a template does, found out by trying

    def find_content(self) -> Form:
        """The form in which the text of a message comes out. A template that refuses both will say why by itself."""
        for form in (Form(), Form(in_parts=True)):
            text = self.try_render((QUESTION,), form=form)
            if text is None or WORD in text:
                return form
        raise ValueError("the chat template does not show what a message says, neither as text nor in parts of text")

    def find_offers(self) -> bool:
        """Whether the template shows tools, in words that ask for calls as they are read here."""
        self.offers = True
        if self.format is not None and self.form.calls == "content":
            return False
        text = self.try_render((QUESTION,), (TOOL,))
        return text is not None and text.count(WORD) > 1 and THOUGHT in text

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template shows a system message that comes before a question."""
        text = self.try_render((Message("system", THOUGHT), QUESTION))
        return text is not None and THOUGHT in text

    def find_thinking(self) -> Form:
        """The form with all the fields from which thinking comes out, in an answer or beside a call."""
        fields = []
        for field in (name for name in ("reasoning_content", "thinking", "reasoning") if name in self.source):
            forms = [replace(self.form, thinking=(field,), calls=calls) for calls in ("mapping", "text")]
            texts = [self.try_render(m, opening=o, form=f) for m in THOUGHTFUL for f in forms for o in (True, False)]
            if any(text and THOUGHT in text for text in texts):
                fields.append(field)
        return replace(self.form, thinking=tuple(fields))

    def find_calls(self, name: str, how: Format) -> Form:
        """The form in which calls come out so that they read as the same calls, else with calls in the content."""
        for calls in ("mapping", "text"):
            form = replace(self.form, calls=calls)
            if self.end_of_call(how, form) is not None:
                return form
        if how.write is None:
            others = " or ".join(f'"{other}"' for other in FORMATS if other != name)
            raise ValueError(f'this chat template does not write calls as rollout.tools = "{name}"; set it to {others}')
        return replace(self.form, calls="content")

    def end_of_call(self, how: Format, form: Form) -> int | None:
        """The token that follows a call, written as the format says, where it is the last message."""
        written = self.written(CALL, how, form)
        return written[1] if written is not None else None

    def written(self, said: Message, how: Format, form: Form) -> tuple[Written, int] | None:
        """What the template writes for a last message of the assistant, and the token that follows; None where that
        does not read as the same message."""
        old, whole = self.try_render((QUESTION,)), self.try_to_write((QUESTION, said), opening=False, form=form)
        if old is None or whole is None or not whole.text.startswith(old):
            return None
        written = whole.after(len(old))
        for place, token in added_tokens(self.tokenizer, written.guarded):
            read = how.parse(written.text[:place])
            if (read.calls, read.content, read.thinking or said.thinking) == (said.calls, said.content, read.thinking):
                return written.before(place), token
        return None

    def spoken(self, said: Message) -> Written:
        """The text with which a model says a message."""
        if not said.calls and not said.thinking:
            return self.own_words(said.content)
        if self.format is None:
            raise ValueError('calls and thinking are written as rollout.tools says; set it to "hermes", for example')
        written = self.written(said, self.format, self.form)
        if written is not None:
            return written[0]
        if self.format.write is None:
            raise ValueError("the chat template cannot write this message so that it reads as the same one")
        guard = self.control.guards(list(texts_of((said,))))
        plain = said if guard is None else guard.message(said, self.spared)
        text = join_thinking(plain.thinking, self.format.write(plain)).removeprefix(self.opened)
        return Written(text, text) if guard is None else guard.written(text)

    def ends(self) -> list[int]:
        """The tokens with which the template ends a last message of the assistant: an answer, and a call."""
        found = self.after_answer((), opening=False)
        if self.format is not None and (token := self.end_of_call(self.format, self.form)) is not None:
            found.append(token)
        return list(dict.fromkeys(found))

    def closings(self) -> list[int]:
        """The token with which the template closes an answer within a conversation, whatever follows."""
        nothing, more = self.after_answer(()), self.after_answer((QUESTION,))
        return nothing if nothing == more else []

    def find_spared(self) -> frozenset[str]:
        """Control tokens that thinking and calls are written with, or that the template looks for in an answer, but for
        those that it writes around plain messages: these begin and end messages, and within one they are text."""
        own, find = self.tokenizer, self.control.find
        forms = [replace(self.form, calls=calls) for calls in ("mapping", "text")]
        said = (*THOUGHTFUL[:2], (QUESTION, CALL))
        spoken = [self.try_render(messages, opening=False, form=form) for messages in said for form in forms]
        told, answer = Message("system", WORD), Message("assistant", THOUGHT)
        plain = ((QUESTION,), (told, QUESTION), (QUESTION, answer, QUESTION), (QUESTION, answer, RESULT))
        around = [self.try_render(messages, opening=False) for messages in plain]
        delimiters = {text for part in around for text in find(part or "")}
        known = tested_strings(self.source) | {text for part in spoken for text in find(part or "")}
        spared = known - delimiters | {THINK, CLOSED, OPEN, CLOSE, PYTHON_TAG}
        ends = {*self.ends(), *self.closings(), own.bos_token_id, own.eos_token_id, own.pad_token_id, own.unk_token_id}
        return frozenset(text for text, token in self.control.tokens.items() if text in spared and token not in ends)

    def after_answer(self, more: tuple[Message, ...], *, opening: bool = True) -> list[int]:
        """The added token right after an answer, if there is one."""
        answer = Message("assistant", THOUGHT)
        text = self.try_render((QUESTION, answer, *more), opening=opening)
        return leading_token(self.tokenizer, text.rpartition(THOUGHT)[2]) if text and THOUGHT in text else []


def call_entry(call: ToolCall, place: int, form: Form) -> dict[str, Any]:
    arguments: Any = call.text if form.calls == "text" else dict(call.arguments)
    # Some templates print ids, and some of those want nine characters.
    return {"type": "function", "id": f"call{place:05d}", "function": {"name": call.name, "arguments": arguments}}


def added_tokens(tokenizer: ChatTokenizer, text: str) -> list[tuple[int, int]]:
    """(place, token) of every added token in a text, in order."""
    found = []
    for word, token in tokenizer.get_added_vocab().items():
        place = text.find(word)
        while place >= 0:
            found.append((place, int(token)))
            place = text.find(word, place + 1)
    return sorted(found)


def leading_token(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """The added token a text begins with, if it begins with one."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return [int(tokens[0])] if tokens and tokens[0] in tokenizer.get_added_vocab().values() else []

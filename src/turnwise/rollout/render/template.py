"""A tokenizer's chat template: the form of messages that it needs, the text that it writes, and its end tokens.

A tokenizer does not state any of this, so the class renders short conversations and looks at the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.pretrained import ChatTokenizer
from turnwise.rollout.render.control import ControlTokens, GuardedText, texts_of
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
    "hermes": Format(read_hermes, write_hermes, offer_hermes, openings=(OPEN, CLOSE, THINK, CLOSED)),
    "llama": Format(read_llama, write_llama, offer_llama),
    "harmony": Format(read_harmony, clean=without_control, tags=TAGS),
}
WORD, THOUGHT = "zebra", "quagga"
"""Text that occurs in no template."""
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
    """The fields from which a template reads a message."""

    in_parts: bool = False
    """Whether content is a list of parts, as in templates of models that read images."""
    thinking: tuple[str, ...] = ()
    """The fields for thinking; if there are none, thinking goes into the content."""
    calls: str = "content"
    """The place of calls: "content", or tool_calls with arguments as a "mapping" or as "text"."""


class Template:
    """Renders messages as text. A control token that a message only spells stays text."""

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
        """Control tokens that an assistant's message may have: those of thinking and calls, but none that begins or
        ends a message."""
        self.format = FORMATS[tools]
        self.opened = ""
        """The opening of thinking at the end of a prompt, if the template writes one."""
        self.form = self.find_content()
        if self.format is not None:
            self.form = self.find_thinking()
            self.form = self.find_calls(tools, self.format)
        self.offers = self.find_offers()
        """Whether the template itself describes the tools to the model."""
        opening = self.try_render((QUESTION,)) or ""
        if opening.rstrip().endswith(THINK):
            self.opened = opening[opening.rindex(THINK) :]
        self.spared = self.find_spared()

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, opening: bool = True, form: Form | None = None
    ) -> GuardedText:
        """The conversation as text, with or without the opening of the assistant's next message.

        If no text has a control token, this is exactly the template's rendering. If one has, the template renders it
        with stand-ins: a template that looks for its tags in a message does not find those."""
        apply = partial(self.apply, opening=opening, form=form or self.form)
        texts = list(texts_of(messages, tools))
        guard = self.control.guards(texts)
        if guard is None:
            text = apply(messages, tools)
            return GuardedText(text, text)
        guarded_messages = [guard.message(message, self.spared) for message in messages]
        guarded_tools = [guard.tool(tool) for tool in tools]
        written = guard.written(apply(guarded_messages, guarded_tools))
        find = self.control.find
        if all(find(a) == find(b) for a, b in zip(texts, texts_of(guarded_messages, guarded_tools), strict=True)):
            text = apply(messages, tools)
            if text != written.text and find(text) == find(written.guarded):
                return GuardedText(text, text)
        return written

    def apply(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, opening: bool, form: Form) -> str:
        """The template's rendering of messages."""
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
        except Exception as error:  # jinja and transformers raise various exceptions for templates
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        return text

    def try_render(
        self, messages: Sequence[Message], tools: Tools = (), *, opening: bool = True, form: Form | None = None
    ) -> str | None:
        """The conversation as text, or None if the template refuses it."""
        written = self.try_to_write(messages, tools, opening=opening, form=form)
        return None if written is None else written.text

    def try_to_write(
        self, messages: Sequence[Message], tools: Tools = (), *, opening: bool = True, form: Form | None = None
    ) -> GuardedText | None:
        """The rendered conversation, or None if the template refuses it."""
        try:
            return self.render(messages, tools, opening=opening, form=form)
        except ValueError:
            return None

    def own_words(self, text: str) -> GuardedText:
        """A text of the assistant, as it would be sampled."""
        guard = self.control.guards([text])
        spared = self.spared if self.format is None else self.spared | self.format.tags
        return GuardedText(text, text) if guard is None else guard.written(guard.text(text, spared))

    # ------------------------------------------------------------ messages in the form of templates

    def with_offer(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[Message]:
        """The conversation with a description of the tools in the system message or the first question. This is for a
        template that does not support tools, or that writes calls in another format than `rollout.tools`."""
        if self.format is None or self.format.offer is None:
            raise ValueError(
                "the chat template does not show the tools that the environment offers; "
                f"set rollout.tools to one of {', '.join(name for name, how in FORMATS.items() if how and how.offer)}"
            )
        offer = self.format.offer(tools)
        if not self.takes_system:
            index = next((index for index, message in enumerate(messages) if message.role == "user"), 0)
            question = f"{offer}\n\n{messages[index].content}"
            return (*messages[:index], replace(messages[index], content=question), *messages[index + 1 :])
        if messages[0].role != "system":
            return (Message("system", offer), *messages)
        return (replace(messages[0], content=f"{messages[0].content}\n\n{offer}"), *messages[1:])

    def entries(self, messages: Sequence[Message], form: Form) -> list[dict[str, Any]]:
        """Messages as the dictionaries that a template reads. A tool result gets the name of the call it answers."""
        entries = []
        waiting: list[dict[str, Any]] = []
        for message in messages:
            entry = self.entry(message, form)
            if message.role != "tool":
                waiting = list(entry.get("tool_calls", ()))
            elif waiting:
                call = waiting.pop(0)
                entry |= {"name": call["function"]["name"], "tool_call_id": call["id"]}
            entries.append(entry)
        return entries

    def entry(self, message: Message, form: Form) -> dict[str, Any]:
        content = message.content
        entry: dict[str, Any] = {"role": message.role}
        if message.calls and form.calls != "content":
            entry["tool_calls"] = [call_entry(call, index, form) for index, call in enumerate(message.calls)]
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

    # ------------------------------------------------------------ probing the template

    def find_content(self) -> Form:
        """The form in which the text of a message is rendered. A template that refuses both raises its error later."""
        for form in (Form(), Form(in_parts=True)):
            text = self.try_render((QUESTION,), form=form)
            if text is None or WORD in text:
                return form
        raise ValueError(
            "the chat template does not render the content of a message, neither as text nor as parts; use another one"
        )

    def find_offers(self) -> bool:
        """Whether the template describes tools and asks for calls in the format of `rollout.tools`."""
        self.offers = True
        if self.format is not None and self.form.calls == "content":
            return False
        text = self.try_render((QUESTION,), (TOOL,))
        return text is not None and text.count(WORD) > 1 and THOUGHT in text

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template renders a system message before a question."""
        text = self.try_render((Message("system", THOUGHT), QUESTION))
        return text is not None and THOUGHT in text

    def find_thinking(self) -> Form:
        """The form with all fields from which the template renders thinking, in an answer or before a call."""
        fields = []
        for field in (name for name in ("reasoning_content", "thinking", "reasoning") if name in self.source):
            forms = [replace(self.form, thinking=(field,), calls=calls) for calls in ("mapping", "text")]
            texts = [self.try_render(m, opening=o, form=f) for m in THOUGHTFUL for f in forms for o in (True, False)]
            if any(text and THOUGHT in text for text in texts):
                fields.append(field)
        return replace(self.form, thinking=tuple(fields))

    def find_calls(self, name: str, how: Format) -> Form:
        """The form in which rendered calls parse as the same calls; if there is none, calls go into the content."""
        for calls in ("mapping", "text"):
            form = replace(self.form, calls=calls)
            if self.end_of_call(how, form) is not None:
                return form
        if how.write is None:
            alternatives = " or ".join(f'"{other}"' for other in FORMATS if other != name)
            raise ValueError(
                f'this chat template does not write calls as rollout.tools = "{name}"; set it to {alternatives}'
            )
        return replace(self.form, calls="content")

    def end_of_call(self, how: Format, form: Form) -> int | None:
        """The token after a call in the last message; None if the call does not parse as the same call."""
        written = self.written(CALL, how, form)
        return written[1] if written is not None else None

    def written(self, message: Message, how: Format, form: Form) -> tuple[GuardedText, int] | None:
        """The text that the template writes for a last message of the assistant, and the token after it; None if the
        text does not parse as the same message."""
        old, rendered = self.try_render((QUESTION,)), self.try_to_write((QUESTION, message), opening=False, form=form)
        if old is None or rendered is None or not rendered.text.startswith(old):
            return None
        written = rendered.after(len(old))
        for position, token in added_tokens(self.tokenizer, written.guarded):
            read = how.parse(written.text[:position])
            if (read.calls, read.content, read.thinking or message.thinking) == (
                message.calls,
                message.content,
                read.thinking,
            ):
                return written.before(position), token
        return None

    def spoken(self, message: Message) -> GuardedText:
        """The text of a message as a model would sample it."""
        if not message.calls and not message.thinking:
            return self.own_words(message.content)
        if self.format is None:
            raise ValueError('calls and thinking need a format; set rollout.tools, for example to "hermes"')
        written = self.written(message, self.format, self.form)
        if written is not None:
            return written[0]
        if self.format.write is None:
            raise ValueError("the chat template writes this message so that it does not parse as the same message")
        guard = self.control.guards(list(texts_of((message,))))
        plain = message if guard is None else guard.message(message, self.spared)
        text = join_thinking(plain.thinking, self.format.write(plain)).removeprefix(self.opened)
        return GuardedText(text, text) if guard is None else guard.written(text)

    def ends(self) -> list[int]:
        """The tokens with which the template ends the assistant's last message: after an answer, and after a call."""
        tokens = self.after_answer((), opening=False)
        if self.format is not None and (token := self.end_of_call(self.format, self.form)) is not None:
            tokens.append(token)
        return list(dict.fromkeys(tokens))

    def closings(self) -> list[int]:
        """The token with which the template closes an answer inside a conversation, whatever follows."""
        nothing, more = self.after_answer(()), self.after_answer((QUESTION,))
        return nothing if nothing == more else []

    def find_spared(self) -> frozenset[str]:
        """Control tokens of thinking and calls, and those that the template looks for in an answer. Control tokens that
        the template writes around plain messages are not among them: inside a message they are text."""
        tokenizer, find = self.tokenizer, self.control.find
        forms = [replace(self.form, calls=calls) for calls in ("mapping", "text")]
        conversations = (*THOUGHTFUL[:2], (QUESTION, CALL))
        spoken = [self.try_render(messages, opening=False, form=form) for messages in conversations for form in forms]
        instruction, answer = Message("system", WORD), Message("assistant", THOUGHT)
        plain = ((QUESTION,), (instruction, QUESTION), (QUESTION, answer, QUESTION), (QUESTION, answer, RESULT))
        plain_texts = [self.try_render(messages, opening=False) for messages in plain]
        delimiters = {text for part in plain_texts for text in find(part or "")}
        candidates = tested_strings(self.source) | {text for part in spoken for text in find(part or "")}
        spared = candidates - delimiters | {THINK, CLOSED, OPEN, CLOSE, PYTHON_TAG}
        ends = {
            *self.ends(),
            *self.closings(),
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
            tokenizer.unk_token_id,
        }
        return frozenset(text for text, token in self.control.tokens.items() if text in spared and token not in ends)

    def after_answer(self, more: tuple[Message, ...], *, opening: bool = True) -> list[int]:
        """The added token right after an answer, if there is one."""
        answer = Message("assistant", THOUGHT)
        text = self.try_render((QUESTION, answer, *more), opening=opening)
        return leading_token(self.tokenizer, text.rpartition(THOUGHT)[2]) if text and THOUGHT in text else []


def call_entry(call: ToolCall, index: int, form: Form) -> dict[str, Any]:
    arguments: Any = call.text if form.calls == "text" else dict(call.arguments)
    # Some templates print ids, and some of those require nine characters.
    return {"type": "function", "id": f"call{index:05d}", "function": {"name": call.name, "arguments": arguments}}


def added_tokens(tokenizer: ChatTokenizer, text: str) -> list[tuple[int, int]]:
    """(position, token) of every added token in a text, in order."""
    positions = []
    for word, token in tokenizer.get_added_vocab().items():
        position = text.find(word)
        while position >= 0:
            positions.append((position, int(token)))
            position = text.find(word, position + 1)
    return sorted(positions)


def leading_token(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """The added token a text begins with, if it begins with one."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return [int(tokens[0])] if tokens and tokens[0] in tokenizer.get_added_vocab().values() else []

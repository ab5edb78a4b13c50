"""A tokenizer's chat template: in which form it takes messages, what it writes, and with which token it ends a turn.

None of that is written down anywhere, so it is found out by trying: short conversations are rendered, and what they
come out as shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from turnwise.rollout.harmony import read_harmony, without_control
from turnwise.rollout.toolcalls import (
    CLOSED,
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
from turnwise.types import Message, ToolCall, ToolSpec

Tools = tuple[ToolSpec, ...]

FORMATS: dict[str, Format | None] = {
    "none": None,
    "hermes": Format(read_hermes, write_hermes, offer_hermes),
    "llama": Format(read_llama, write_llama, offer_llama),
    "harmony": Format(read_harmony, clean=without_control),
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
    """How messages become text."""

    def __init__(self, tokenizer: Any, tools: str = "none") -> None:
        source = getattr(tokenizer, "chat_template", None)
        if not source:
            raise ValueError(
                "the tokenizer has no chat template; set tokenizer.chat_template and save it with the model"
            )
        self.source = "\n".join(source.values()) if isinstance(source, dict) else str(source)
        self.tokenizer = tokenizer
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

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, opening: bool = True, form: Form | None = None
    ) -> str:
        """The conversation as text, with the opening of the assistant's next message or without."""
        schemas = [tool.schema for tool in tools] or None
        if tools and messages and not self.offers:
            messages, schemas = self.with_offer(messages, tools), None
        try:
            text: str = self.tokenizer.apply_chat_template(
                self.entries(messages, form or self.form),
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
        try:
            return self.render(messages, tools, opening=opening, form=form)
        except ValueError:
            return None

    # ------------------------------------------------------------ messages as templates want them

    def with_offer(self, messages: Sequence[Message], tools: Tools) -> Sequence[Message]:
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

    def written(self, said: Message, how: Format, form: Form) -> tuple[str, int] | None:
        """What the template writes for a last message of the assistant, and the token that follows; None where that
        does not read as the same message."""
        old, whole = self.try_render((QUESTION,)), self.try_render((QUESTION, said), opening=False, form=form)
        if old is None or whole is None or not whole.startswith(old):
            return None
        written = whole[len(old) :]
        for place, token in added_tokens(self.tokenizer, written):
            read = how.parse(written[:place])
            if (read.calls, read.content, read.thinking or said.thinking) == (said.calls, said.content, read.thinking):
                return written[:place], token
        return None

    def spoken(self, said: Message) -> str:
        """The text with which a model says a message."""
        if not said.calls and not said.thinking:
            return said.content
        if self.format is None:
            raise ValueError('calls and thinking are written as rollout.tools says; set it to "hermes", for example')
        written = self.written(said, self.format, self.form)
        if written is not None:
            return written[0]
        if self.format.write is None:
            raise ValueError("the chat template cannot write this message so that it reads as the same one")
        return join_thinking(said.thinking, self.format.write(said)).removeprefix(self.opened)

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

    def after_answer(self, more: tuple[Message, ...], *, opening: bool = True) -> list[int]:
        """The added token right after an answer, if there is one."""
        answer = Message("assistant", THOUGHT)
        text = self.try_render((QUESTION, answer, *more), opening=opening)
        return leading_token(self.tokenizer, text.rpartition(THOUGHT)[2]) if text and THOUGHT in text else []


def call_entry(call: ToolCall, place: int, form: Form) -> dict[str, Any]:
    arguments: Any = call.text if form.calls == "text" else dict(call.arguments)
    # Some templates print ids, and some of those want nine characters.
    return {"type": "function", "id": f"call{place:05d}", "function": {"name": call.name, "arguments": arguments}}


def added_tokens(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """(place, token) of every added token in a text, in order."""
    found = []
    for word, token in tokenizer.get_added_vocab().items():
        place = text.find(word)
        while place >= 0:
            found.append((place, int(token)))
            place = text.find(word, place + 1)
    return sorted(found)


def leading_token(tokenizer: Any, text: str) -> list[int]:
    """The added token a text begins with, if it begins with one."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return [int(tokens[0])] if tokens and tokens[0] in tokenizer.get_added_vocab().values() else []

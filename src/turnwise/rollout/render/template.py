"""A tokenizer's chat template: the form of messages that it needs, the text that it writes, and its end tokens.

A tokenizer does not state any of this, so probe.py renders short conversations and looks at the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.pretrained import ChatTokenizer
from turnwise.rollout.render import probe
from turnwise.rollout.render.control import ControlTokens, GuardedText, texts_of
from turnwise.rollout.render.formats.coerce import specs_of
from turnwise.rollout.render.formats.registry import FORMATS, find_format
from turnwise.rollout.render.probe import QUESTION, RESULT, Form, Tools
from turnwise.rollout.render.skeleton import looked_for
from turnwise.rollout.render.toolcalls import CLOSE, CLOSED, OPEN, THINK, Format, general_offer, join_thinking, plain_id

__all__ = ["FORMATS", "QUESTION", "RESULT", "Form", "Template", "Tools"]


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
        self.opened = ""
        """The opening of thinking at the end of a prompt, if the template writes one."""
        self.format: Format | None = None
        self.no_tools: list[Any] | None = None
        """What the template gets where no tools are offered; some take only a list."""
        self.offers = True
        """Whether the template itself describes the tools to the model."""
        self.form = probe.find_content(self)
        if tools != "none":
            self.form = probe.find_thinking(self)
        self.tools = probe.choose(self) if tools == "auto" else tools
        """The name of the format."""
        self.format = find_format(self.tools)
        if self.format is not None:
            self.form = probe.find_calls(self, tools, self.format)
            self.form = probe.find_results(self, tools)
        self.offers = probe.find_offers(self)
        opening = (self.try_render((QUESTION,)) or "").rstrip()
        if opening.endswith(self.thinking[0]):
            whole = self.try_render((QUESTION,)) or ""
            self.opened = whole[whole.rindex(self.thinking[0]) :]
        self.spared = probe.find_spared(self)

    @property
    def thinking(self) -> tuple[str, str]:
        """What opens and closes thinking."""
        return (THINK, CLOSED) if self.format is None else self.format.thinking

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
        schemas = [tool.schema for tool in tools] or self.no_tools
        if tools and messages and not self.offers:
            messages, schemas = self.with_offer(messages, tools), self.no_tools
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
        if self.format is None or not (self.format.offer or self.format.help_text):
            raise ValueError(
                'the chat template does not show the tools that the environment offers; set rollout.tools = "auto", or '
                "give your parser a method offer(tools)"
            )
        offer = self.format.offer(tools) if self.format.offer else general_offer(tools, self.format.help_text)
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
        total = 0
        for message in as_questions(messages) if form.results == "user" else messages:
            entry = self.entry(message, form, total)
            total += len(message.calls)
            if message.role != "tool":
                waiting = list(entry.get("tool_calls", ()))
            elif waiting:
                call = waiting.pop(0)
                entry |= {"name": call["function"]["name"], "tool_call_id": call["id"]}
            entries.append(entry)
        return entries

    def entry(self, message: Message, form: Form, total: int) -> dict[str, Any]:
        """One message; `total` calls came before it."""
        content = message.content
        entry: dict[str, Any] = {"role": message.role}
        if message.calls and form.calls != "content":
            entry["tool_calls"] = [
                call_entry(call, (self.format.make_id if self.format else plain_id)(call, index, total + index), form)
                for index, call in enumerate(message.calls)
            ]
        elif message.calls and self.format is not None and self.format.write is not None:
            content = self.format.write(message)
        if message.thinking and form.thinking:
            entry |= dict.fromkeys(form.thinking, message.thinking)
        elif message.thinking:
            content = join_thinking(message.thinking, content, self.thinking)
        elif (
            self.opened
            and message.role == "assistant"
            and self.thinking[1] in content
            and self.thinking[0] not in content
        ):
            content = self.opened + content
        entry["content"] = [{"type": "text", "text": content}] if form.in_parts else content
        return entry

    # ------------------------------------------------------------ what a model would write

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template renders a system message before a question."""
        text = self.try_render((Message("system", probe.THOUGHT), QUESTION))
        return text is not None and probe.THOUGHT in text

    def spoken(self, message: Message) -> GuardedText:
        """The text of a message as a model would sample it."""
        if not message.calls and not message.thinking:
            return self.own_words(message.content)
        if self.format is None:
            raise ValueError('calls and thinking need a format; set rollout.tools = "auto"')
        found = probe.written(self, message, self.format, self.form)
        if found is not None and found.exact:
            return found.text
        if found is not None:
            text = self.continued(found.text, message)
            read = self.format.parse(self.opened + text.text, specs_of(message.calls))
            if probe.same(read, message) and (read.content, read.thinking) == (message.content, message.thinking):
                return text
        if self.format.write is None:
            raise ValueError("the chat template writes this message so that it does not parse as the same message")
        guard = self.control.guards(list(texts_of((message,))))
        plain = message if guard is None else guard.message(message, self.spared)
        text_only = join_thinking(plain.thinking, self.format.write(plain), self.thinking).removeprefix(self.opened)
        return GuardedText(text_only, text_only) if guard is None else guard.written(text_only)

    def continued(self, text: GuardedText, message: Message) -> GuardedText:
        """A text that the template writes without the opening of thinking, as it goes on after that opening."""
        begin, end = self.thinking
        if not self.opened:
            return text
        blank = len(text.text) - len(text.text.lstrip())
        if text.text.startswith(begin, blank):
            return text.after(blank + len(begin))
        if text.text.startswith(end, blank):
            return text
        closing = f"{message.thinking}\n{end}\n\n"
        return GuardedText(closing + text.text, closing + text.guarded)

    def ends(self) -> list[int]:
        """The tokens with which the template ends the assistant's last message: after an answer, and after a call."""
        tags: frozenset[str] = frozenset() if self.format is None else self.format.tags
        tokens = self.after_answer((), opening=False, within=tags)
        token = None if self.format is None else probe.end_of_call(self, self.format, self.form)
        return list(dict.fromkeys([*tokens, *([] if token is None else [token])]))

    def closings(self) -> list[int]:
        """The token with which the template closes an answer inside a conversation, whatever follows."""
        nothing, more = self.after_answer(()), self.after_answer((QUESTION,))
        return nothing if nothing == more else []

    def after_answer(
        self, more: tuple[Message, ...], *, opening: bool = True, within: frozenset[str] = frozenset()
    ) -> list[int]:
        """The added token right after an answer, if there is one; tokens `within` answers do not count."""
        answer = Message("assistant", probe.THOUGHT)
        text = self.try_render((QUESTION, answer, *more), opening=opening)
        if not text or probe.THOUGHT not in text:
            return []
        rest = text.rpartition(probe.THOUGHT)[2]
        leading = probe.leading_token(self.tokenizer, rest)
        if leading and self.tokenizer.decode(leading, skip_special_tokens=False) in within:
            added = [token for _, token in probe.added_tokens(self.tokenizer, rest)]
            names = {token: self.tokenizer.decode([token], skip_special_tokens=False) for token in added}
            return [token for token in added if names[token] not in within][:1]
        return leading


def as_questions(messages: Sequence[Message]) -> list[Message]:
    """A conversation whose tool results are questions, for templates that know no results. Templates of that kind
    want questions and answers to take turns, so neighbours become one question."""
    made: list[Message] = []
    for message in messages:
        if message.role == "tool":
            message = Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
        if made and message.role == made[-1].role == "user":
            made[-1] = Message("user", f"{made[-1].content}\n{message.content}")
        else:
            made.append(message)
    return made


def call_entry(call: ToolCall, call_id: str, form: Form) -> dict[str, Any]:
    arguments: Any = call.text if form.calls == "text" else dict(call.arguments)
    return {"type": "function", "id": call_id, "function": {"name": call.name, "arguments": arguments}}

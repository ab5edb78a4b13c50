"""Probing a chat template: short conversations whose renderings show what the template reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.pretrained import ChatTokenizer
from turnwise.rollout.render.control import ControlTokens, GuardedText
from turnwise.rollout.render.formats.coerce import specs_of
from turnwise.rollout.render.formats.registry import FORMATS
from turnwise.rollout.render.skeleton import tested_strings
from turnwise.rollout.render.toolcalls import CLOSE, CLOSED, OPEN, PYTHON_TAG, THINK, Format

Tools = tuple[ToolSpec, ...]

WORD, THOUGHT = "zebra", "quagga"
"""Text that occurs in no template."""
QUESTION, ANSWER, RESULT = Message("user", WORD), Message("assistant", WORD), Message("tool", WORD)
CALL = Message("assistant", "", calls=(ToolCall(WORD, {"x": "y"}),))
RICH_CALL = Message("assistant", "", calls=(ToolCall(WORD, {"x": "yé 本", "n": 3, "o": {"a": [1, "b"]}}),))
TOOL = ToolSpec(WORD, THOUGHT, {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]})
THOUGHTFUL = (
    (QUESTION, Message("assistant", WORD, THOUGHT)),
    (QUESTION, Message("assistant", "", THOUGHT, CALL.calls)),
    (QUESTION, Message("assistant", "", THOUGHT, CALL.calls), RESULT),
)
PLACES = ("mapping", "text")


@dataclass(frozen=True, slots=True)
class Form:
    """The fields from which a template reads a message."""

    in_parts: bool = False
    """Whether content is a list of parts, as in templates of models that read images."""
    thinking: tuple[str, ...] = ()
    """The fields for thinking; if there are none, thinking goes into the content."""
    calls: str = "content"
    """The place of calls: "content", or tool_calls with arguments as a "mapping" or as "text"."""
    results: str = "tool"
    """The role of tool results: "tool", or "user" where the template knows no results."""


@dataclass(frozen=True, slots=True)
class WrittenMessage:
    """The text that a template writes for the last message, the token after it, and whether it begins exactly where a
    prompt ends."""

    text: GuardedText
    token: int | None
    exact: bool


class ProbedTemplate(Protocol):
    """What probing needs of a template."""

    source: str
    tokenizer: ChatTokenizer
    control: ControlTokens
    format: Format | None
    form: Form
    no_tools: list[Any] | None

    @property
    def thinking(self) -> tuple[str, str]: ...

    def try_render(
        self, messages: Sequence[Message], tools: Tools = (), *, opening: bool = True, form: Form | None = None
    ) -> str | None: ...

    def try_to_write(
        self, messages: Sequence[Message], tools: Tools = (), *, opening: bool = True, form: Form | None = None
    ) -> GuardedText | None: ...

    def ends(self) -> list[int]: ...

    def closings(self) -> list[int]: ...


# ---------------------------------------------------------------- content, thinking, tools


def find_content(template: ProbedTemplate) -> Form:
    """The form in which the text of a message is rendered. A template that refuses both raises its error later."""
    if template.try_render((QUESTION,), form=Form()) is None:
        template.no_tools = []  # some take None for a list
        if template.try_render((QUESTION,), form=Form()) is None:
            template.no_tools = None
    for form in (Form(), Form(in_parts=True)):
        text = template.try_render((QUESTION,), form=form)
        if text is None or WORD in text:
            return form
    raise ValueError(
        "the chat template does not render the content of a message, neither as text nor as parts; use another one"
    )


def find_thinking(template: ProbedTemplate) -> Form:
    """The form with all fields from which the template renders thinking, in an answer or before a call."""
    fields = []
    for field in (name for name in ("reasoning_content", "thinking", "reasoning") if name in template.source):
        forms = [replace(template.form, thinking=(field,), calls=calls) for calls in PLACES]
        texts = [template.try_render(m, opening=o, form=f) for m in THOUGHTFUL for f in forms for o in (True, False)]
        if any(text and THOUGHT in text for text in texts):
            fields.append(field)
    return replace(template.form, thinking=tuple(fields))


def find_offers(template: ProbedTemplate) -> bool:
    """Whether the template describes tools and asks for calls in the format of `rollout.tools`."""
    if template.format is not None and template.form.calls == "content":
        return False
    text = template.try_render((QUESTION,), (TOOL,))
    return text is not None and text.count(WORD) > 1 and THOUGHT in text


# ---------------------------------------------------------------- calls and results


def choose(template: ProbedTemplate) -> str:
    """The format whose reader understands the template's own calls; hermes where the template writes no calls, since
    its calls can be content and its description of tools a system message."""
    for call in (RICH_CALL, CALL):
        for found in (written_in, readable_in):
            for name, how in FORMATS.items():
                if how is not None and found(template, how, call) is not None:
                    return name
    return "hermes"


def written_in(template: ProbedTemplate, how: Format, call: Message) -> Form | None:
    """The form in which a rendered call reads as the same call."""
    return first_form(template, how, lambda form: written(template, call, how, form) is not None)


def readable_in(template: ProbedTemplate, how: Format, call: Message) -> Form | None:
    """The form in which the same call is found somewhere in the text after the question."""
    return first_form(template, how, lambda form: reads_somewhere(template, call, how, form))


def first_form(template: ProbedTemplate, how: Format, works: Callable[[Form], bool]) -> Form | None:
    """The first form of calls that works, rendered as a format needs it."""
    before, template.format = template.format, how
    try:
        forms = [replace(template.form, calls=calls) for calls in PLACES]
        return next((form for form in forms if works(form)), None)
    finally:
        template.format = before


def find_calls(template: ProbedTemplate, name: str, how: Format) -> Form:
    """The form in which rendered calls read as the same calls; if there is none, calls go into the content."""
    in_content = replace(template.form, calls="content")
    if (form := written_in(template, how, CALL)) is not None:
        return form
    if how.write is not None and written(template, CALL, how, in_content) is not None:
        return in_content
    if (form := readable_in(template, how, CALL)) is not None:
        return form
    if name == "auto":
        raise ValueError(
            "this chat template writes tool calls in no known format and carries none in its content; set "
            'rollout.tools to a parser of your own ("module:Parser"), or to "none"'
        )
    known = [other for other, reader in FORMATS.items() if reader and written_in(template, reader, CALL)]
    hint = " or ".join(f'"{other}"' for other in known) or '"auto"'
    raise ValueError(f'this chat template does not write calls as rollout.tools = "{name}"; set it to {hint}')


def find_results(template: ProbedTemplate, name: str) -> Form:
    """The form in which the result of a call is shown."""
    heard = Message("tool", THOUGHT)
    for results in ("tool", "user"):
        form = replace(template.form, results=results)
        text = template.try_render((QUESTION, CALL, heard), form=form)
        if text is not None and THOUGHT in text:
            return form
    raise ValueError(
        f'this chat template shows no tool results with rollout.tools = "{name}"; use another template, or set it to '
        '"none"'
    )


def same(read: Message, message: Message) -> bool:
    """Whether two messages have the same calls, in whatever order of their arguments."""
    return [(call.name, dict(call.arguments)) for call in read.calls] == [
        (call.name, dict(call.arguments)) for call in message.calls
    ]


def written(template: ProbedTemplate, message: Message, how: Format, form: Form) -> WrittenMessage | None:
    """The text that the template writes for a last message of the assistant; None if it does not read as the same
    message."""
    old = template.try_render((QUESTION,))
    rendered = template.try_to_write((QUESTION, message), opening=False, form=form)
    if old is None or rendered is None:
        return None
    for start in starts(old, how):
        if rendered.text.startswith(start):
            rest = rendered.after(len(start))
            position = last_reading(template, rest, message, how)
            if position is None:
                continue
            token = token_after(template, rest, position, message, how, form)
            return WrittenMessage(rest.before(position), token, start == old)
    return None


def starts(prompt: str, how: Format) -> list[str]:
    """A prompt, and the prompt without the thinking that it opens or skips: many templates write it only there."""
    cut = prompt.rfind(how.thinking[0])
    return [prompt] if cut < prompt.rfind(WORD) else [prompt, prompt[:cut], prompt[:cut].rstrip()]


def last_reading(template: ProbedTemplate, rest: GuardedText, message: Message, how: Format) -> int | None:
    """The last place where the text so far reads as the message: closing marks of a call belong to it."""
    places = [position for position, _ in reversed(added_tokens(template.tokenizer, rest.guarded))]
    ends = [place for place in places if rest.guarded.startswith(tuple(how.ends), place)] if how.ends else []
    for position in (*ends, len(rest.text), *places):
        if same_message(how, rest.text[:position], message):
            return position
    return None


def same_message(how: Format, text: str, message: Message) -> bool:
    """Whether a text reads as a message, also where the template has dropped its thinking."""
    read = how.parse(text, specs_of(message.calls))
    said = read.content if not message.calls else read.content.strip()
    return (
        not read.fault
        and same(read, message)
        and said == message.content
        and (read.thinking or message.thinking) == read.thinking
    )


def token_after(
    template: ProbedTemplate, rest: GuardedText, position: int, message: Message, how: Format, form: Form
) -> int | None:
    """The added token right after a message; if nothing follows, the one that the template writes before a result.
    A mark that the reader takes for a part of the message ends nothing."""
    token = leading_token(template.tokenizer, rest.guarded[position:])
    if token:
        name = template.tokenizer.decode(token, skip_special_tokens=False)
        is_mark = name not in how.ends and same_message(how, rest.text[:position] + name, message)
        return None if is_mark else token[0]
    results = (RESULT,) * len(message.calls)
    whole = (template.try_render((QUESTION, message), opening=False, form=form) or "").rstrip()
    more = template.try_render((QUESTION, message, *results), form=form) if results else None
    if position < len(rest.text) or not whole or not more or not more.startswith(whole):
        return None
    before_result = leading_token(template.tokenizer, more[len(whole) :].lstrip())
    return before_result[0] if before_result else None


def reads_somewhere(template: ProbedTemplate, message: Message, how: Format, form: Form) -> bool:
    """Whether the calls of a rendered message are found in the text after the question, whatever stands around them:
    some templates write white space that a prompt does not have."""
    rendered = template.try_render((QUESTION, message), opening=False, form=form)
    if rendered is None:
        return False
    text = rendered.partition(WORD)[2]
    return same(how.parse(text, specs_of(message.calls)), message)


def end_of_call(template: ProbedTemplate, how: Format, form: Form) -> int | None:
    """The token after a call in the last message, if there is one."""
    found = written(template, CALL, how, form)
    return None if found is None else found.token


# ---------------------------------------------------------------- control tokens


def find_spared(template: ProbedTemplate) -> frozenset[str]:
    """Control tokens of thinking and calls, and those that the template looks for in an answer. Control tokens that the
    template writes around plain messages are not among them: inside a message they are text."""
    tokenizer, find, render = template.tokenizer, template.control.find, template.try_render
    forms = [replace(template.form, calls=calls) for calls in PLACES]
    conversations = (*THOUGHTFUL[:2], (QUESTION, CALL))
    spoken = [render(messages, opening=False, form=form) for messages in conversations for form in forms]
    instruction, answer = Message("system", WORD), Message("assistant", THOUGHT)
    plain = ((QUESTION,), (instruction, QUESTION), (QUESTION, answer, QUESTION), (QUESTION, answer, RESULT))
    plain_texts = [render(messages, opening=False) for messages in plain]
    delimiters = {text for part in plain_texts for text in find(part or "")}
    candidates = tested_strings(template.source) | {text for part in spoken for text in find(part or "")}
    spared = candidates - delimiters | {THINK, CLOSED, OPEN, CLOSE, PYTHON_TAG, *template.thinking}
    ends = {
        *template.ends(),
        *template.closings(),
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
    }
    return frozenset(text for text, token in template.control.tokens.items() if text in spared and token not in ends)


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

"""Control tokens, and how text that spells one stays text.

A control token comes from the chat template or from the model, never from the text of a message. So a conversation is
rendered with stand-ins for the characters of its texts that could begin or end a control token: whatever the template
does with a text, no control token can come of it, alone, beside another text or beside the template's own. The control
tokens that are then in the rendering are the template's, and the characters go back in afterwards.

Only where the finished text has other control tokens than the template wrote does anything more happen: the text is
encoded by a copy of the tokenizer in which control tokens have other names, and the template's have those.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.tokens import Tokens

PRIVATE = range(0xF0000, 0xFFFFE)
"""Characters that mean nothing to anybody."""
NO_STAND_INS = "a text has too many private-use characters; control tokens in it could not be told from the template's"
CANNOT_SPELL = (
    "this tokenizer cannot write a control token as text; remove it from the text, or set "
    "rollout.rendering.trust_text = true"
)


@dataclass(frozen=True, slots=True)
class Written:
    """A text, and the same text with stand-ins for what shall not be part of a control token.

    Example:
        Written("<s>[INST] what is <s>? [/INST]", "<s>[INST] what is \\U000f1234s\\U000f1235? [/INST]")
    """

    text: str
    guarded: str
    """As long as the text, character by character."""

    def after(self, size: int) -> Written:
        """What follows the first characters."""
        return Written(self.text[size:], self.guarded[size:])

    def before(self, size: int) -> Written:
        """The first characters."""
        return Written(self.text[:size], self.guarded[:size])


class ControlTokens:
    """The control tokens of a tokenizer: those that are special, and those that are written like a tag.

    An added token that is a word or white space is text like any other. With `trusted`, so is nothing: texts then may
    have control tokens, as the tokenizer reads them.
    """

    def __init__(self, tokenizer: Any, looked_for: Iterable[str] = (), *, trusted: bool = False) -> None:
        self.tokenizer = tokenizer
        self.trusted = trusted
        added = tokenizer.added_tokens_decoder.items()
        self.tokens = {token.content: int(number) for number, token in added if is_control(token)}
        """Ids by text."""
        self.ids = frozenset(self.tokens.values())
        self.pattern = one_of(self.tokens)
        self.normalised = has_normaliser(tokenizer) and any(token.normalized for _, token in added if is_control(token))
        """Whether a text may become a control token only once it is normalised."""
        ends = {letter for text in self.tokens for letter in (text[0], text[-1])}
        self.edges = frozenset(letter for letter in ends if not letter.isalnum())
        words = [text for text in self.tokens if text[0] not in self.edges or text[-1] not in self.edges]
        self.suspicious = re.compile("|".join([*sorted(map(re.escape, self.edges)), *map(re.escape, words)]) or "(?!)")
        harmless = {text for text in looked_for if not any(text in token or token in text for token in self.tokens)}
        self.tags = one_of([*self.tokens, *harmless])

    def find(self, text: str) -> list[str]:
        """The control tokens in a text, as the tokenizer would find them."""
        return self.pattern.findall(text)

    def may_matter(self, text: str) -> bool:
        """Whether a text has anything that could be part of a control token."""
        if self.trusted:
            return False
        odd = self.normalised and not text.isascii()
        return odd or self.suspicious.search(text) is not None

    def guards(self, texts: Sequence[str]) -> Guard | None:
        """Stand-ins for a conversation with these texts; None where nothing in them matters."""
        if not any(map(self.may_matter, texts)):
            return None
        letters = set(self.edges) | {text[0] for text in self.tokens}
        if self.normalised:
            letters |= {letter for text in texts for letter in text if is_look_alike(letter)}
        return Guard(self, dict(zip(sorted(letters), unused(texts, len(letters)), strict=True)))

    # ------------------------------------------------------------ tokens

    def encode(self, written: Written) -> Tokens:
        """The tokens of a text: the tokenizer's own, unless they have a control token that the template did not write.
        It is the text that is looked at first, because a tokenizer may read more into it than is written."""
        if written.text == written.guarded or self.trusted:
            return self.plain(written.text)
        if self.places(written.text) == self.places(written.guarded):
            tokens = self.plain(written.text)
            if not self.normalised or self.among(tokens) == self.among(self.plain(written.guarded)):
                return tokens
        return self.spelled(written)

    def plain(self, text: str) -> Tokens:
        """The tokens of a text as the tokenizer has them, control tokens and all."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def places(self, text: str) -> list[tuple[int, str]]:
        """Where control tokens stand in a text, also those that overlap."""
        places = []
        found = self.pattern.search(text)
        while found is not None:
            places.append((found.start(), found[0]))
            found = self.pattern.search(text, found.start() + 1)
        return places

    def among(self, tokens: Tokens) -> list[int]:
        return [token for token in tokens.tolist() if token in self.ids]

    def spelled(self, written: Written) -> Tokens:
        """The tokens of a text in which only the template's control tokens are any."""
        parts: list[str] = []
        place = 0
        wanted = list(self.pattern.finditer(written.guarded))
        for found in wanted:
            parts += [written.text[place : found.start()], found[0]]
            place = found.end()
        parts.append(written.text[place:])
        tokens = self.renamed.encode(parts) if self.renamed is not None else self.encode_apart(parts)
        if self.among(tokens) != [self.tokens[found[0]] for found in wanted]:
            raise ValueError(CANNOT_SPELL)
        return tokens

    def encode_apart(self, parts: Sequence[str]) -> Tokens:
        """For tokenizers that are no `tokenizers.Tokenizer`: every second part is a control token."""
        found: list[int] = []
        for place, part in enumerate(parts):
            if place % 2:
                found.append(self.tokens[part])
            else:
                found += self.tokenizer.encode(part, add_special_tokens=False, split_special_tokens=True)
        return np.array(found, np.int32)

    @cached_property
    def renamed(self) -> Renamed | None:
        """Made when it is first needed, which for most runs is never."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return None if backend is None else Renamed(backend.to_str(), self.tokens)


class Guard:
    """The stand-ins of one conversation."""

    def __init__(self, control: ControlTokens, stand_ins: dict[str, str]) -> None:
        self.control = control
        self.there = str.maketrans(stand_ins)
        self.back = str.maketrans({put: letter for letter, put in stand_ins.items()})
        self.escaped = {json.dumps(put)[1:-1]: put for put in stand_ins.values()}
        self.letters = re.compile("|".join(map(re.escape, sorted(stand_ins.keys() - words_of(stand_ins)))) or "(?!)")

    def text(self, text: str, spared: Collection[str] = ()) -> str:
        """A text with stand-ins; control tokens that are spared stay, and tags that mean something to the template
        only."""
        control = self.control
        if not control.may_matter(text):
            return text
        parts: list[str] = []
        kept: set[int] = set()
        place = 0
        for found in control.tags.finditer(text):
            parts.append(self.letters.sub(self.put, text[place : found.start()]))
            tag, place = found[0], found.end()
            if tag not in control.tokens or tag in spared:
                kept.add(found.start())
                parts.append(tag)
            else:
                parts.append(tag[0].translate(self.there) + self.letters.sub(self.put, tag[1:]))
        parts.append(self.letters.sub(self.put, text[place:]))
        guarded = list("".join(parts))
        for start, _ in control.places("".join(guarded)):
            if start not in kept:
                guarded[start] = guarded[start].translate(self.there)
        return "".join(guarded)

    def put(self, found: re.Match[str]) -> str:
        return found[0].translate(self.there)

    def value(self, value: Any) -> Any:
        """A JSON value with stand-ins in all its strings."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in value.items()}
        return value

    def message(self, message: Message, spared: Collection[str]) -> Message:
        """A message with stand-ins; the assistant's own words may have the control tokens that are spared."""
        own = spared if message.role == "assistant" else ()
        calls = tuple(ToolCall(self.text(call.name), self.value(dict(call.arguments))) for call in message.calls)
        return Message(
            self.text(message.role), self.text(message.content, own), self.text(message.thinking, own), calls
        )

    def tool(self, tool: ToolSpec) -> ToolSpec:
        return ToolSpec(tool.name, self.text(tool.description), self.value(dict(tool.parameters)))

    def written(self, guarded: str) -> Written:
        """What was rendered, with the characters back in. Templates that write JSON in ASCII write stand-ins so too."""
        for escaped, put in self.escaped.items():
            if escaped in guarded:
                guarded = guarded.replace(escaped, put)
        return Written(guarded.translate(self.back), guarded)


class Renamed:
    """A copy of a tokenizer in which control tokens have names that nobody knows: a text that spells one is text, and
    everything else is as it was, down to the white space that a token takes along."""

    def __init__(self, source: str, tokens: dict[str, int]) -> None:
        from tokenizers import Tokenizer

        made = json.loads(source)
        nonce = secrets.token_hex(8)
        self.names = {text: f"\U000f0000{nonce}.{place}\U000f0001" for place, text in enumerate(tokens)}
        numbers = {self.names.get(entry["content"], entry["content"]): entry["id"] for entry in made["added_tokens"]}
        for entry in made["added_tokens"]:
            entry["content"] = self.names.get(entry["content"], entry["content"])
        rename_in_model(made["model"], self.names)
        made |= {"post_processor": None, "truncation": None, "padding": None}
        self.backend = Tokenizer.from_str(json.dumps(made))
        moved = {self.backend.token_to_id(name): number for name, number in numbers.items()}
        self.numbers = np.arange(max([self.backend.get_vocab_size(), *moved, *moved.values()]) + 1, dtype=np.int32)
        for number, was in moved.items():
            self.numbers[number] = was

    def encode(self, parts: Sequence[str]) -> Tokens:
        """Tokens of a text in parts, of which every second is a control token."""
        text = "".join(self.names[part] if place % 2 else part for place, part in enumerate(parts))
        # The batched call lets other threads run meanwhile.
        [found] = self.backend.encode_batch([text], add_special_tokens=False)
        return np.asarray(self.numbers[np.array(found.ids, np.int64)], np.int32)


def rename_in_model(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename entries of a model's vocabulary, so that it cannot put a control token together out of its letters."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(text, text), *rest] for text, *rest in vocabulary]
    if "merges" in model:
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names.keys() & {"".join(pair), *pair}]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


def is_control(token: Any) -> bool:
    """Whether an added token is more than a word or white space that somebody gave a token of its own. What is a single
    character cannot be spelled in another way."""
    text: str = token.content
    if len(text) < 2 or not text.strip("▁ \t\r\n"):
        return False
    return bool(token.special) or not (text[0].isalnum() or text[-1].isalnum())


def has_normaliser(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and backend.normalizer is not None


def is_look_alike(letter: str) -> bool:
    """Whether normalising could make another punctuation mark of a character."""
    return not letter.isascii() and not letter.isalnum() and not letter.isspace()


def words_of(letters: Iterable[str]) -> set[str]:
    """Letters and digits: of these only the first of a control token gets a stand-in, not each of them."""
    return {letter for letter in letters if letter.isalnum()}


def one_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of the texts at the first place where there is one."""
    return re.compile("|".join(map(re.escape, sorted(set(texts), key=len, reverse=True))) or "(?!)")


def unused(texts: Sequence[str], size: int) -> list[str]:
    """Characters in order that occur in none of the texts, nor as JSON escapes; where they begin is nobody's to
    foresee, and a text that has very many of them is not worth the search."""
    start = secrets.randbelow(len(PRIVATE) // 2)
    tried = map(chr, PRIVATE[start : start + size + 1024])
    free = (one for one in tried if not any(one in text or json.dumps(one)[1:-1] in text for text in texts))
    found = list(islice(free, size))
    if len(found) < size:
        raise ValueError(NO_STAND_INS)
    return found


def texts_of(messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Iterator[str]:
    """All texts of a conversation."""
    for message in messages:
        yield from (message.role, message.content, message.thinking)
        for call in message.calls:
            yield from (call.name, call.text)
    for tool in tools:
        yield from (tool.name, tool.description, tool.text)

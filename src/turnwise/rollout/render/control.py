"""Control tokens, and how text that spells one stays text.

A control token comes from the chat template or from the model, never from the text of a message. So a conversation is
rendered with stand-ins for every character of its texts that could begin or end a control token. Whatever the template
does with a text, no control token can then come from it, alone or together with neighbouring text. All control tokens
in the rendering are the template's. Afterwards the original characters replace the stand-ins.

If the finished text then has control tokens that the template did not write, a copy of the tokenizer encodes it. In the
copy, control tokens have other names, and only the template's control tokens are written with those names.
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
from turnwise.pretrained import ChatTokenizer
from turnwise.rollout.render.codec import Codec
from turnwise.tokens import Tokens

PRIVATE = range(0xF0000, 0xFFFFE)
"""Private-use characters, which have no meaning."""
NO_STAND_INS = "a text has too many private-use characters to mark its control tokens; remove them from the text"
CANNOT_SPELL = (
    "this tokenizer cannot write a control token as text; remove it from the text, or set "
    "rollout.rendering.trust_text = true"
)


@dataclass(frozen=True, slots=True)
class GuardedText:
    """A text, and the same text with stand-ins for characters that must not be part of a control token.

    Example:
        GuardedText("<s>[INST] what is <s>? [/INST]", "<s>[INST] what is \\U000f1234s\\U000f1235? [/INST]")
    """

    text: str
    guarded: str
    """Has the same length as the text."""

    def after(self, size: int) -> GuardedText:
        """The text after the first `size` characters."""
        return GuardedText(self.text[size:], self.guarded[size:])

    def before(self, size: int) -> GuardedText:
        """The first `size` characters."""
        return GuardedText(self.text[:size], self.guarded[:size])


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and the added tokens that look like a tag.

    An added token that is a word or white space is ordinary text. With `trusted`, texts may have control tokens: the
    tokenizer reads them as usual.
    """

    def __init__(self, tokenizer: ChatTokenizer, looked_for: Iterable[str] = (), *, trusted: bool = False) -> None:
        self.tokenizer = tokenizer
        self.codec = Codec(tokenizer)
        self.trusted = trusted
        added = tokenizer.added_tokens_decoder.items()
        self.tokens = {token.content: int(number) for number, token in added if is_control(token)}
        """Ids by text."""
        self.ids = frozenset(self.tokens.values())
        self.pattern = one_of(self.tokens)
        self.normalised = has_normaliser(tokenizer) and any(token.normalized for _, token in added if is_control(token))
        """Whether normalisation can turn a text into a control token."""
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
        """Whether a text has a character that could be part of a control token."""
        if self.trusted:
            return False
        odd = self.normalised and not text.isascii()
        return odd or self.suspicious.search(text) is not None

    def guards(self, texts: Sequence[str]) -> Guard | None:
        """Stand-ins for a conversation with these texts; None if it needs none."""
        if not any(map(self.may_matter, texts)):
            return None
        letters = set(self.edges) | {text[0] for text in self.tokens}
        if self.normalised:
            letters |= {letter for text in texts for letter in text if is_look_alike(letter)}
        return Guard(self, dict(zip(sorted(letters), unused(texts, len(letters)), strict=True)))

    # ------------------------------------------------------------ tokens

    def encode(self, written: GuardedText) -> Tokens:
        """The tokens of a text as the tokenizer gives them, unless they have a control token that the template did not
        write. The comparison is on the text first, because a normalising tokenizer may find more control tokens."""
        if written.text == written.guarded or self.trusted:
            return self.plain(written.text)
        if self.positions(written.text) == self.positions(written.guarded):
            tokens = self.plain(written.text)
            if not self.normalised or self.among(tokens) == self.among(self.plain(written.guarded)):
                return tokens
        return self.spelled(written)

    def plain(self, text: str) -> Tokens:
        """The tokens of a text as the tokenizer gives them, including control tokens."""
        return self.codec.encode(text)

    def positions(self, text: str) -> list[tuple[int, str]]:
        """The positions and texts of control tokens in a text, including those that overlap."""
        positions = []
        match = self.pattern.search(text)
        while match is not None:
            positions.append((match.start(), match[0]))
            match = self.pattern.search(text, match.start() + 1)
        return positions

    def among(self, tokens: Tokens) -> list[int]:
        return [token for token in tokens.tolist() if token in self.ids]

    def spelled(self, written: GuardedText) -> Tokens:
        """The tokens of a text in which only the template's control tokens are control tokens."""
        parts: list[str] = []
        start = 0
        matches = list(self.pattern.finditer(written.guarded))
        for match in matches:
            parts += [written.text[start : match.start()], match[0]]
            start = match.end()
        parts.append(written.text[start:])
        tokens = self.renamed.encode(parts) if self.renamed is not None else self.encode_apart(parts)
        if self.among(tokens) != [self.tokens[match[0]] for match in matches]:
            raise ValueError(CANNOT_SPELL)
        return tokens

    def encode_apart(self, parts: Sequence[str]) -> Tokens:
        """The tokens of parts, of which every second is a control token; for tokenizers without a Rust backend."""
        ids: list[int] = []
        for index, part in enumerate(parts):
            if index % 2:
                ids.append(self.tokens[part])
            else:
                ids += self.tokenizer.encode(part, add_special_tokens=False, split_special_tokens=True)
        return np.array(ids, np.int32)

    @cached_property
    def renamed(self) -> Renamed | None:
        """The copy of the tokenizer. It is made on first use; most runs never need it."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return None if backend is None else Renamed(backend.to_str(), self.tokens)


class Guard:
    """The stand-ins of one conversation."""

    def __init__(self, control: ControlTokens, stand_ins: dict[str, str]) -> None:
        self.control = control
        self.to_stand_ins = str.maketrans(stand_ins)
        self.from_stand_ins = str.maketrans({put: letter for letter, put in stand_ins.items()})
        self.escaped = {json.dumps(put)[1:-1]: put for put in stand_ins.values()}
        self.letters = re.compile("|".join(map(re.escape, sorted(stand_ins.keys() - words_of(stand_ins)))) or "(?!)")

    def text(self, text: str, spared: Collection[str] = ()) -> str:
        """A text with stand-ins. Spared control tokens stay, and so do tags that only the template looks for."""
        control = self.control
        if not control.may_matter(text):
            return text
        parts: list[str] = []
        starts_kept: set[int] = set()
        position = 0
        for match in control.tags.finditer(text):
            parts.append(self.letters.sub(self.put, text[position : match.start()]))
            tag, position = match[0], match.end()
            if tag not in control.tokens or tag in spared:
                starts_kept.add(match.start())
                parts.append(tag)
            else:
                parts.append(tag[0].translate(self.to_stand_ins) + self.letters.sub(self.put, tag[1:]))
        parts.append(self.letters.sub(self.put, text[position:]))
        guarded = list("".join(parts))
        for start, _ in control.positions("".join(guarded)):
            if start not in starts_kept:
                guarded[start] = guarded[start].translate(self.to_stand_ins)
        return "".join(guarded)

    def put(self, match: re.Match[str]) -> str:
        return match[0].translate(self.to_stand_ins)

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
        """A message with stand-ins; an assistant's message may have the spared control tokens."""
        allowed = spared if message.role == "assistant" else ()
        calls = tuple(ToolCall(self.text(call.name), self.value(dict(call.arguments))) for call in message.calls)
        return Message(
            self.text(message.role), self.text(message.content, allowed), self.text(message.thinking, allowed), calls
        )

    def tool(self, tool: ToolSpec) -> ToolSpec:
        return ToolSpec(tool.name, self.text(tool.description), self.value(dict(tool.parameters)))

    def written(self, guarded: str) -> GuardedText:
        """The rendered text with the original characters. Some templates write JSON in ASCII and escape stand-ins."""
        for escaped, put in self.escaped.items():
            if escaped in guarded:
                guarded = guarded.replace(escaped, put)
        return GuardedText(guarded.translate(self.from_stand_ins), guarded)


class Renamed:
    """A copy of a tokenizer in which control tokens have random names: text that spells the old name stays text, and
    everything else is unchanged, including the white space that a token strips."""

    def __init__(self, source: str, tokens: dict[str, int]) -> None:
        from tokenizers import Tokenizer

        copy = json.loads(source)
        nonce = secrets.token_hex(8)
        self.names = {text: f"\U000f0000{nonce}.{index}\U000f0001" for index, text in enumerate(tokens)}
        numbers = {self.names.get(entry["content"], entry["content"]): entry["id"] for entry in copy["added_tokens"]}
        for entry in copy["added_tokens"]:
            entry["content"] = self.names.get(entry["content"], entry["content"])
        rename_in_model(copy["model"], self.names)
        copy |= {"post_processor": None, "truncation": None, "padding": None}
        self.backend = Tokenizer.from_str(json.dumps(copy))
        new_ids = {self.backend.token_to_id(name): number for name, number in numbers.items()}
        self.numbers = np.arange(max([self.backend.get_vocab_size(), *new_ids, *new_ids.values()]) + 1, dtype=np.int32)
        for number, old_id in new_ids.items():
            self.numbers[number] = old_id

    def encode(self, parts: Sequence[str]) -> Tokens:
        """Tokens of a text in parts, of which every second is a control token."""
        text = "".join(self.names[part] if index % 2 else part for index, part in enumerate(parts))
        # The batched call releases the GIL, so other threads run meanwhile.
        [encoding] = self.backend.encode_batch([text], add_special_tokens=False)
        return np.asarray(self.numbers[np.array(encoding.ids, np.int64)], np.int32)


def rename_in_model(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename entries of a model's vocabulary, so that it cannot merge letters into a control token."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(text, text), *scores] for text, *scores in vocabulary]
    if "merges" in model:
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names.keys() & {"".join(pair), *pair}]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


def is_control(token: Any) -> bool:
    """Whether an added token is a control token: not a word, and not white space. A single character is not one,
    because it cannot be encoded in another way."""
    text: str = token.content
    if len(text) < 2 or not text.strip("▁ \t\r\n"):
        return False
    return bool(token.special) or not (text[0].isalnum() or text[-1].isalnum())


def has_normaliser(tokenizer: ChatTokenizer) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and backend.normalizer is not None


def is_look_alike(letter: str) -> bool:
    """Whether normalisation could turn a character into another punctuation mark."""
    return not letter.isascii() and not letter.isalnum() and not letter.isspace()


def words_of(letters: Iterable[str]) -> set[str]:
    """The letters and digits. Only the first letter of a control token gets a stand-in, not every such letter."""
    return {letter for letter in letters if letter.isalnum()}


def one_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of the texts, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(set(texts), key=len, reverse=True))) or "(?!)")


def unused(texts: Sequence[str], size: int) -> list[str]:
    """`size` characters that occur in none of the texts, nor as JSON escapes. They begin at a random one, so nobody can
    predict them. Texts with very many private-use characters are refused."""
    start = secrets.randbelow(len(PRIVATE) // 2)
    tried = map(chr, PRIVATE[start : start + size + 1024])
    free = (
        character
        for character in tried
        if not any(character in text or json.dumps(character)[1:-1] in text for text in texts)
    )
    characters = list(islice(free, size))
    if len(characters) < size:
        raise ValueError(NO_STAND_INS)
    return characters


def texts_of(messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Iterator[str]:
    """All texts of a conversation."""
    for message in messages:
        yield from (message.role, message.content, message.thinking)
        for call in message.calls:
            yield from (call.name, call.text)
    for tool in tools:
        yield from (tool.name, tool.description, tool.text)

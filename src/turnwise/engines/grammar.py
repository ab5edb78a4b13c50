"""A grammar: the form that an action must have. A value, which knows nothing of tokens or of the library that follows
it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LONGEST = 1 << 16
"""Characters of a grammar: larger ones take seconds to compile."""


class GrammarKind(StrEnum):
    """What the text of a grammar is written in."""

    json_schema = "json_schema"
    """A JSON schema: the action is a JSON value that fits it."""
    regex = "regex"
    """A regular expression that the whole action matches."""
    choice = "choice"
    """A JSON array of texts, one of which the action is."""
    lark = "lark"
    """A context-free grammar in Lark's syntax, or in GBNF's, whose first rule is called start or root."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that an action must have; hashable, because equal ones are compiled once.

    Example:
        Grammar(GrammarKind.regex, "(yes|no)[.]")
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", GrammarKind(self.kind))
        if not isinstance(self.text, str) or not self.text.strip():
            raise ValueError("a grammar is a text that is not empty")
        if len(self.text) > LONGEST:
            raise ValueError(f"a grammar has at most {LONGEST} characters, got {len(self.text)}; make it smaller")
        if "\0" in self.text or not is_unicode(self.text):
            raise ValueError("a grammar must not have a NUL or half of a surrogate pair")
        if self.kind is GrammarKind.choice:
            check_choices(self.text)

    @classmethod
    def of_schema(cls, schema: Any) -> Grammar:
        """The grammar of a JSON schema; true, or {}, allows any JSON value."""
        return cls(GrammarKind.json_schema, json.dumps(schema, ensure_ascii=False))

    @classmethod
    def of_choices(cls, texts: list[str]) -> Grammar:
        return cls(GrammarKind.choice, json.dumps(texts, ensure_ascii=False))


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_choices(text: str) -> None:
    try:
        choices = json.loads(text)
    except ValueError:
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise ValueError("choices are a JSON array of texts, none of them empty")


ANY_OBJECT = Grammar(GrammarKind.json_schema, '{"type": "object"}')
"""Any JSON object."""

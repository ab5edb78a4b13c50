"""Python literals in the text of a model: strings, numbers, names of constants, lists, tuples, sets and dictionaries.

`ast.parse` is not made for hostile text, and models write what it refuses: line breaks and unescaped quotes within
strings, whole numbers with leading zeros, JSON's names of constants.
"""

from __future__ import annotations

import re
from typing import Any

from turnwise.rollout.render.toolcalls import DEEPEST, Fault, is_text, real_number, skip_space, whole_number

CONSTANTS = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}
NUMBER = re.compile(r"[+-]?\s?(?:\d[\d_]{0,31}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,4})?")
WORD = re.compile(r"[A-Za-z_]\w*")
BARE = re.compile(r"[^\s,()\[\]{}'\"=]+(?: [^\s,()\[\]{}'\"=]+)*")
PREFIX = re.compile(r"[fFrRuU](?=['\"])")
AFTER_STRING = re.compile(r"\s*(?:[,)\]}:]|\Z|[A-Za-z_]\w*\s*=(?!=))")
AFTER_ARGUMENT = re.compile(r"\s*(?:,|\)\s*(?:[,;\]<]|\Z|[^\W\d][\w.\-]{0,127}\s{0,8}\()|[A-Za-z_]\w*\s*=(?!=))")
"""What may follow a string that is an argument of a call: the next argument, or the bracket that ends the call and then
the next call or the end of the list."""
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
LETTERS = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": "",
}  # fmt: skip


def read_literal(
    text: str, position: int, deepest: int = DEEPEST, *, bare: bool = False, after: re.Pattern[str] = AFTER_STRING
) -> tuple[Any, int]:
    """(the value at `position`, the position after it and the white space that follows). With `bare`, a word that is no
    literal is a string. `after` matches what may follow a string that is the whole value."""
    if not deepest:
        raise Fault("it is nested too deeply")
    position = skip_space(text, position)
    if prefix := PREFIX.match(text, position):
        position = prefix.end()
    letter = text[position : position + 1]
    value: Any
    if letter in ("'", '"'):
        value, position = read_string(text, position, after)
    elif letter == "{":
        value, position = read_braces(text, position + 1, deepest)
    elif letter in ("[", "("):
        value, position = read_items(text, position + 1, "]" if letter == "[" else ")", deepest)
    elif (word := WORD.match(text, position)) and word[0] in CONSTANTS:
        value, position = CONSTANTS[word[0]], word.end()
    elif number := NUMBER.match(text, position):
        value, position = number_of(number[0]), number.end()
    elif bare and (words := BARE.match(text, position)):
        value, position = words[0], words.end()
    else:
        raise Fault("a value is not a string, a number, a list or a dictionary")
    return value, skip_space(text, position)


def number_of(text: str) -> float | int:
    digits = text.replace("_", "").replace(" ", "")
    return real_number(digits) if {".", "e", "E"} & set(digits) else whole_number(digits)


def read_string(text: str, position: int, after: re.Pattern[str] = AFTER_STRING) -> tuple[str, int]:
    """The string whose quote is at `position`. A quote that no comma, bracket, colon or next argument follows belongs
    to the string: models forget to escape."""
    quote = text[position]
    if text.startswith(quote * 3, position):
        end = text.find(quote * 3, position + 3)
        if end < 0:
            raise Fault("a string does not end")
        return unescaped(text[position + 3 : end]), end + 3
    search = re.compile(rf"[{quote}\\]")
    place = position + 1
    while (found := search.search(text, place)) is not None:
        if found[0] == "\\":
            place = found.end() + 1
        elif after.match(text, found.end()):
            return unescaped(text[position + 1 : found.start()]), found.end()
        else:
            place = found.end()
    raise Fault("a string does not end")


def unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    value = ESCAPE.sub(lambda found: escape_of(*found.groups(default="")), text)
    if not is_text(value):
        # A pair of escapes for one character beyond the first plane, as JSON writes it.
        value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def escape_of(four: str, two: str, letter: str) -> str:
    return chr(int(four or two, 16)) if four or two else LETTERS.get(letter, "\\" + letter)


def read_items(text: str, position: int, closing: str, deepest: int) -> tuple[list[Any], int]:
    """The items of a list or tuple, down to its closing bracket."""
    items: list[Any] = []
    position = skip_space(text, position)
    while not text.startswith(closing, position):
        item, position = read_literal(text, position, deepest - 1)
        items.append(item)
        position = after_comma(text, position, closing)
    return items, position + 1


def read_braces(text: str, position: int, deepest: int) -> tuple[Any, int]:
    """A dictionary, or a set as a list."""
    fields: dict[str, Any] = {}
    items: list[Any] = []
    position = skip_space(text, position)
    while not text.startswith("}", position):
        key, position = read_literal(text, position, deepest - 1)
        if text.startswith(":", position):
            value, position = read_literal(text, position + 1, deepest - 1)
            if str(key) in fields:
                raise Fault("an object has the same key twice")
            fields[str(key)] = value
        else:
            items.append(key)
        position = after_comma(text, position, "}")
    if fields and items:
        raise Fault("a dictionary needs a value for every key")
    return items or fields, position + 1


def after_comma(text: str, position: int, closing: str) -> int:
    """The position of the next item, or of the closing bracket."""
    if text.startswith(",", position):
        return skip_space(text, position + 1)
    if text.startswith(closing, position):
        return position
    raise Fault(f"a comma or {closing} is missing")

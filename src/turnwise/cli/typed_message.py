"""A message that a person types or pastes: one line, or several."""

from __future__ import annotations

import re
from collections.abc import Callable

QUOTES = '"""'
OPENING, CLOSING = re.compile(r"<([A-Za-z_]\w*)(?:[=\s][^<>]*)?>"), re.compile(r"</([A-Za-z_]\w*)>")
STRING = re.compile(r'"(?:\\.|[^"\\])*"')

HOW = f"""A line is a message. Several lines: write {QUOTES} before the first and after the last."""
HOW_WITH_TOOLS = (
    f"{HOW}\nA tool call may be pasted as it is: it ends when its brackets and tags are closed, or with an empty line."
)


def read_message(read_line: Callable[[], str], *, has_tools: bool) -> str:
    """The next message. A text between quotes is taken as it is. Where there are tools, a call that is not complete
    goes on in the next line, until an empty one."""
    first = read_line()
    if first.lstrip().startswith(QUOTES):
        return quoted(first.lstrip().removeprefix(QUOTES), read_line)
    lines = [first]
    while has_tools and is_open("\n".join(lines)) and (line := read_line()).strip():
        lines.append(line)
    return "\n".join(lines)


def quoted(line: str, read_line: Callable[[], str]) -> str:
    """What is between quotes, without the line breaks after the first and before the last."""
    lines = [] if not line else [line]
    while not (lines and lines[-1].rstrip().endswith(QUOTES)):
        lines.append(read_line())
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines if lines[-1] else lines[:-1])


def is_open(text: str) -> bool:
    """Whether a bracket or a tag of a tool call is not closed yet. What is within strings of JSON does not count."""
    bare = STRING.sub("", text)
    if any(bare.count(left) > bare.count(right) for left, right in ("{}", "[]")):
        return True
    opened, closed = OPENING.findall(bare), CLOSING.findall(bare)
    return any(opened.count(tag) > closed.count(tag) for tag in opened)

"""Files of JSON lines: one value per line, with errors that name the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def numbered_lines(path: Path, what: str = "", advice: str = "") -> Iterator[tuple[int, str]]:
    """(number, text) of each line that is not empty; the first line is 1.

    ValueError if the file cannot be read, for instance "cannot read tasks from x.jsonl (No such file or directory)"
    with `what` = "tasks from ", followed by the advice."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {what}{path} ({error.strerror}){advice}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {what}{path}: it is not text: {error}") from None
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def parse_line(line: str, where: str) -> Any:
    """The value of a line; ValueError with where it stands if it is not JSON."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}, column {error.colno})") from None
    except ValueError:  # Python refuses numbers of thousands of digits
        raise ValueError(f"{where}: not JSON that can be read (a number is too long)") from None
    except RecursionError:
        raise ValueError(f"{where}: not JSON that can be read (it is nested too deeply)") from None

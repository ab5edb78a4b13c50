"""Values of a run as JSON for the page: long texts cut, numbers that JSON does not have left out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

TEXT_LIMIT = 20_000
"""Characters of a text that are sent with an attempt; the page asks for the rest."""


def clipped(text: str, part: str = "", limit: int = TEXT_LIMIT) -> dict[str, Any]:
    """The beginning of a text, its length, and the name by which the page can ask for the rest."""
    return {"text": text[:limit], "length": len(text), "part": part}


def number(value: float) -> float | None:
    """A number of six digits, or None where JSON has none such."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def numbers(values: Iterable[float]) -> list[float | None]:
    return [number(value) for value in values]


def as_bytes(value: Any) -> bytes:
    """JSON in UTF-8. A lone surrogate, which has no UTF-8, is written as an escape."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()

"""Arrays of tokens: read-only ones, their common prefixes, and turns packed into one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]


class Prompted(Protocol):
    """A prompt and the action that followed it; a `Turn` is one."""

    @property
    def prompt(self) -> Tokens: ...

    @property
    def action(self) -> Tokens: ...


def is_frozen(array: NDArray[Any]) -> bool:
    """Whether nobody can write to an array, through it or through what it is a view of."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return False
        base = base.base
    return True


def frozen_array(values: Any, dtype: Any, what: str) -> NDArray[Any]:
    """A read-only one-dimensional array: the argument itself where it is one already, a copy otherwise."""
    if type(values) is np.ndarray and values.dtype == dtype and values.ndim == 1 and is_frozen(values):
        return values
    given = values if isinstance(values, np.ndarray) else np.array(values)
    if given.ndim != 1:
        raise ValueError(f"{what} must be one-dimensional, got shape {given.shape}")
    with np.errstate(over="ignore", invalid="ignore"):
        array = given.astype(dtype)
    if np.issubdtype(dtype, np.integer) and len(given) and not np.array_equal(array, given):
        raise ValueError(f"{what} must hold whole numbers of {np.dtype(dtype).itemsize * 8} bits")
    array.flags.writeable = False
    return array


def common_prefix(one: Tokens, other: Tokens) -> int:
    """How many tokens two arrays begin with alike."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


def pack_tokens(turns: Sequence[Prompted]) -> tuple[Tokens, NDArray[np.int64]]:
    """One token buffer and, per turn, [start, end of prompt, end of action] in it.

    A turn whose prompt begins with the whole turn before it continues that turn's place in the buffer, so a
    history that only grew is stored once.
    """
    spans = np.zeros((len(turns), 3), np.int64)
    parts: list[Tokens] = []
    size = 0
    start = 0
    for index, turn in enumerate(turns):
        before = turns[index - 1] if index else None
        if before is None or not extends(turn, before):
            start, parts_of_turn = size, [turn.prompt, turn.action]
        else:
            parts_of_turn = [turn.prompt[len(before.prompt) + len(before.action) :], turn.action]
        parts.extend(parts_of_turn)
        size += sum(len(part) for part in parts_of_turn)
        spans[index] = start, size - len(turn.action), size
    buffer = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    buffer.flags.writeable = False
    return buffer, spans


def extends(turn: Prompted, before: Prompted) -> bool:
    """Whether the prompt of `turn` begins with the prompt and action of `before`."""
    p, a = len(before.prompt), len(before.action)
    if len(turn.prompt) < p + a:
        return False
    if is_same_place(turn.prompt, before.prompt) and is_same_place(turn.prompt[p:], before.action):
        return True
    return np.array_equal(turn.prompt[:p], before.prompt) and np.array_equal(turn.prompt[p : p + a], before.action)


def is_same_place(one: Tokens, other: Tokens) -> bool:
    """Whether two arrays begin at the same place in memory, and need not be compared: turns of one buffer do."""
    if one.strides != other.strides or one.dtype != other.dtype:
        return False
    first: int = one.__array_interface__["data"][0]
    second: int = other.__array_interface__["data"][0]
    return first == second


def lost_tokens(turn: Prompted, before: Prompted) -> int:
    """Tokens of the turn before, prompt and action, that the prompt of `turn` does not begin with."""
    known = np.concatenate([before.prompt, before.action])
    return len(known) - common_prefix(known, turn.prompt)

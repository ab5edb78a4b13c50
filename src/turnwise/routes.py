"""Routes: which experts of a mixture each token took, in each layer that has a router.

A token has a route once a model has read it. The last token of an action was sampled and not read: its route exists
only where a later prompt has it. So the n routes of a turn are those of the n tokens before its last one, and `n` says
where they begin. Letters: n tokens, L routers, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from turnwise.tokens import Prompted, common_prefix, is_frozen

Routes = NDArray[Any]
"""[n, L, k] numbers of experts, in the order in which the router took them. 8 bits where a model has up to 256 experts,
16 where it has more."""
LARGEST = 256
"""Experts that 8 bits tell apart."""


class Routed(Prompted, Protocol):
    """A prompt, an action and their routes; a `Turn` is one."""

    @property
    def routes(self) -> Routes | None: ...


def route_dtype(num_experts: int) -> type[np.uint8] | type[np.uint16]:
    return np.uint8 if num_experts <= LARGEST else np.uint16


def frozen_routes(values: Any) -> Routes:
    """A read-only array of routes: the argument itself where it is one already, a copy otherwise."""
    given: NDArray[Any] = np.asarray(values)
    if given.ndim != 3 or given.dtype.kind not in "iu" or 0 in given.shape[1:]:
        raise ValueError(f"routes are whole numbers [tokens, layers, experts], got {given.dtype} {given.shape}")
    if given.dtype not in (np.uint8, np.uint16):
        if given.size and not 0 <= given.min() <= given.max() < 1 << 16:
            raise ValueError("the number of an expert has 16 bits and no sign")
        given = given.astype(route_dtype(int(given.max(initial=0)) + 1))
    kept: Routes = given
    if given is values and is_frozen(given) and given.flags.c_contiguous:
        return kept
    copy: Routes = given.copy()
    copy.flags.writeable = False
    return copy


def first_new(prompt: Any, before: Routed | None) -> int:
    """The first token of a prompt whose route the turn before has not: where it breaks, or that turn's last token."""
    if before is None or before.routes is None:
        return 0
    known = np.concatenate([before.prompt, before.action])[:-1]
    return common_prefix(known, np.asarray(prompt))


def without_known(turn: Routed, before: Routed | None) -> Routes | None:
    """The routes of a turn without those of tokens that the turn before has."""
    if turn.routes is None:
        return None
    num_routed = len(turn.prompt) + len(turn.action) - 1
    new = num_routed - first_new(np.concatenate([turn.prompt, turn.action])[:num_routed], before)
    if len(turn.routes) <= new:
        return turn.routes
    return frozen_routes(turn.routes[len(turn.routes) - new :].copy())


def pack_routes(turns: Sequence[Routed]) -> tuple[Routes | None, list[int]]:
    """(the routes of all turns, one after another, how many each has; -1 where it has None)."""
    found: list[NDArray[Any]] = [turn.routes for turn in turns if turn.routes is not None]
    counts = [-1 if turn.routes is None else len(turn.routes) for turn in turns]
    return (np.concatenate(found) if found else None), counts


def unpack_routes(buffer: Routes | None, counts: Sequence[int]) -> list[Routes | None]:
    """Inverse of `pack_routes`: views of one buffer."""
    if buffer is None:
        return [None] * len(counts)
    buffer.flags.writeable = False
    ends = np.cumsum(np.maximum(counts, 0)).tolist()
    return [buffer[end - count : end] if count >= 0 else None for end, count in zip(ends, counts, strict=True)]

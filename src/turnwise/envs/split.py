"""Which split a task belongs to: a property of its content, so that no seed can leak a held-out task into training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

from turnwise.types import Task

HELDOUT_SHARE = 0.2
SPLITS = ("train", "heldout")


def draw_tasks(
    dataset: str,
    split: str,
    count: int,
    seed: int,
    draw: Callable[[Random], Mapping[str, Any]],
    decides: Callable[[Mapping[str, Any]], Any] = lambda data: data,
    is_same: Callable[[Mapping[str, Any]], Any] = lambda data: data,
) -> Iterator[Task]:
    """`count` different tasks of a split, drawn by a seeded generator.

    What `decides` gives of a task, JSON values, decides its split: what one split has, the other has not. Tasks are the
    same where `is_same` gives the same. Raises ValueError where the generator cannot make that many.
    """
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}; choose one of {', '.join(SPLITS)}")
    random = Random(f"{dataset}/{split}/{seed}")
    seen: set[str] = set()
    misses = 0
    while len(seen) < count:
        data = draw(random)
        is_heldout = digest_of(decides(data))[0] < HELDOUT_SHARE * 256
        name = f"{dataset}-{digest_of(is_same(data)).hex()}"
        if is_heldout != (split == "heldout") or name in seen:
            misses += 1
            if misses > 1000 + 20 * count:
                raise ValueError(
                    f"{dataset} has fewer than {count} different {split} tasks with these settings; ask for less"
                )
            continue
        seen.add(name)
        yield Task(name, dataset, data)


def is_heldout(entity: str) -> bool:
    """Whether all questions about an entity are held out."""
    return hashlib.blake2b(entity.encode(), digest_size=8).digest()[0] < HELDOUT_SHARE * 256


def digest_of(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).digest()

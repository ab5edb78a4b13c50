"""The warm start: imitation of demonstrations before training, made once and kept in the user's cache."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from turnwise.atomic import remove_folder
from turnwise.data.cache import cache_folder, check_folder
from turnwise.learn.learner import save_policy
from turnwise.pretrained import CausalLM, ChatTokenizer
from turnwise.runs.archive import Record
from turnwise.runs.checksums import Damaged
from turnwise.runs.screen import Screen
from turnwise.training.loop import LoopParts, Progress, Waiting, train

PREFIX = "warm-"
MADE = "warm_start.json"
"""When a cached warm start was made, and of what."""
SHOWN = 3


class Stopped(Exception):
    """A person asked the run to stop before there was anything to checkpoint."""


async def imitate(
    parts: LoopParts, screen: Screen, stop: asyncio.Event, sum_up_failures: Callable[[str], None]
) -> Mapping[str, Any]:
    """Train on demonstrations: the weights that come of it. Raises Stopped where `stop` is set before the end."""
    screen.begin("warm start", parts.settings.steps)

    async def after(progress: Progress, metrics: dict[str, float], records: list[Record], waiting: Waiting) -> None:
        sum_up_failures(f"demonstrations of update {progress.step}")
        screen.show(progress.step, {"loss": metrics["loss"]})

    progress = Progress()
    try:
        await train(parts, progress, after, stop)
    finally:
        screen.end()
    if progress.step < parts.settings.steps:
        raise Stopped
    return parts.learner.publish()


# ---------------------------------------------------------------- the cache


def is_usable(folder: Path, screen: Screen) -> bool:
    """Whether a cached warm start is there and as it was written; a damaged one is removed."""
    if not folder.is_dir():
        return False
    try:
        check_folder(folder)
    except Damaged as error:
        screen.say(f"warm start: {error}; it is made again")
        with suppress(FileNotFoundError):
            remove_folder(folder)
        return False
    return True


def save(model: CausalLM, tokenizer: ChatTokenizer, provenance: Mapping[str, Any], folder: Path) -> None:
    """Write a warm start, and what it is made of."""
    save_policy(model, tokenizer, folder)
    made = {"made": datetime.now().astimezone().isoformat(timespec="seconds"), "of": provenance}
    (folder / MADE).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def when(folder: Path) -> str:
    """When a warm start was made, for people."""
    return for_people(json.loads((folder / MADE).read_text(encoding="utf-8"))["made"])


def for_people(moment: str) -> str:
    return moment[:16].replace("T", " ")


def what_changed(
    provenance: Mapping[str, Any], differences: Callable[[Mapping[str, Any], Mapping[str, Any]], list[str]]
) -> str:
    """Why the newest cached warm start of the same recipe is not the one that is wanted; nothing where there is
    none."""
    newest: tuple[str, Mapping[str, Any]] = ("", {})
    for path in cache_folder().glob(f"{PREFIX}*/{MADE}"):
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
            if written["of"]["recipe"] == provenance["recipe"]:
                newest = max(newest, (written["made"], written["of"]), key=lambda candidate: candidate[0])
        except (OSError, ValueError, KeyError, TypeError):  # a damaged one is nobody's reason
            continue
    if not newest[0] or not (changed := differences(newest[1], provenance)):
        return ""
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return f"that of {for_people(newest[0])} is not used; changed since: {', '.join(changed[:SHOWN])}{more}"

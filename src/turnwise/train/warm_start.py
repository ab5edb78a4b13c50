"""The warm start: imitation of demonstrations before training, made once and kept in the user's cache."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.assemble.provenance import differences, fingerprint_of, provenance
from turnwise.assemble.run import build_sft, model_and_tokenizer
from turnwise.atomic import remove_folder
from turnwise.cli.terminal import Screen
from turnwise.data.cache import cache_folder, check_folder, made_again, made_once
from turnwise.learn.learner import save_policy
from turnwise.recipe.schema import Recipe
from turnwise.runs.archive import Record
from turnwise.runs.checksums import Damaged
from turnwise.train.loop import Progress, Waiting, train

PREFIX = "warm-"
MADE = "warm_start.json"
"""When a cached warm start was made, and of what."""
SHOWN = 3


class Stopped(Exception):
    """A person asked the run to stop before there was anything to checkpoint."""


async def warm_model(recipe: Recipe, screen: Screen, seconds: dict[str, float], stop: asyncio.Event) -> tuple[Any, Any]:
    """The model that training starts from: as it is, or after the warm start, which is made once and cached."""
    if not recipe.sft.updates:
        return await model_and_tokenizer(recipe)
    made_of = provenance(recipe)
    folder = cache_folder() / f"{PREFIX}{fingerprint_of(made_of)}"
    if is_usable(folder, recipe, screen):
        screen.say(f"warm start: from {folder}, made {when(folder)}; sft.remake=true makes it again")
        return await model_and_tokenizer(recipe, folder)
    if reason := what_changed(made_of):
        screen.say(f"warm start: {reason}")
    began = time.perf_counter()
    model, tokenizer = await model_and_tokenizer(recipe)
    await imitate(recipe, model, tokenizer, screen, stop)
    write = made_again if recipe.sft.remake else made_once
    write(folder, partial(save, model, tokenizer, made_of))
    seconds["warm_start"] = time.perf_counter() - began
    return model, tokenizer


def is_usable(folder: Path, recipe: Recipe, screen: Screen) -> bool:
    """Whether a cached warm start is there, wanted, and as it was written; one that is damaged is removed."""
    if recipe.sft.remake or not folder.is_dir():
        return False
    try:
        check_folder(folder)
    except Damaged as error:
        screen.say(f"warm start: {error}; it is made again")
        with suppress(FileNotFoundError):
            remove_folder(folder)
        return False
    return True


def save(model: Any, tokenizer: Any, made_of: dict[str, Any], folder: Path) -> None:
    """Write a warm start, and what it is made of."""
    save_policy(model, tokenizer, folder)
    told = {"made": datetime.now().astimezone().isoformat(timespec="seconds"), "of": made_of}
    (folder / MADE).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def when(folder: Path) -> str:
    """When a warm start was made, for people."""
    return for_people(json.loads((folder / MADE).read_text(encoding="utf-8"))["made"])


def for_people(moment: str) -> str:
    return moment[:16].replace("T", " ")


def what_changed(made_of: dict[str, Any]) -> str:
    """Why the newest cached warm start of the same recipe is not the one that is wanted; nothing where there is
    none."""
    newest: tuple[str, dict[str, Any]] = ("", {})
    for path in cache_folder().glob(f"{PREFIX}*/{MADE}"):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            if told["of"]["recipe"] == made_of["recipe"]:
                newest = max(newest, (told["made"], told["of"]), key=lambda found: found[0])
        except (OSError, ValueError, KeyError, TypeError):  # a damaged one is nobody's reason
            continue
    if not newest[0] or not (found := differences(newest[1], made_of)):
        return ""
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"that of {for_people(newest[0])} is not used; changed since: {', '.join(found[:SHOWN])}{more}"


async def imitate(recipe: Recipe, model: Any, tokenizer: Any, screen: Screen, stop: asyncio.Event) -> None:
    """Train a model in place on demonstrations. Raises Stopped where `stop` is set before the end."""
    parts = build_sft(recipe, model, tokenizer)
    screen.begin("warm start", parts.settings.steps)

    async def after(progress: Progress, metrics: dict[str, float], records: list[Record], waiting: Waiting) -> None:
        parts.failures.sum_up(f"demonstrations of update {progress.step}")
        screen.show(progress.step, {"loss": metrics["loss"]})

    progress = Progress()
    try:
        await train(parts.settings, parts.stages, parts.learner, parts.engine, parts.tasks, progress, after, stop)
        model.load_state_dict(parts.learner.publish())  # which may have learned elsewhere
    finally:
        screen.end()
        parts.close()
    if progress.step < parts.settings.steps:
        raise Stopped

"""Functions that run the micro recipe and commands, for tests of whole runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from turnwise.assemble import run
from turnwise.cli.commands import main
from turnwise.cli.terminal import PlainScreen
from turnwise.recipe.parse import load_recipe
from turnwise.recipe.schema import Recipe
from turnwise.schedule.run_loop import RunLoop
from turnwise.testing.micro import MICRO

Result = TypeVar("Result")


class SilentScreen(PlainScreen):
    """Keeps what is said instead of printing it."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def show(self, done: int, metrics: Any) -> None:
        return None


def micro_toml(folder: Path, text: str = MICRO) -> Path:
    path = folder / "micro.toml"
    path.write_text(text)
    return path


def micro_recipe(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(micro_toml(folder), [f"out={folder / 'run'}", *overrides])


def train_once(folder: Path, *overrides: str) -> Path:
    """Train the micro recipe in a folder with a separate cache, for fixtures of a module; returns the run folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_CACHE", str(folder / "cache"))
        train(micro_recipe(folder, *overrides))
    return folder / "run"


def train(recipe: Recipe, screen: PlainScreen | None = None) -> dict[str, Any] | None:
    async def work() -> dict[str, Any] | None:
        return await run.start(recipe, screen or SilentScreen(), asyncio.Event())

    return in_run_loop(work())


def resume(folder: Path) -> dict[str, Any] | None:
    async def work() -> dict[str, Any] | None:
        return await run.resume(folder, SilentScreen(), asyncio.Event())

    return in_run_loop(work())


def in_run_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of work in an event loop of the kind that runs have."""
    with asyncio.Runner(loop_factory=RunLoop) as runner:
        return runner.run(work)


def untimed(metrics: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file without what a clock has measured."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("seconds/", "speed/"))} for line in lines]


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistaken command prints."""
    assert main(list(arguments)) == 2
    printed = capsys.readouterr().err.strip()
    assert printed.startswith("turnwise: ")
    assert "\n" not in printed
    return printed


def unadvised(printed: str) -> list[str]:
    """The lines of what a run printed, without those that say what keeps it from learning: a micro run is cut short."""
    return [line for line in printed.splitlines() if not line.startswith("warning: step ")]

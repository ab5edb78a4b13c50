"""`turnwise.load_run`: a run as it was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.api.recipe_tree import RecipeTree
from turnwise.inspect.attempts import TRAINING, AttemptKey, AttemptRow, Query, file_of
from turnwise.inspect.recorded_attempt import RecordedAttempt
from turnwise.inspect.run_reader import RunReader
from turnwise.inspect.show import attempt_lines
from turnwise.recipe.arguments import check_arguments, suggest
from turnwise.recipe.parse import parse_recipe
from turnwise.runs.archive import Record, read_step
from turnwise.runs.checkpoint import checkpoint_path, latest_checkpoint, written_steps
from turnwise.runs.folder import RunFolder
from turnwise.types import Group, Trajectory


def load_run(path: str | Path) -> RunRecord:
    """The run in a folder, finished or under way. Nothing that its recipe names is run or imported."""
    return RunRecord(RunFolder.open(path))


class RunRecord:
    """A run as it was recorded: read when it is asked, so that a run that goes on is seen as it is now.

    Example:
        run = load_run("runs/quickstart")
        run.series("eval/sampled/success")
        print(run.text(run.attempts(limit=1)[0]))
    """

    def __init__(self, folder: RunFolder) -> None:
        self.path = folder.path
        self.folder = folder
        self.reader = RunReader(folder)

    def __repr__(self) -> str:
        lines = self.metrics
        return f"RunRecord({str(self.path)!r}, {'finished' if self.is_finished else 'not finished'}, step " + (
            f"{lines[-1]['step']})" if lines else "0)"
        )

    # ------------------------------------------------------------ what it is

    @property
    def recipe(self) -> RecipeTree:
        """The recipe with every key, as the run resolved it."""
        return RecipeTree.of(parse_recipe(self.folder.read_config(), str(self.folder.config), is_recorded=True))

    @property
    def summary(self) -> dict[str, Any]:
        """Held-out success before and after, seconds and updates; empty while the run goes on or was stopped."""
        return self.reader.summary

    @property
    def is_finished(self) -> bool:
        return bool(self.summary)

    @property
    def checkpoint(self) -> Path:
        """The folder of the last checkpoint, which transformers can load."""
        latest = latest_checkpoint(self.folder.checkpoints)
        if latest is None:
            raise ValueError(f"{self.path} has no checkpoint yet")
        return latest.path

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The folders of all checkpoints, by step."""
        return {step: checkpoint_path(self.folder.checkpoints, step) for step in written_steps(self.folder.checkpoints)}

    # ------------------------------------------------------------ metrics

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict per line of metrics.jsonl, with its step: what pandas.DataFrame takes."""
        self.reader.metrics.refresh()
        return [dict(line) for line in self.reader.metrics.lines]

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) wherever a metric has a finite value."""
        self.reader.metrics.refresh()
        if name not in self.reader.metrics.names:
            raise ValueError(f"{self.path} has no metric {name}{suggest(name, self.reader.metrics.names)}")
        return self.reader.metrics.series(name)

    # ------------------------------------------------------------ attempts

    def attempts(self, limit: int = 50, **query: Any) -> Sequence[AttemptRow]:
        """Rows of attempts, newest first: kind, step, reward, status, tokens. The keywords are those of
        `turnwise show`, for instance kind="train", min_reward=1.0, order="reward"."""
        self.reader.refresh()
        return self.reader.attempts.select(
            Query(**check_arguments("attempts", "attempts", Query, query)), limit=limit
        ).rows

    def attempt(self, key: AttemptKey | AttemptRow | str) -> RecordedAttempt:
        """One attempt with its trajectory, credit and token weights."""
        return self.reader.attempt(key_of(key))

    def text(self, key: AttemptKey | AttemptRow | str) -> str:
        """One attempt as a conversation, for people."""
        lines = attempt_lines(self.reader, key_of(key), tokens=False, everything=True)
        return "\n".join("".join(span.text for span in line) for line in lines)

    def records(self, step: int, kind: str = TRAINING) -> list[Record]:
        """The groups of a training step, with credit and token weights, or those of an evaluation by its kind: sampled
        or greedy."""
        return read_step(file_of(self.folder, kind, step))

    def groups(self, step: int, kind: str = TRAINING) -> list[Group]:
        """The groups of a training step, kept and dropped, or those of an evaluation by its kind."""
        return [record.group for record in self.records(step, kind)]

    def trajectories(self, step: int, kind: str = TRAINING) -> list[Trajectory]:
        """Every attempt of a step, those that failed too."""
        return [one for group in self.groups(step, kind) for one in (*group.trajectories, *group.failed)]


def key_of(key: AttemptKey | AttemptRow | str) -> AttemptKey:
    if isinstance(key, AttemptRow):
        return key.key
    return AttemptKey.parse(key) if isinstance(key, str) else key

"""The table of metrics against what runs write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.mixture import mixture_folder
from support.running import train
from turnwise.envs.base import Reply
from turnwise.envs.hops import Hops
from turnwise.messages import Message
from turnwise.recipe.parse import load_recipe
from turnwise.runs.checkpoint import checkpoint_path
from turnwise.runs.folder import RunFolder
from turnwise.runs.metric_names import METRICS, metric_of
from turnwise.runs.tracker import read_metrics
from turnwise.testing.micro import MICRO

FILE_KEYS = {"step", "nonfinite"}
FEW = ["steps=2", "groups_per_step=2", "sft.updates=2", "evaluation.tasks=2", "evaluation.final_tasks=2"]


class HopsOfTools(Hops):
    """Hops with batched calls, which reports an error inside a tool."""

    @classmethod
    async def step_many(cls, environments: Sequence[Hops], messages: Sequence[Message]) -> list[Reply]:
        replies = [await hops.step(message) for hops, message in zip(environments, messages, strict=True)]
        return [replace(reply, marks={**reply.marks, "tools/get/errors": 1.0, "care": 0.5}) for reply in replies]

    @classmethod
    def close_many(cls, environments: Sequence[Hops]) -> list[None]:
        return [None for _ in environments]


SECOND = f"""
[[env]]
name = "{__name__}:HopsOfTools"
dataset = "batched"
tasks = {{ count = 64, links = [1, 2] }}
"""


def keys_of(folder: Path, *overrides: str) -> set[str]:
    """Every name that a small run in two environments writes."""
    recipe_file = folder / "micro.toml"
    recipe_file.write_text(MICRO.replace("[rollout]", f"{SECOND}[rollout]"))
    recipe = load_recipe(recipe_file, [*FEW, *overrides])
    assert train(recipe) is not None
    lines = read_metrics(RunFolder.open(Path(recipe.out)).metrics)
    return {key for line in lines for key in line} - FILE_KEYS


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What two runs of a mixture write: one that replays routes, and one with a teacher, a critic, a reference, a
    correction, tasks that rest and lag."""
    folder = tmp_path_factory.mktemp("runs")
    mixture = [f"model.path={mixture_folder(folder / 'mixture')}", "model.hidden=", "model.layers="]
    plain = keys_of(folder, f"out={folder / 'plain'}", "env.0.dataset=hops", *mixture, "model.router_replay=true")
    with_everything = [
        f"out={folder / 'rich'}",
        f"teacher={checkpoint_path(RunFolder.open(folder / 'plain').checkpoints, 2)}",
        "distill.coefficient=0.1",
        "credit.name=gae",
        "kl.coefficient=0.1",
        "loss.anchor=learner",
        "correction.importance_sampling=token",
        "evaluation.attempts=2",
        "max_lag=1",
        "schedule.max_rest=1",
        *mixture,
    ]
    return plain | keys_of(folder, *with_everything)


def test_every_metric_of_a_run_is_in_the_table(written: set[str]) -> None:
    assert not sorted(key for key in written if metric_of(key) is None)


def test_no_row_of_the_table_is_dead(written: set[str]) -> None:
    rows = {metric.name for key in written if (metric := metric_of(key)) is not None}
    assert not sorted({metric.name for metric in METRICS} - rows)


def test_rows_that_evaluations_report_are_marked(written: set[str]) -> None:
    reported = {key.removeprefix("eval/sampled/") for key in written if key.startswith("eval/sampled/")}
    marked = {metric.name for metric in METRICS if metric.in_evaluations}
    assert marked == {metric.name for key in reported if (metric := metric_of(key)) is not None} & marked


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/hops", "reward/<dataset>"),
        ("eval/greedy/trajectory/turns", "trajectory/turns"),
        ("eval/sampled/hops/pass@4", "eval/<kind>/<dataset>/pass@<k>"),
        ("eval/sampled/lag/mean", None),
        ("made/up", None),
    ],
)
def test_a_key_finds_its_row(key: str, name: str | None) -> None:
    metric: Any = metric_of(key)
    assert (metric and metric.name) == name


def test_names_stand_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))

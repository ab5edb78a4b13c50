"""The best attempts of a run, chosen to be imitated: rejection sampling from what was recorded."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.assemble.provenance import provenance
from turnwise.data.digests import digest_of
from turnwise.pretrained import CausalLM, ChatTokenizer
from turnwise.recipe.schema import Recipe
from turnwise.runs.archive import Record, write_records
from turnwise.runs.origin import Origin
from turnwise.runs.recorded_archive import RecordedArchive, names_of_steps
from turnwise.training import warm_start
from turnwise.types import Group, Task, Trajectory

ATTEMPTS = "attempts.parquet"
"""The file with the attempts, in the folder of the model that imitates them."""


@dataclass(frozen=True, slots=True)
class BestAttempts:
    """Attempts of a run that were paid most, and the rule that chose them."""

    source: RecordedArchive
    per_task: int
    least: float
    """Attempts that were paid less are not among them."""
    chosen: Mapping[Task, tuple[Trajectory, ...]]
    """By task, in the order in which the run met them: its best attempts, the best first."""
    num_attempts: int
    """Attempts that were chosen from."""

    @property
    def num_chosen(self) -> int:
        return sum(map(len, self.chosen.values()))

    def describe(self) -> str:
        return (
            f"{self.num_chosen} of {self.num_attempts} attempts of {names_of_steps(self.source.steps)} of "
            f"{self.source.folder.path}, at {len(self.chosen)} tasks: at most {self.per_task} each, paid "
            f"{self.least:g} or more"
        )

    def write(self, path: Path) -> None:
        """Put the attempts into a file that `sft.data` can name, a group for each task."""
        groups = [Group(task, attempts) for task, attempts in self.chosen.items()]
        write_records(path, self.source.steps[-1], [Record(group, False) for group in groups])

    @property
    def rule(self) -> dict[str, Any]:
        """What chose them and of what, as JSON."""
        origin = asdict(Origin.of("best", self.source))
        return {**origin, "per_task": self.per_task, "min_reward": self.least, "attempts": self.num_chosen}


def choose_best(
    path: Path | str,
    per_task: int,
    least: float,
    step: int | None = None,
    *,
    source: RecordedArchive | None = None,
    kept: bool = False,
) -> BestAttempts:
    """The best attempts that a run made in training, at most so many at each task, paid `least` or more. Among equals
    the later one, which a better policy made. Held-out attempts are never among them, nor is the same attempt twice.
    `source` is the archive where it is open already; with `kept`, only groups that trained count."""
    if per_task < 1:
        raise ValueError(f"--best {per_task}: choose at least one attempt at each task")
    source = source or RecordedArchive.open(path, step)
    best: dict[Task, list[Trajectory]] = {}
    num_attempts = 0
    for number in source.steps:
        for record in source.read(number):
            attempts = record.group.trajectories if record.kept or not kept else ()
            num_attempts += len(attempts)
            paid = [one for one in attempts if one.total >= least and one.num_action_tokens]
            if paid:
                task = record.group.task
                best[task] = without_repeats([*paid, *best.get(task, ())])[:per_task]
    if not best:
        raise ValueError(f"none of {num_attempts} attempts of {path} was paid {least:g} or more; lower --min-reward")
    return BestAttempts(source, per_task, least, {task: tuple(found) for task, found in best.items()}, num_attempts)


def without_repeats(attempts: list[Trajectory]) -> list[Trajectory]:
    """Attempts by what they were paid, the highest first, each sequence of tokens once."""
    found: dict[tuple[bytes, ...], Trajectory] = {}
    for attempt in sorted(attempts, key=lambda one: -one.total):
        tokens = [np.concatenate([turn.prompt, [-1], turn.action]).astype(np.int32) for turn in attempt.turns]
        found.setdefault(tuple(array.tobytes() for array in tokens), attempt)
    return list(found.values())


def with_demonstrations(recipe: Recipe, file: Path) -> Recipe:
    """The recipe with these attempts in the place of other demonstrations."""
    if not recipe.sft.updates:
        raise ValueError("sft.updates is 0: there is nothing to train; set it in the recipe or with sft.updates=200")
    sft = recipe.sft.model_dump(exclude={"noise", "demonstrations"}) | {"data": str(file)}
    return recipe.model_copy(update={"sft": type(recipe.sft).model_validate(sft)})


def save_imitation(recipe: Recipe, best: BestAttempts, model: CausalLM, tokenizer: ChatTokenizer, folder: Path) -> None:
    """Write a model with the attempts that it imitates and all that it is made of."""
    kept = Path(recipe.out) / ATTEMPTS
    made_of = provenance(with_demonstrations(recipe, kept))
    made_of["files"] = {**made_of["files"], str(kept): digest_of(Path(recipe.sft.data))}
    warm_start.save(model, tokenizer, {**made_of, "from": best.rule}, folder)
    shutil.copyfile(recipe.sft.data, folder / ATTEMPTS)

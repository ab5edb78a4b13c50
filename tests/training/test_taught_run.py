"""Whole runs with a teacher in the loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.running import micro_recipe, micro_toml, resume, train, untimed
from turnwise.inspect.verify import verify
from turnwise.recipe.parse import load_recipe
from turnwise.recipe.schema import Recipe
from turnwise.runs.archive import read_step
from turnwise.runs.checkpoint import latest_checkpoint
from turnwise.runs.folder import RunFolder
from turnwise.testing.micro import MICRO

WITHOUT_LOSS = MICRO.replace('[loss]\nname = "ppo_clip"\nanchor = "engine"\n', "")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that has seen demonstrations."""
    folder = tmp_path_factory.mktemp("teacher")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_CACHE", str(folder / "cache"))
        recipe = micro_recipe(
            folder, "sft.updates=30", "sft.optimizer.learning_rate=1e-2", "steps=1", "evaluation.final_tasks=4"
        )
        train(recipe)
    checkpoint = latest_checkpoint(RunFolder.open(recipe.out).checkpoints)
    assert checkpoint is not None
    return checkpoint.path


def pupil(folder: Path, teacher: Path, *overrides: str) -> Recipe:
    taught = [f"out={folder / 'run'}", f"teacher={teacher}", "distill.coefficient=1", "distill.top_k=8"]
    few = ["evaluation.final_tasks=4", "evaluation.every=0", "steps=6", "optimizer.learning_rate=1e-2"]
    return load_recipe(micro_toml(folder, WITHOUT_LOSS), [*taught, *few, *overrides])


@pytest.mark.parametrize(
    "how",
    [
        ["credit.name=none"],
        ["credit.name=none", "distill.direction=forward", "groups_per_update=2", "max_tokens_per_microbatch=100"],
        pytest.param(["layout=packed", "epochs=2"], marks=pytest.mark.slow),
    ],
)
def test_a_run_draws_near_its_teacher(tmp_path: Path, teacher: Path, how: list[str]) -> None:
    recipe = pupil(tmp_path, teacher, *how)
    train(recipe)
    folder = RunFolder.open(recipe.out)
    lines = untimed(folder.metrics)
    assert lines[1]["distill"] > 0.5
    assert lines[6]["distill"] < lines[1]["distill"] / 2
    assert lines[6]["loss"] == pytest.approx(lines[6]["distill"], rel=1e-6) or recipe.credit.name == "grpo"
    credit = [values for record in read_step(folder.archive / "step-000001.parquet") for values in record.credit]
    assert recipe.credit.name == "grpo" or not any(values.any() for values in credit)
    found = verify(folder.path, 6, 2, None, "float64")
    assert found.failed == []
    assert "+ teacher 1" in found.taken[1]


def test_a_resumed_run_goes_on_with_its_teacher(tmp_path: Path, teacher: Path) -> None:
    whole = pupil(tmp_path, teacher, "credit.name=none", "steps=3")
    train(whole)
    lines = untimed(RunFolder.open(whole.out).metrics)
    # A run that ended after two steps, told to make three.
    short = pupil(tmp_path, teacher, "credit.name=none", "steps=2", f"out={tmp_path / 'short'}")
    train(short)
    folder = RunFolder.open(short.out)
    folder.config.write_text(folder.config.read_text().replace('"steps": 2', '"steps": 3'))
    (folder.path / "SHA256SUMS").unlink()  # as one does who changes it on purpose
    resume(folder.path)
    assert [line["distill"] for line in untimed(folder.metrics)[1:]] == [line["distill"] for line in lines[1:]]


def test_more_of_the_teacher_than_its_vocabulary_is_one_line(tmp_path: Path, teacher: Path) -> None:
    with pytest.raises(ValueError, match=r"^distill\.top_k = 5000 must be from 1 to \d+, the tokens that both"):
        train(pupil(tmp_path, teacher, "distill.top_k=5000"))

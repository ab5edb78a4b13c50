"""What `turnwise eval` evaluates: which weights, under which recipe, and where the evaluation goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from turnwise.data.hub import HubName, Say
from turnwise.data.named_models import with_model
from turnwise.recipe.parse import load_recipe
from turnwise.recipe.schema import Recipe
from turnwise.recipe.shipped import find_recipe, nearest
from turnwise.runs.checkpoint import check_model_folder, checkpoint_path, latest_checkpoint, read_checkpoint
from turnwise.runs.folder import RunFolder
from turnwise.runs.trust import Trust, recipe_of_run


@dataclass(frozen=True, slots=True)
class EvaluationTarget:
    """The weights that are evaluated or served, and their recipe.

    Example:
        EvaluationTarget.find("runs/quickstart", None, 50, []).name == "step 50 of runs/quickstart"
    """

    name: str
    """For people."""
    recipe: Recipe
    model: Path | None
    """Its folder; None for the recipe's own, after the warm start."""
    version: int
    """Of the weights; 0 where nothing is known of their training."""
    home: Path
    """Where its evaluations go unless a person says so: the beginning of a name, to which a number is added."""

    @classmethod
    def find(
        cls,
        what: str,
        recipe: str | Recipe | None,
        checkpoint: int | None,
        overrides: Sequence[str],
        trust: Trust = "ask",
        say: Say = print,
    ) -> EvaluationTarget:
        """What a run folder, a model folder, a name of the Hub or a recipe stands for. The recipe for a folder is
        named, or given."""
        if (name := HubName.parse(what)) is not None:
            return cls.of_name(name, recipe, checkpoint, overrides, say)
        where = Path(what) if Path(what).is_dir() else find_recipe(what)
        if not where.exists():
            raise ValueError(
                f"there is nothing at {where}; give a run folder, a model folder, ORG/NAME or a recipe{nearest(what)}"
            )
        if not where.is_dir():
            if recipe is not None:
                raise ValueError(f"--recipe goes with a run or model folder, and {where} is a recipe itself; remove it")
            if checkpoint is not None:
                raise ValueError("--checkpoint goes with a run folder, not with a recipe")
            chosen_recipe = load_recipe(where, overrides)
            return cls(f"the model of {what}", chosen_recipe, None, 0, Path(f"{chosen_recipe.out}-eval"))
        tree = RunFolder.open(where).read_config()
        if "env" in tree:
            return cls.of_run(RunFolder(where), recipe, checkpoint, overrides, trust)
        if recipe is None:
            raise ValueError(f"{where} is a model; say how to evaluate it with --recipe RECIPE")
        if checkpoint is not None:
            raise ValueError(f"--checkpoint goes with a run folder, and {where} is a model; remove it")
        chosen_recipe = given_recipe(recipe, overrides)
        check_model_folder(where)
        label = where.resolve().name
        home = Path(chosen_recipe.out).parent / f"{label}-eval"
        return cls(str(where), with_model(chosen_recipe, where), where, 0, home)

    @classmethod
    def of_name(
        cls, name: HubName, recipe: str | Recipe | None, checkpoint: int | None, overrides: Sequence[str], say: Say
    ) -> EvaluationTarget:
        """A model of the Hub, at the commit that its name means now."""
        if recipe is None:
            raise ValueError(f"{name} is a model; say how to evaluate it with --recipe RECIPE")
        if checkpoint is not None:
            raise ValueError(f"--checkpoint goes with a run folder, and {name} is a model; remove it")
        chosen_recipe = given_recipe(recipe, overrides)
        pinned, folder = name.fetched(say)
        home = Path(chosen_recipe.out).parent / f"{name.repo.rpartition('/')[2]}-eval"
        return cls(str(pinned), with_model(chosen_recipe, pinned.key), folder, 0, home)

    @classmethod
    def of_run(
        cls,
        folder: RunFolder,
        recipe: str | Recipe | None,
        checkpoint: int | None,
        overrides: Sequence[str],
        trust: Trust,
    ) -> EvaluationTarget:
        """A checkpoint of a run, under its own recipe or another."""
        chosen_recipe = given_recipe(recipe, overrides) if recipe else recipe_of_run(folder, overrides, trust)
        if checkpoint is not None:
            path, version = checkpoint_path(folder.checkpoints, checkpoint), checkpoint
            if not path.is_dir():
                raise ValueError(f"{folder.path} has no checkpoint of step {checkpoint}; see {folder.checkpoints}")
            read_checkpoint(path)
        else:
            latest = latest_checkpoint(folder.checkpoints)
            if latest is None:
                raise ValueError(f"{folder.path} has no checkpoint yet")
            path, version = latest.path, latest.step
        folder.check_reference(needed=False)
        if HubName.parse(chosen_recipe.model.path) is not None:  # the checkpoint has all that is needed of it
            chosen_recipe = with_model(chosen_recipe, path)
        return cls(f"step {version} of {folder.path}", chosen_recipe, path, version, folder.evaluations / "eval")

    def make_folder(self, chosen: str | None) -> Path:
        """A new folder for an evaluation: the chosen one, or the first number that is free."""
        numbered = (self.home.with_name(f"{self.home.name}-{number:03d}") for number in count(1))
        path = Path(chosen) if chosen else next(path for path in numbered if not path.exists())
        try:
            path.mkdir(parents=True, exist_ok=True)
            taken = any(path.iterdir())
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"cannot write to {path} ({reason}); choose another folder with --out") from None
        if taken:
            raise ValueError(f"{path} holds something already; choose another folder with --out")
        return path


def given_recipe(recipe: str | Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe that a person names, with overrides, or gives as a value that has them already."""
    return load_recipe(Path(recipe), overrides) if isinstance(recipe, str) else recipe

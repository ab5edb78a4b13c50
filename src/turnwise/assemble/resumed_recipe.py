"""The recipe with which a run goes on, and the checkpoint that it goes on from."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.assemble.checks import check, with_models
from turnwise.assemble.opponents import opponents_of
from turnwise.data.hub import HubName
from turnwise.data.named_models import with_model
from turnwise.recipe.schema import Recipe
from turnwise.runs import setback
from turnwise.runs.checkpoint import Checkpoint, latest_checkpoint
from turnwise.runs.folder import RunFolder
from turnwise.runs.resumed import check_changes, record_changes
from turnwise.runs.screen import Screen
from turnwise.runs.trust import Trust, recipe_of_run


def resumed_recipe(
    folder: RunFolder, overrides: Sequence[str], trust: Trust, screen: Screen
) -> tuple[Recipe, Checkpoint | None]:
    """(the recipe with what the overrides change, the last checkpoint), once all of it is known to work. The folder
    then ends where its checkpoint does, and has the recipe that holds from now on."""
    before, changed = recipe_of_run(folder, (), "needless"), recipe_of_run(folder, overrides, trust)
    checkpoint = latest_checkpoint(folder.checkpoints)
    step = checkpoint.step if checkpoint else 0
    check_changes(before, changed, step)
    recipe = changed.model_copy(update={"out": str(folder.path)})
    # A checkpoint has the policy: what training started from is not looked for again, here or on the Hub.
    needed = with_model(recipe, checkpoint.path) if checkpoint and HubName.parse(recipe.model.path) else recipe
    check(with_models(needed, screen.say))
    if checkpoint is not None:
        folder.check_reference(keeps_start(recipe))
    setback.cut_back(folder, checkpoint, before.checkpoints.every)
    for line in record_changes(folder, before, changed, step):
        screen.say(f"from step {step} on: {line}")
    return recipe, checkpoint


def keeps_start(recipe: Recipe) -> bool:
    """Whether the folder of a run has the model that training started from."""
    kl_to_start = recipe.kl.coefficient and recipe.kl.reference == "start"
    return bool(recipe.lora.rank or kl_to_start or "frozen" in opponents_of(recipe))

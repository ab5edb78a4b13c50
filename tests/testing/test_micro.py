from support.running import micro_recipe


def test_the_micro_recipe_has_every_part_of_a_run(tmp_path):
    recipe = micro_recipe(tmp_path)
    assert (recipe.steps, recipe.groups_per_step, recipe.sft.updates, recipe.evaluation.every) == (4, 4, 4, 2)
    assert recipe.model.layers == 1

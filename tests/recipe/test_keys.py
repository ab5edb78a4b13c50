import inspect
import runpy
import tomllib

from support.paths import DOCS, RECIPES
from turnwise.recipe.keys import RecipeKey, keys_of, tables_of
from turnwise.recipe.schema import Recipe

MOST = 68
"""Keys that a person sets. Before you raise it, look for a table that the new key can be forgotten in."""


def written_in(tree, above=""):
    """The keys that a recipe writes, without the arguments of functions and environments."""
    known = dict(tables_of())
    for name, value in tree.items():
        path = f"{above}{name}"
        if path not in known:
            yield path
        for entry in value if isinstance(value, list) else [value]:
            if path in known:
                yield from written_in(entry, f"{path}.")


def path_of(key: RecipeKey) -> str:
    return f"{key.table}.{key.name}" if key.table else key.name


def test_the_short_list_does_not_grow_unnoticed():
    keys = list(keys_of())
    short = [path_of(key) for key in keys if key.in_short_list]
    print(f"{len(short)} of {len(keys)} keys are in the short list")
    assert len(short) <= MOST, short
    assert len({path_of(key) for key in keys}) == len(keys)


def test_short_lists_name_keys_of_their_table():
    for name, model in tables_of():
        assert set(model.in_short_list or ()) <= set(model.model_fields), name


def test_a_table_that_can_be_forgotten_says_when_to_open_it():
    """Its first sentence is enough for the short list."""
    for name, model in tables_of():
        if model.in_short_list is not None:
            assert " Open it " in " ".join(inspect.cleandoc(model.__doc__ or "").split()), name


def test_every_key_has_a_default_but_the_name_of_an_environment():
    assert [path_of(key) for key in keys_of() if key.field.is_required()] == ["env.name"]
    assert Recipe.model_fields["env"].is_required()


def test_the_quick_start_needs_the_short_list_only():
    tree = tomllib.loads((RECIPES / "quickstart.toml").read_text())
    short = {path_of(key) for key in keys_of() if key.in_short_list}
    assert set(written_in(tree)) <= short


def test_the_reference_is_what_the_tables_say():
    made = runpy.run_path(str(DOCS / "make_recipes.py"))
    text = (DOCS / "reference" / "recipes.md").read_text()
    assert text == made["page"](), "run: python docs/make_recipes.py"
    assert "`kl = " not in text, "a setting that is refused"

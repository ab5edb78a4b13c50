"""The recipes that come with turnwise, and what a bare name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.paths import RECIPES
from turnwise.recipe.parse import load_recipe
from turnwise.recipe.shipped import about, find_recipe, nearest, say_own, shipped_recipe, shipped_recipes


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_shipped_recipes_are_those_at_the_top_of_the_repository() -> None:
    assert {path.name: path.read_text() for path in shipped_recipes().values()} == {
        path.name: path.read_text() for path in RECIPES.glob("*.toml")
    }


def test_each_begins_with_a_sentence_of_one_line() -> None:
    for path in shipped_recipes().values():
        line = about(path)
        assert path.read_text().startswith(f"# {line}\n")
        assert line.endswith(".")
        assert 20 < len(line) <= 120, path


def test_a_bare_name_is_a_shipped_recipe_in_an_empty_folder() -> None:
    assert load_recipe(Path("quickstart")) == load_recipe(RECIPES / "quickstart.toml")
    assert load_recipe(Path("quickstart"), ["seed=3"]).seed == 3
    assert load_recipe(Path("math")).out == "runs/math-0"


@pytest.mark.parametrize("name", ["quickstart.toml", "quickstart"])
def test_a_file_of_the_working_folder_wins_and_is_said(name: str) -> None:
    Path(name).write_text((RECIPES / "quickstart.toml").read_text().replace("steps = 50", "steps = 7"))
    assert find_recipe("quickstart") == Path(name)
    assert load_recipe(Path("quickstart")).steps == 7
    assert say_own("quickstart") == (
        f"quickstart: the file {name} in this folder, not the recipe of that name that comes with turnwise"
    )


def test_a_folder_does_not_hide_a_recipe() -> None:
    Path("quickstart").mkdir()
    assert find_recipe("quickstart") == shipped_recipe("quickstart")
    assert say_own("quickstart") is None


def test_paths_and_files_with_other_names_are_what_they_are() -> None:
    Path("mine.toml").write_text("steps = 1\n")
    for path in ("mine.toml", "recipes/quickstart.toml", "./quickstart", "quickstart.toml"):
        assert find_recipe(path) == Path(path)
        assert say_own(path) is None
    assert find_recipe("mine") == Path("mine.toml")
    assert say_own("mine") is None  # there is no other that it could be


@pytest.mark.parametrize("name", ["quikstart", "recipes/quickstart.toml", "quickstart.toml"])
def test_an_unknown_name_suggests_the_nearest(name: str) -> None:
    with pytest.raises(ValueError, match=r"^no recipe at .*; did you mean quickstart\?$"):
        load_recipe(Path(name))
    assert nearest("zzzzz") == ""


def test_only_shipped_recipes_are_printed() -> None:
    Path("mine.toml").write_text("steps = 1\n")
    with pytest.raises(ValueError, match="no recipe mine comes with turnwise"):
        shipped_recipe("mine")

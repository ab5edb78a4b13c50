"""The recipes that come with turnwise, and how a bare name finds one. Light: neither torch nor pydantic is imported."""

from __future__ import annotations

import difflib
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "recipes"
"""In a checkout, a link to `recipes/` at its top."""


def shipped_recipes() -> dict[str, Path]:
    """By name: the file of each recipe that comes with turnwise."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def about(path: Path) -> str:
    """The first line of a recipe, which is a comment that says what it trains."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def own_file(name: str) -> Path | None:
    """The file of the working folder that a bare name means; None where there is none, or where it is no bare name."""
    path = Path(name)
    if path.name != name or path.suffix == ".toml":
        return None
    return next((found for found in (path, Path(f"{name}.toml")) if found.is_file()), None)


def find_recipe(what: str | Path) -> Path:
    """The file that a path or a bare name means: one's own, or else the recipe of that name that comes with turnwise;
    the path as it is where there is neither."""
    return own_file(str(what)) or shipped_recipes().get(str(what)) or Path(what)


def shipped_recipe(name: str) -> Path:
    """The file of a recipe that comes with turnwise; a ValueError with the nearest name where there is none."""
    found = shipped_recipes()
    if name not in found:
        raise ValueError(f"no recipe {name} comes with turnwise; turnwise recipes lists those that do{nearest(name)}")
    return found[name]


def nearest(name: str) -> str:
    """A phrase with the nearest name of a recipe that comes with turnwise; empty where none is near."""
    near = difflib.get_close_matches(Path(name).stem, shipped_recipes(), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def say_missing(path: Path) -> str:
    """What to do where there is no recipe at a path."""
    return f"no recipe at {path}; turnwise recipes lists those that come with turnwise{nearest(str(path))}"


def say_own(name: str) -> str | None:
    """What a person should know where a file of the working folder hides a recipe that comes with turnwise."""
    own = own_file(name)
    if own is None or name not in shipped_recipes():
        return None
    return f"{name}: the file {own} in this folder, not the recipe of that name that comes with turnwise"

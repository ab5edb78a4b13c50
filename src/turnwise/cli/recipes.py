"""The recipes that come with turnwise: `turnwise recipes`, and names of them in other commands."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from turnwise.recipe.shipped import about, find_recipe, say_own, shipped_recipe, shipped_recipes

EPILOG = """examples:
  turnwise recipes                                             list them
  turnwise recipes quickstart > my.toml                        start from one
  turnwise train my.toml
  turnwise train quickstart                                    or train it as it is
"""


def add_recipes_command(commands: Any) -> None:
    recipes = commands.add_parser(
        "recipes",
        help="list the recipes that come with turnwise, or print one",
        description="With a name, prints that recipe exactly as it is. Commands that take a recipe take a name too.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    recipes.add_argument("name", nargs="?", metavar="NAME", help="the one to print; without it, they are listed")


def recipes_command(chosen: argparse.Namespace) -> int:
    if chosen.name is not None:
        sys.stdout.write(shipped_recipe(chosen.name).read_text(encoding="utf-8"))
        return 0
    found = shipped_recipes()
    width = max(map(len, found), default=0)
    for name, path in found.items():
        print(f"{name:{width}}  {about(path)}")
    return 0


def is_recipe(what: str) -> bool:
    """Whether `turnwise play` is given a recipe: a file, or a bare name that is one's own file or comes with turnwise.
    Some environments and recipes have the same name, and then it is the environment."""
    from turnwise.recipe.built_in import BUILT_IN

    return what.endswith(".toml") or (what not in BUILT_IN and find_recipe(what).is_file())


def note_own_files(chosen: argparse.Namespace) -> None:
    """Say on standard error where a name means a file of this folder, and not the recipe that comes with turnwise."""
    names = [getattr(chosen, "recipe", None)]
    if chosen.command == "eval" and not Path(chosen.what).is_dir():
        names.append(chosen.what)
    if chosen.command == "play" and is_recipe(chosen.what):
        names.append(chosen.what)
    for name in names:
        if name and (note := say_own(name)):
            print(f"turnwise: {note}", file=sys.stderr)

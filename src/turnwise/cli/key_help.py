"""The keys of a recipe with their values, on the command line. pydantic is imported when somebody asks."""

from __future__ import annotations

import argparse
from typing import Any


class HelpWithKeys(argparse.Action):
    """Prints the help of a command and the keys that a person sets, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any, **settings: Any) -> None:
        from turnwise.recipe.allowed import list_keys

        parser.print_help()
        print("\nkeys that a person sets (all of them, with what they mean: turnwise train --keys WORD, or --keys .):")
        print("\n".join(list_keys(None)))
        parser.exit()


class PrintKeys(argparse.Action):
    """Prints the keys whose names have a word, with what they mean, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None) -> None:
        from turnwise.recipe.allowed import list_keys

        print("\n".join(list_keys(None if values is None else "" if values == "." else str(values))))
        parser.exit()


def add_key_help(command: argparse.ArgumentParser) -> None:
    """Options of a command that was made without help."""
    command.add_argument(
        "-h", "--help", action=HelpWithKeys, nargs=0, help="show this, and the keys that a person sets"
    )
    command.add_argument(
        "--keys", action=PrintKeys, nargs="?", metavar="WORD", help="list the keys with WORD in their names, and end"
    )

"""`turnwise preflight`: what a run needs, before it starts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.recipe.schema import Recipe

EPILOG = """examples:
  turnwise preflight qwen3-8b-8gpu                             memory of a rank, cards that it fits on, seconds
  turnwise preflight qwen3-8b-8gpu cluster.fsdp=4              with another value of any key
  turnwise preflight math model=Qwen/Qwen3-4B model.device=cuda model.dtype=bfloat16
  turnwise preflight quickstart --checks always                with the checks of a GPU, rehearsed where there is none
  turnwise preflight qwen3-8b-8gpu --split 8,16,64             how to divide so many cards, by simulation: nothing else

Nothing is fetched but the model's config.json, and nothing is written. The learner runs on tensors without numbers.
"""


def add_preflight_command(commands: Any) -> None:
    command = commands.add_parser(
        "preflight",
        help="what a run needs, before it starts: memory of a rank, cards, seconds of a step",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("recipe", help="a TOML file, or a name that turnwise recipes lists")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="for instance cluster.fsdp=16")
    command.add_argument(
        "--layers", type=int, metavar="N", help="cut the model to its first N layers: quicker, and not the whole truth"
    )
    command.add_argument(
        "--split",
        metavar="CARDS",
        help="instead: divide so many cards (several by commas) between learner and engines, and simulate the run",
    )
    command.add_argument("--card", default="H100 80 GB", help="which one, for --split: a name of the table of cards")
    command.add_argument(
        "--environment-seconds", type=float, default=0.2, metavar="S", help="median of an environment call, for --split"
    )
    command.add_argument(
        "--checks",
        choices=("auto", "always", "never"),
        default="auto",
        help="whether kernels, ranks and a transfer of weights are tried: auto where there is a GPU",
    )


def preflight_command(chosen: argparse.Namespace) -> int:
    from turnwise.recipe.parse import load_recipe

    recipe = load_recipe(Path(chosen.recipe), chosen.overrides)
    if chosen.split is not None:
        return split_command(recipe, chosen)
    if chosen.layers is not None and chosen.layers < 1:
        raise ValueError(f"--layers {chosen.layers}: a model has at least one")
    print(f"rehearsing {chosen.recipe}; a model of 8B parameters takes about a minute", file=sys.stderr, flush=True)
    from turnwise.preflight.flight import device_for, preflight

    found = preflight(recipe, chosen.layers)
    for line in found.describe():
        print(line)
    passed = checked(chosen.checks)
    fits = device_for(recipe) == "cpu" or any(each.fits for each in found.fits)
    return 0 if passed and fits else 1


def split_command(recipe: Recipe, chosen: argparse.Namespace) -> int:
    """Print how to divide numbers of cards."""
    from turnwise.preflight.card import CARDS

    parts = chosen.split.split(",")
    if not all(part.strip().isdigit() and int(part) > 1 for part in parts):
        raise ValueError(f"--split {chosen.split}: give numbers of cards of at least 2, for instance --split 8,16")
    card = next((card for card in CARDS if chosen.card.lower() in card.name.lower()), None)
    if card is None:
        raise ValueError(f"--card {chosen.card}: the table has {', '.join(card.name for card in CARDS)}")
    if chosen.environment_seconds < 0:
        raise ValueError(f"--environment-seconds {chosen.environment_seconds:g}: give 0 or more")
    print(f"rehearsing {chosen.recipe} with a few layers, then simulating", file=sys.stderr, flush=True)
    from turnwise.simulate.table import split_lines
    from turnwise.simulate.workload import LognormalDelay

    for line in split_lines(recipe, card, [*map(int, parts)], delay=LognormalDelay(chosen.environment_seconds, 1.0)):
        print(line, flush=True)
    return 0


def checked(when: str) -> bool:
    """Whether all checks passed; they run where there is a GPU, or are rehearsed where somebody asks for it."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if when == "never" or (when == "auto" and device == "cpu"):
        return True
    from turnwise.preflight.device_checks import header, run_checks

    print(f"\nchecks ({header(device)}); please send this table to the project:")
    passed = True
    for check in run_checks(device):
        print(check.line(), flush=True)
        passed &= check.passed
    return passed

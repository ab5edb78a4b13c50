"""turnwise push: a checkpoint as a model on the Hub, with a model card."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from turnwise.cli.terminal import open_screen

EPILOG = """examples:
  turnwise push runs/quickstart me/hops --dry-run pushed       write the folder and look at it first
  turnwise push runs/quickstart me/hops                        its last checkpoint; needs HF_TOKEN, or: hf auth login
  turnwise push runs/quickstart me/hops --checkpoint 40 --private
"""


def add_push_command(commands: Any) -> None:
    push = commands.add_parser(
        "push",
        help="push a checkpoint to the Hugging Face Hub, with a model card",
        description="Weights, tokenizer, chat template and generation config, and a card with the recipe, held-out\n"
        "success before and after with its interval, the curve, and versions. See docs/guides/models.md.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    push.add_argument("run", metavar="RUN", help="a run folder")
    push.add_argument("repo", metavar="ORG/NAME", help="the model on the Hub; made where there is none")
    push.add_argument("--checkpoint", metavar="STEP", type=int, help="this checkpoint instead of the last")
    push.add_argument("--private", action="store_true", help="only you and your organisation see a new model")
    push.add_argument("--dry-run", metavar="DIR", help="write to this new folder what would be pushed, and end")


def push_command(chosen: argparse.Namespace) -> int:
    from tempfile import TemporaryDirectory

    from turnwise.atomic import atomic_folder
    from turnwise.inspect.push.pushed_model import PushedModel, token_or_refusal, upload

    screen = open_screen()
    model = PushedModel.open(Path(chosen.run), chosen.repo, chosen.checkpoint)
    if chosen.dry_run:
        out = Path(chosen.dry_run)
        if out.exists():
            raise ValueError(f"{out} exists already; choose another folder for --dry-run")
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(out) as aside:
            model.write(aside)
        screen.say(f"{model.describe()}; look at {out}/README.md, nothing was pushed")
        return 0
    token = token_or_refusal()
    screen.say(model.describe())
    with TemporaryDirectory(prefix="turnwise-") as folder:
        model.write(Path(folder))
        message = f"Step {model.checkpoint.step}, trained with turnwise"
        made = upload(Path(folder), chosen.repo, message, token, private=chosen.private, say=screen.say)
    screen.say(f"pushed: {made}")
    screen.say(f"evaluate it with: turnwise eval {chosen.repo} --recipe RECIPE")
    return 0

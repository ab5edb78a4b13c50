"""What `turnwise serve` does: a trained model behind the endpoint, until somebody stops it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from turnwise.assemble.evaluation import open_model
from turnwise.data.hub import HubName, Say
from turnwise.evaluation.target import EvaluationTarget
from turnwise.learn.lora import base_of
from turnwise.recipe.parse import apply_override, parse_recipe
from turnwise.runs.checkpoint import check_model_folder
from turnwise.runs.folder import RunFolder
from turnwise.runs.screen import Screen
from turnwise.serve.endpoint import Endpoint
from turnwise.serve.key import Key
from turnwise.serve.public import Public
from turnwise.serve.registry import Address

CONTEXT = 8192
"""Tokens that prompt and answer may have together, unless the model or an override says less."""


def target_of(what: str, checkpoint: int | None, overrides: Sequence[str], say: Say = print) -> EvaluationTarget:
    """A checkpoint of a run, or a model by itself: a folder, or a name of the Hub."""
    if (name := HubName.parse(what)) is not None:
        pinned, where = name.fetched(say)
        label = str(pinned)
    else:
        where, label = Path(what), what
    if not where.is_dir():
        raise ValueError(f"there is no folder {where}; give a run folder or a model folder, or ORG/NAME of the Hub")
    config = RunFolder.open(base_of(where) or where).read_config()
    if "env" in config:
        return EvaluationTarget.find(what, None, checkpoint, overrides, "needless")
    if checkpoint is not None:
        raise ValueError(f"--checkpoint goes with a run folder, and {label} is a model; remove it")
    check_model_folder(where)
    room = min(CONTEXT, int(config.get("max_position_embeddings") or CONTEXT))
    limits = {"max_prompt_tokens": room - 1, "max_action_tokens": room, "max_trajectory_tokens": room}
    tree = {"env": [{"name": "guess"}], "model": {"path": str(where)}, "rollout": limits}
    for override in overrides:
        apply_override(tree, override)
    return EvaluationTarget(label, parse_recipe(tree, "serve"), where, 0, where)


async def serve_until(
    target: EvaluationTarget, endpoint: Endpoint, key: Key, name: str, screen: Screen, stop: asyncio.Event
) -> None:
    """Serve until `stop`."""
    with closing(endpoint):
        async with open_model(target, screen) as model:
            address = endpoint.open(Public(model.engine, model.renderer, name, endpoint.aliases), key.text)
            for line in describe(target, address, key, endpoint.aliases):
                screen.say(line)
            await stop.wait()


def describe(target: EvaluationTarget, address: Address, key: Key, aliases: Sequence[str] = ()) -> list[str]:
    return [
        f"serving {target.name}; Ctrl-C ends it",
        f"  base_url  {address.base_url}   (Anthropic's clients want it without /v1)",
        f"  api_key   {key.shown}",
        f"  model     {', '.join([address.model, *aliases])}",
    ]


async def until_stopped(target: EvaluationTarget, endpoint: Endpoint, key: Key, name: str, screen: Screen) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await serve_until(target, endpoint, key, name, screen, stop)

"""A person in the model's place: the same agent loop, with an engine that asks at the terminal."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from turnwise.assemble.attempts import limits
from turnwise.assemble.checks import check, with_models
from turnwise.assemble.model import roomy
from turnwise.assemble.run import open_environments
from turnwise.cli.typed_message import HOW, HOW_WITH_TOOLS, read_message
from turnwise.engines.base import Sampling
from turnwise.engines.scripted import ScriptedEngine
from turnwise.learn.policy import load_tokenizer
from turnwise.learn.tiny import build_tokenizer
from turnwise.recipe.schema import Recipe
from turnwise.rollout.agent import play as agent_loop
from turnwise.rollout.attempt import run_attempt
from turnwise.rollout.environments import DatasetEnvironments
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.scene import Attempt, Scene
from turnwise.tokens import Tokens
from turnwise.types import Task, Trajectory


async def play(recipe: Recipe, number: int) -> int:
    """One attempt at a held-out task by the person at the terminal."""
    recipe = with_models(recipe, print)
    check(recipe)
    with open_environments(recipe) as environments:
        tasks = [task for tasks in environments.tasks("heldout", number + 1).values() for task in tasks]
        if number >= len(tasks):
            raise ValueError(f"there is no held-out task {number}; there are {len(tasks)}")
        trajectory = await played(recipe, environments.datasets[tasks[number].dataset], tasks[number])
    print(f"\n{trajectory.status}: total reward {trajectory.total:g} in {len(trajectory.turns)} turns")
    return 0


async def played(recipe: Recipe, dataset: DatasetEnvironments, task: Task) -> Trajectory:
    """The attempt, whose actions are asked for at the terminal."""
    # The words that a tiny tokenizer would learn are those of many conversations, and a person reads letters as well.
    is_tiny = recipe.model.path == "tiny"
    tokenizer = build_tokenizer([]) if is_tiny else load_tokenizer(recipe.model.path)
    rollout = recipe.rollout
    renderer = Renderer(tokenizer, rollout.history, rollout.tools, trust_text=rollout.rendering.trust_text)
    shown: list[int] = []
    has_tools = rollout.tools != "none"
    print(f"{HOW_WITH_TOOLS if has_tools else HOW} Ctrl-D ends.\n")

    async def ask(prompt: Tokens, session: str, seed: int) -> str:
        known = len(shown) if prompt[: len(shown)].tolist() == shown else 0
        if shown and not known:
            print("\n--- the history was rewritten; this is the whole prompt ---")
        print(renderer.decode(prompt[known:].tolist()), end="", flush=True)
        shown[:] = prompt.tolist()
        try:
            return await asyncio.to_thread(read_message, input, has_tools=has_tools)
        except EOFError:
            raise KeyboardInterrupt from None

    engine = ScriptedEngine(ask, lambda text: renderer.encode(text).tolist(), end_token=renderer.end_token)
    bounds = roomy(recipe) if is_tiny else limits(recipe)
    patient = replace(bounds, call_seconds=86400.0, attempt_seconds=86400.0)
    sampling = Sampling(bounds.max_action_tokens)
    scene = Scene(engine, renderer, sampling, patient)
    return await run_attempt(
        Attempt(recipe.seed, "play", task), dataset.make_heldout, scene, dataset.play or agent_loop
    )

"""From a recipe to its model, its tokenizer and the renderer between messages and tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from turnwise.assemble.attempts import limits
from turnwise.assemble.learner import device_of
from turnwise.assemble.models import ModelSource
from turnwise.data.catalogue import model_folder
from turnwise.learn.lora import base_of
from turnwise.learn.model_cut import model_on_meta
from turnwise.learn.policy import load_model, load_tokenizer
from turnwise.learn.tiny import build_model, build_tokenizer
from turnwise.pretrained import CausalLM, ChatTokenizer
from turnwise.recipe.schema import Recipe
from turnwise.rollout.concurrently import all_of
from turnwise.rollout.demonstrate import Demonstrator
from turnwise.rollout.environments import Environments
from turnwise.rollout.limits import Limits
from turnwise.rollout.render.formats.coerce import specs_of
from turnwise.rollout.render.renderer import Renderer
from turnwise.schedule.shared_failure import attempts_of, shared_failure, shared_failure_message
from turnwise.schedule.stopping import RunStopped
from turnwise.types import Group, Turn


def set_threads(recipe: Recipe) -> None:
    """Give torch the CPU threads that a recipe's model is worth."""
    cores = 1 if recipe.model.path == "tiny" else os.cpu_count() or 1
    torch.set_num_threads(recipe.model.threads or max(1, cores // (2 if recipe.max_lag else 1)))


def gpu_names() -> list[str]:
    """The GPUs that this process sees."""
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


async def model_source(recipe: Recipe, environments: Environments, path: str | Path | None = None) -> ModelSource:
    """The policy's model and its tokenizer, for a run: from a folder, or the tiny ones built by code. Weights that only
    other processes need are left in the folder."""
    if path is None and recipe.model.path != "tiny":
        path = recipe.model.path
    folder = None if path is None else model_folder(path)
    if folder is not None and base_of(folder) is not None:
        folder = None  # of adapters, which are added to another model here
    if folder is not None and not computes_here(recipe):
        source = ModelSource(*load(folder, model_on_meta), folder.absolute())
        check_context(recipe, source.model)
        return source
    model, tokenizer = await model_and_tokenizer(recipe, environments, path)
    return ModelSource(model, tokenizer, None if folder is None else folder.absolute())


def computes_here(recipe: Recipe) -> bool:
    """Whether something in the process of a run needs the weights: the learner, or an engine that has a copy. A vLLM
    and engines on a Ray cluster read them from a folder."""
    cluster, engine = recipe.cluster, recipe.engine
    return not cluster.is_spread or (not cluster.on_ray and engine.name == "slots")


async def model_and_tokenizer(
    recipe: Recipe, environments: Environments, path: str | Path | None = None
) -> tuple[CausalLM, ChatTokenizer]:
    """The policy's model in float32 and its tokenizer: from a folder, or the tiny ones built by code."""
    if path is None and recipe.model.path != "tiny":
        path = recipe.model.path
    if path is not None:
        model, tokenizer = load(path)
    else:
        tokenizer = build_tokenizer(await tiny_texts(recipe, environments))
        context = recipe.rollout.max_trajectory_tokens
        model = build_model(tokenizer, recipe.model.hidden, recipe.model.layers, context, recipe.seed)
    check_context(recipe, model)
    elsewhere = recipe.cluster.is_spread and (recipe.cluster.on_ray or recipe.engine.processes)
    return model.to("cpu" if elsewhere else device_of(recipe)), tokenizer


def check_context(recipe: Recipe, model: CausalLM) -> None:
    """Refuse attempts that have more tokens than a model has positions."""
    longest = getattr(model.config, "max_position_embeddings", None) or recipe.rollout.max_trajectory_tokens
    if recipe.rollout.max_trajectory_tokens > longest:
        raise ValueError(
            f"rollout.max_trajectory_tokens = {recipe.rollout.max_trajectory_tokens} is more than "
            f"the {longest} positions of this model; lower it"
        )


def load(path: str | Path, load_model: Callable[[str | Path], CausalLM] = load_model) -> tuple[CausalLM, ChatTokenizer]:
    """(model, tokenizer) of a folder; one that cannot be read is a one-line ValueError."""
    try:
        return load_model(path), load_tokenizer(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot load the model in {path}: {str(error).splitlines()[0]}") from None


def renderer_of(recipe: Recipe, model: CausalLM, tokenizer: ChatTokenizer) -> Renderer:
    """The renderer of a model, whose actions may also end with what its generation config names."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = [named] if isinstance(named, int) else named or []
    rollout = recipe.rollout
    return Renderer(tokenizer, rollout.history, rollout.tools, ends, trust_text=rollout.rendering.trust_text)


def check_group(recipe: Recipe, renderer: Renderer, vocabulary: int, group: Group) -> None:
    """Refuse a recorded group with a turn that the model cannot compute, or whose tokens are another model's."""
    turns = [turn for trajectory in (*group.trajectories, *group.failed) for turn in trajectory.turns]
    check_turns(recipe, vocabulary, turns)
    if group.task.dataset in {entry.label for entry in recipe.env if entry.is_driven}:
        return  # an agent puts the text together
    for turn in turns[:1]:
        # The tools of a turn are not recorded; those that its calls imply give its values their types.
        if len(turn.action) and renderer.said(turn.prompt, turn.action, specs_of(turn.said.calls)) != turn.said:
            raise ValueError(
                "its tokens do not say what is recorded as said; start from a model with the vocabulary of the "
                "recorded run, and with its rollout.tools"
            )


def check_turns(recipe: Recipe, vocabulary: int, turns: Sequence[Turn]) -> None:
    """Refuse turns that the model cannot compute."""
    longest = recipe.rollout.max_trajectory_tokens
    for turn in turns:
        if (size := len(turn.prompt) + len(turn.action)) > longest:
            raise ValueError(
                f"a turn has {size} tokens, more than rollout.max_trajectory_tokens = {longest}; raise that"
            )
        if (token := max(int(turn.prompt.max()), int(turn.action.max(initial=0)))) >= vocabulary:
            raise ValueError(f"a turn has the token {token}, and those of the model are 0 to {vocabulary - 1}")


def roomy(recipe: Recipe) -> Limits:
    """A recipe's limits with room for a tokenizer that knows no word."""
    return replace(limits(recipe), max_prompt_tokens=1 << 20, max_action_tokens=1 << 20, max_trajectory_tokens=1 << 21)


# ---------------------------------------------------------------- the words of a tiny tokenizer


async def tiny_texts(recipe: Recipe, environments: Environments, count: int = 256) -> list[str]:
    """Conversations in the recipe's environments, for a tokenizer to learn its words from."""
    spell = Renderer(build_tokenizer([]), tools=recipe.rollout.tools)
    supplies = environments.demonstrating()
    expert = Demonstrator(supplies, spell, roomy(recipe), recipe.seed, 0.2, environments.plays)
    tasks = [task for of_dataset in environments.tasks("train", count).values() for task in of_dataset]
    try:
        groups = await all_of(expert.group(task, 0) for task in tasks)
    finally:
        environments.failures.sum_up("conversations for the tiny tokenizer")
    stop_if_none_opens(groups)
    played = [trajectory for group in groups for trajectory in (*group.trajectories, *group.failed)]
    texts = [spell.decode([*last.prompt, *last.action]) for made in played for last in made.turns[-1:]]
    return [part for text in texts for part in text.replace("<|im_start|>", "<|im_end|>").split("<|im_end|>")]


def stop_if_none_opens(groups: Sequence[Group]) -> None:
    """Raise RunStopped where no environment could be opened, for one reason. What fails later may do so because nobody
    demonstrates."""
    attempts = attempts_of(groups)
    if (failure := shared_failure(groups)) and not any(made.turns for made in attempts):
        raise RunStopped(shared_failure_message(len(attempts), "at training tasks", failure))

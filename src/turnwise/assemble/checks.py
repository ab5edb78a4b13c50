"""Every refusal of a run, before anything heavy: names that do not exist, settings that would be ignored, packages,
GPUs, models and tasks that are not there."""

from __future__ import annotations

import importlib.util

from turnwise.assemble import objective
from turnwise.assemble.engines import context_of
from turnwise.assemble.environments import agent_of, environment_makers, heldout_makers
from turnwise.assemble.learner import device_of, policy_of
from turnwise.assemble.opponents import check_opponents
from turnwise.data.catalogue import model_folder
from turnwise.data.hub import PREFIX, HubName, Say
from turnwise.data.named_models import named_models, with_commits
from turnwise.engines.slots.model import check_window
from turnwise.envs.capabilities import can_demonstrate
from turnwise.learn.model_checks import windows
from turnwise.learn.policy import load_tokenizer
from turnwise.pretrained import CausalLM, ChatTokenizer
from turnwise.recipe.schema import Recipe
from turnwise.rollout.environments import Environments
from turnwise.runs.checkpoint import check_model_folder
from turnwise.runs.trackers.names import check_installed as check_trackers
from turnwise.serve.endpoint import check_installed


def check(recipe: Recipe) -> None:
    """Refuse, from the recipe alone, what cannot work and what would be ignored."""
    check_settings(recipe)
    check_folders(recipe)
    check_vocabularies(recipe)


def check_settings(recipe: Recipe) -> None:
    """Refuse what is wrong whatever the models are."""
    environment_makers(recipe)
    heldout_makers(recipe)
    check_opponents(recipe)
    objective.check(recipe)
    check_packages(recipe)
    check_gpus(recipe)


def with_models(recipe: Recipe, say: Say) -> Recipe:
    """The recipe with its models of the Hub on this machine, each named by its commit. They are fetched once nothing
    else in the recipe is wrong."""
    if not any(named_models(recipe)):
        return recipe
    check_settings(recipe)
    return with_commits(recipe, say)


def check_folders(recipe: Recipe) -> None:
    for name, path, is_none in (
        ("model.path", recipe.model.path, "tiny"),
        ("kl.reference", recipe.kl.reference, "start"),
        ("teacher", recipe.teacher, ""),
    ):
        if path == is_none:
            continue
        if not model_folder(path).is_dir():
            raise ValueError(f"no model folder at {path}; {missing(name, path)}")
        check_model_folder(model_folder(path))


def missing(name: str, path: str) -> str:
    """What to do where a path is no folder."""
    if HubName.parse(PREFIX + path) is not None:  # not without the prefix, because of a folder here
        return f'for the model of the Hub write {name} = "{PREFIX}{path}"'
    if name == "model.path":
        return 'save one there with save_pretrained, give ORG/NAME of the Hub, or set model.path = "tiny"'
    return f"set {name} to one that save_pretrained wrote, or to ORG/NAME of the Hub"


def check_packages(recipe: Recipe) -> None:
    """Refuse what needs packages that are not installed."""
    if any(agent_of(entry) is not None for entry in recipe.env):
        check_installed()
    check_trackers(recipe.trackers)
    if recipe.cluster.on_ray and importlib.util.find_spec("ray") is None:
        raise ValueError('cluster.placement needs Ray: pip install "turnwise[ray]"')
    if recipe.lora.rank and importlib.util.find_spec("peft") is None:
        raise ValueError('lora needs peft: pip install "turnwise[lora]"')
    if recipe.engine.name != "vllm":
        return
    vllm = recipe.engine.vllm
    needed = {"aiohttp": "vllm-client"} if vllm.server else {"vllm": "vllm"}
    if vllm.transfer != "file":
        needed["vllm"] = "vllm"
    for package, extra in needed.items():
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f'engine.name = "vllm" needs {package}: pip install "turnwise[{extra}]" '
                "(on a CPU see docs/guides/vllm.md)"
            )


def check_gpus(recipe: Recipe) -> None:
    """Refuse settings of GPUs where there is none."""
    vllm = recipe.engine.vllm
    if device_of(recipe) != "cuda" and (
        gpus := {"transfer", "gpu_memory_utilization", "tensor_parallel_size"} & set(vllm.changed)
    ):
        raise ValueError(f"engine.vllm.{min(gpus)} = {getattr(vllm, min(gpus))!r} needs a GPU; remove it")


def check_vocabularies(recipe: Recipe, tokenizer: ChatTokenizer | None = None) -> None:
    """Refuse a reference or a teacher whose tokens are not the policy's. The tokenizer of a tiny policy is given, once
    it is built."""
    paths = {recipe.kl.reference, recipe.teacher} - {"", "start"}
    if not paths or (tokenizer is None and recipe.model.path == "tiny"):
        return
    vocabulary = (tokenizer or load_tokenizer(recipe.model.path)).get_vocab()
    for path in sorted(paths):
        if load_tokenizer(path).get_vocab() != vocabulary:
            raise ValueError(
                f"the model in {path} has another vocabulary than the policy, so it cannot score its tokens"
            )


def check_tasks(recipe: Recipe, environments: Environments) -> None:
    """Refuse datasets that lack tasks, that train on held-out ones, or that nobody can demonstrate; their tasks are
    drawn once."""
    train = environments.tasks("train")
    evaluation = recipe.evaluation
    heldout = environments.tasks("heldout", max(evaluation.tasks, evaluation.final_tasks))
    for label, tasks in heldout.items():
        if both := {task.id for task in tasks} & {task.id for task in train[label]}:
            raise ValueError(
                f'{label}: task "{min(both)}" is trained on and held out ({len(both)} such tasks); remove it from '
                "env.data or env.heldout"
            )
    if recipe.sft.updates and not recipe.sft.data:
        for label, each in environments.datasets.items():
            if not can_demonstrate(each.make()):
                raise ValueError(
                    f"{label} cannot demonstrate; give it a method demonstrate(noise, random) or set sft.data"
                )


def check_model(recipe: Recipe, model: CausalLM, tokenizer: ChatTokenizer) -> None:
    """Refuse a model that would not be computed exactly, and teachers that do not fit it, before it is trained."""
    policy = policy_of(recipe, model)
    if recipe.engine.name == "slots":
        for window, _ in windows(model.config.get_text_config()):
            check_window(window, context_of(recipe))
    check_vocabularies(recipe, tokenizer)
    top_k, most = recipe.distill.top_k, len(policy.output)
    if recipe.distill.coefficient and top_k > most:
        raise ValueError(f"distill.top_k = {top_k} must be from 1 to {most}, the tokens that both models know")

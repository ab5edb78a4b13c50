"""Every refusal of a run, before anything heavy: names that do not exist, settings that would be ignored, packages,
GPUs, models and tasks that are not there."""

from __future__ import annotations

import importlib.util

from turnwise.assemble import objective
from turnwise.assemble.engines import context_of
from turnwise.assemble.environments import agent_of, environment_makers, heldout_makers
from turnwise.assemble.learner import device_of, policy_of, reach_of
from turnwise.assemble.opponents import check_opponents
from turnwise.assemble.rollout_workers import check_workers
from turnwise.assemble.servers import check_access
from turnwise.cluster.shard import DISPATCHED
from turnwise.data.catalogue import model_folder
from turnwise.data.hub import PREFIX, HubName, Say
from turnwise.data.named_models import named_models, with_commits
from turnwise.engines.slots.model import check_window
from turnwise.envs.capabilities import can_demonstrate
from turnwise.learn.model_checks import why_unshared, windows
from turnwise.learn.policy import load_tokenizer
from turnwise.pretrained import CausalLM, ChatTokenizer
from turnwise.recipe.schema import Recipe
from turnwise.rollout.environments import Environments
from turnwise.runs.checkpoint import check_model_folder
from turnwise.runs.trackers.names import check_installed as check_trackers
from turnwise.serve.endpoint import check_installed

FEW_TASKS = 512
"""A dataset with no more tasks than this can be learned by heart..."""
MANY_VISITS = 4
"""...by a run that visits each of them so often."""


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
    check_workers(recipe)
    objective.check(recipe)
    check_packages(recipe)
    check_gpus(recipe)
    if recipe.lora.rank and (recipe.cluster.tp > 1 or recipe.cluster.ep > 1):
        raise ValueError(
            "lora.rank: adapters are not divided with the layers or experts they belong to; set cluster.tp = 1 and "
            "cluster.ep = 1, and divide the weights by cluster.fsdp"
        )


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
    names = (recipe.optimizer.name, recipe.critic.optimizer.name, recipe.sft.optimizer.name)
    if "adamw_8bit" in names and importlib.util.find_spec("torchao") is None:
        raise ValueError('optimizer.name = "adamw_8bit" needs torchao: pip install "turnwise[torchao]"')
    check_engine_packages(recipe)


def check_engine_packages(recipe: Recipe) -> None:
    """Refuse an engine that is not installed, or servers that nobody could ask."""
    name, vllm = recipe.engine.name, recipe.engine.vllm
    if name == "slots":
        return
    needed = {"aiohttp": f"{name}-client"} if recipe.engine.servers else {"vllm": "vllm"}
    if vllm.transfer != "file":
        needed["vllm"] = "vllm"
    for package, extra in needed.items():
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f'engine.name = "{name}" needs {package}: pip install "turnwise[{extra}]" (see docs/guides/{name}.md)'
            )
    check_access(recipe)
    if name == "vllm":
        check_vllm_routes(recipe)
    elif recipe.model.router_replay:
        raise ValueError(
            'model.router_replay needs routes, which engine.name = "sglang" does not record; set engine.name = "vllm" '
            'or "slots"'
        )


def check_vllm_routes(recipe: Recipe) -> None:
    """Refuse routes of a vLLM that cannot give them."""
    local = recipe.model.router_replay and not recipe.engine.vllm.servers
    if local and device_of(recipe) == "cpu" and importlib.util.find_spec("triton") is None:
        raise ValueError(
            'model.router_replay with engine.name = "vllm": vLLM gives routes with Triton only, which has to be built '
            'for CPUs; set engine.name = "slots", or name servers in engine.vllm.servers'
        )


def check_gpus(recipe: Recipe) -> None:
    """Refuse settings of GPUs where there is none."""
    vllm = recipe.engine.vllm
    if device_of(recipe) != "cuda" and (
        gpus := {"transfer", "gpu_memory_utilization", "tensor_parallel_size", "sleep"} & set(vllm.changed)
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


def check_parts(recipe: Recipe, model: CausalLM) -> None:
    """Refuse to divide a model that transformers cannot divide so."""
    cluster, text, name = recipe.cluster, model.config.get_text_config(), type(model).__name__
    if cluster.ep > 1:
        if DISPATCHED not in model.ep_plan.values():
            raise ValueError(
                f"cluster.ep = {cluster.ep}: transformers has no plan that sends tokens to the experts of {name}; "
                "set it to 1"
            )
        experts = next((getattr(text, each) for each in EXPERTS if getattr(text, each, None)), 0)
        if experts % cluster.ep:
            raise ValueError(f"cluster.ep = {cluster.ep} must divide the {experts} experts of this model; lower it")
    if cluster.cp * cluster.tp > text.num_attention_heads:
        raise ValueError(
            f"cluster.cp = {cluster.cp} and cluster.tp = {cluster.tp} are together more than the "
            f"{text.num_attention_heads} attention heads of this model; lower cluster.cp"
        )
    if cluster.tp > 1:
        if not model.tp_plan:
            raise ValueError(f"cluster.tp = {cluster.tp}: transformers has no plan to divide {name}; set it to 1")
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        if heads % cluster.tp:
            raise ValueError(
                f"cluster.tp = {cluster.tp} must divide the {heads} key-value heads of this model; lower it"
            )
        if packed := packed_weights(model):
            experts_too = DISPATCHED in model.ep_plan.values() and cluster.ep == 1
            instead = (
                f"set cluster.ep = {cluster.tp} too, which divides experts whole" if experts_too else "set it to 1"
            )
            if cluster.ep == 1 or not packed <= model.ep_plan.keys():
                raise ValueError(
                    f"cluster.tp = {cluster.tp} would divide {min(packed)} in parts that no checkpoint can hold; "
                    f"{instead}"
                )


def packed_weights(model: CausalLM) -> set[str]:
    """Weights that have two in one, of which tensor parallel takes a part each: such a part is in two pieces."""
    return {name for name, style in model.tp_plan.items() if style.startswith("packed_")}


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""How configs call the number of experts."""


def check_tasks(recipe: Recipe, environments: Environments) -> None:
    """Refuse datasets that lack tasks, that train on held-out ones, or that nobody can demonstrate; their tasks are
    drawn once."""
    train = environments.tasks("train")
    heldout = environments.tasks("heldout", recipe.evaluation.most_tasks)
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


def few_tasks(recipe: Recipe, environments: Environments) -> list[str]:
    """A warning for each dataset whose tasks are few enough to be learned by heart (docs/explanation/learning.md)."""
    total = sum(entry.weight for entry in recipe.env)
    warnings = []
    for entry in recipe.env:
        num_tasks = len(environments.tasks("train")[entry.label])
        visits = recipe.steps * recipe.groups_per_step * entry.weight / total / num_tasks
        if entry.fresh or num_tasks > FEW_TASKS or visits < MANY_VISITS:
            continue
        more = "give more in env.data" if entry.data else "raise env.tasks.count, or set env.fresh=true"
        warnings.append(
            f"{entry.label} has {num_tasks} training tasks, and {recipe.steps} steps visit each {visits:.0f} times: "
            f"few enough to be learned by heart; {more}"
        )
    return warnings


def check_model(recipe: Recipe, model: CausalLM, tokenizer: ChatTokenizer) -> None:
    """Refuse a model that would not be computed exactly, and teachers that do not fit it, before it is trained. A model
    that has no weights here is checked by its config and its first layers."""
    if model.device.type == "meta":
        reach_of(recipe, model)
    else:
        policy_of(recipe, model)
    check_parts(recipe, model)
    if recipe.engine.name == "slots":
        if reason := why_unshared(model):
            raise ValueError(f'this model {reason}, and not by the slot engine either; set engine.name = "vllm"')
        for window, _ in windows(model.config.get_text_config()):
            check_window(window, context_of(recipe))
    check_vocabularies(recipe, tokenizer)
    top_k, most = recipe.distill.top_k, len(model.get_output_embeddings().weight)
    if recipe.distill.coefficient and top_k > most:
        raise ValueError(f"distill.top_k = {top_k} must be from 1 to {most}, the tokens that both models know")

"""The provenance of a warm start: all that it depends on, by which a cached one is found, or not found any more.

All of the recipe counts, but for what is listed here with the reason. So a new key counts until somebody says why it
does not. Beside the recipe count the content of files that it names, the code of environments and agents, our own code,
and what computes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from turnwise.assemble.environments import environment_class
from turnwise.assemble.learner import device_of
from turnwise.data.catalogue import model_folder
from turnwise.data.digests import digest_of, digests_in
from turnwise.data.sources import code_of, code_of_ours
from turnwise.envs.adapters import ADAPTERS
from turnwise.learn.lora import base_of
from turnwise.learn.masters import MASTERS
from turnwise.recipe.environment import EnvironmentConfig
from turnwise.recipe.schema import Recipe

AFTER = "is of the training that comes after"
SAMPLES = "is of what samples, and demonstrations are not sampled"
PLACE = "says where or how quickly things happen, not what"

CANNOT_MATTER: Mapping[str, str] = {
    "out": PLACE,
    "steps": AFTER,
    "max_lag": AFTER + "; the threads that it leaves are counted",
    "trackers": AFTER,
    "groups_per_step": AFTER,
    "groups_per_update": AFTER,
    "epochs": AFTER,
    "lora": AFTER + ": the warm start trains the model's own weights",
    "env.batching": SAMPLES,
    "env.concurrency.actors": SAMPLES,
    "env.concurrency.max_concurrent_agents": PLACE,
    "env.concurrency.max_open": PLACE,
    "endpoint": PLACE,
    "rollout.group_size": SAMPLES,
    "rollout.failures.retries": SAMPLES,
    "rollout.failures.min_attempts": AFTER,
    "rollout.failures.on_failure": AFTER,
    "rollout.failures.on_truncation": AFTER,
    "rollout.success_threshold": "is for metrics",
    "engine": SAMPLES,
    "weight_check": SAMPLES,
    "schedule.order": AFTER,
    "schedule.stale": AFTER,
    "schedule.max_rest": AFTER,
    "schedule.overlap_evaluations": AFTER,
    "schedule.stall_warning_seconds": "is for a warning",
    "guards.max_logprob_gap": AFTER,
    "filter": AFTER,
    "credit": AFTER,
    "weighting": AFTER,
    "loss": AFTER,
    "entropy": AFTER,
    "kl": AFTER,
    "correction": AFTER,
    "teacher": AFTER,
    "distill": AFTER,
    "critic": AFTER,
    "optimizer": AFTER,
    "evaluation": AFTER,
    "sft.remake": "says whether to make it, not what it is",
    "checkpoints": AFTER,
    "archive": AFTER,
    "screen": AFTER,
    "tracking": AFTER,
    "cluster.address": PLACE,
    "cluster.replicas": SAMPLES,
    "cluster.placement_seconds": PLACE,
    "cluster.answer_seconds": PLACE,
}
"""By key of the recipe, with all that is below it: why a warm start is the same whatever it says."""

COMPUTE = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
TEMPLATES = "additional_chat_templates"


def fingerprint(recipe: Recipe) -> str:
    """Changes with everything a warm start depends on."""
    return fingerprint_of(provenance(recipe))


def fingerprint_of(found: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(found, sort_keys=True).encode(), digest_size=8).hexdigest()


def provenance(recipe: Recipe) -> dict[str, Any]:
    """All that the warm start of a recipe depends on, as JSON."""
    return {
        "recipe": what_counts(recipe.model_dump(mode="json")),
        "model": {} if recipe.model.path == "tiny" else model_files(model_folder(recipe.model.path)),
        "files": dict(sorted((name, digest) for name, digest in files_of(recipe))),
        "code": code_of(
            [*(module for entry in recipe.env for module in modules_of(entry)), *module_of(recipe.sft.data)]
        ),
        "turnwise": code_of_ours(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in COMPUTE},
        "computes": {
            "device": device_of(recipe),
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count() if recipe.cluster.is_spread else None,
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
    }


def what_counts(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A recipe without what cannot matter."""
    counts: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{above}{key}"
        if name in CANNOT_MATTER:
            continue
        if isinstance(value, Mapping):
            counts[key] = what_counts(value, f"{name}.")
        elif name == "env":
            counts[key] = [what_counts(entry, f"{name}.") for entry in value]
        else:
            counts[key] = value
    return counts


def model_files(folder: Path) -> dict[str, str]:
    """The files that a model, its tokenizer and its templates are loaded from, and those of the model that adapters
    are for. What else is below a folder, an optimizer for instance, is not loaded."""
    found = {path.name: digest_of(path) for path in sorted(folder.iterdir()) if path.is_file()}
    for below in (TEMPLATES, MASTERS):
        if (folder / below).is_dir():
            found |= {f"{below}/{name}": digest for name, digest in digests_in(folder / below).items()}
    if (base := base_of(folder)) is not None:
        found |= {f"base/{name}": digest for name, digest in model_files(base).items()}
    return found


def files_of(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(path, digest) of the files that demonstrations are made of: wherever the recipe names one."""
    for text in (recipe.sft.data, *(text for entry in recipe.env for text in texts_in(entry.model_dump()))):
        for word in {text, *text.split()} - {""}:
            path = Path(word.removeprefix("hf:"))
            try:
                if path.is_file():
                    yield word, digest_of(path)
                elif path.is_dir() and (word.startswith("hf:") or word == recipe.sft.data):
                    yield from ((f"{word}/{name}", digest) for name, digest in digests_in(path).items())
            except (OSError, ValueError):  # no name of a file
                continue


def modules_of(entry: EnvironmentConfig) -> Iterator[str]:
    """Modules that an environment is made of: its class, what that derives from, and those that settings name."""
    yield from (kind.__module__ for kind in environment_class(entry.name).__mro__)
    for text in (ADAPTERS.get(entry.name.partition(":")[0], ""), *texts_in(entry.model_dump())):
        yield from (part for part in text.split(":") if MODULE.fullmatch(part))


def module_of(source: str) -> list[str]:
    """The module of a function that transcripts come from."""
    module, colon, _ = source.partition(":")
    return [module] if colon and module != "hf" and MODULE.fullmatch(module) else []


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from texts_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from texts_in(part)


def differences(one: Mapping[str, Any], other: Mapping[str, Any], above: str = "") -> list[str]:
    """Names of what two provenances say differently."""
    found = []
    for key in sorted({*one, *other}):
        left, right = one.get(key), other.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += differences(left, right, f"{above}{key} ")
        elif left != right:
            found.append(f"{above}{key}")
    return found

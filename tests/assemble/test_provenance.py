"""A cached warm start is found again where nothing it depends on has changed, and only there."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from support.assembling import warm_model
from support.running import micro_recipe
from turnwise.assemble import provenance as module
from turnwise.assemble.model import set_threads
from turnwise.assemble.provenance import CANNOT_MATTER, differences, fingerprint, provenance, what_counts
from turnwise.learn.learner import save_policy
from turnwise.learn.masters import MASTERS
from turnwise.learn.tiny import build_model, build_tokenizer
from turnwise.recipe.schema import Recipe


def keys_of(section: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every key that a recipe can have, tables before what is in them."""
    for name, field in section.model_fields.items():
        yield f"{above}{name}"
        inner = field.annotation
        if name == "env":
            inner = inner.__args__[0]
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys_of(inner, f"{above}{name}.")


KEYS = list(keys_of(Recipe))


def with_value(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    changed = json.loads(json.dumps(tree))
    *path, last = key.split(".")
    place: Any = changed
    for name in path:
        place = place[name][0] if name == "env" else place[name]
    place[last] = value
    return changed


@pytest.mark.parametrize("key", KEYS)
def test_every_key_counts_or_is_listed_with_a_reason(tmp_path: Path, key: str) -> None:
    tree = micro_recipe(tmp_path).model_dump(mode="json")
    parts = key.split(".")
    listed = [".".join(parts[:end]) for end in range(1, len(parts) + 1) if ".".join(parts[:end]) in CANNOT_MATTER]
    value = [{"another": 1}] if key == "env" else "another value"
    assert (what_counts(with_value(tree, key, value)) == what_counts(tree)) == bool(listed)
    assert all(len(CANNOT_MATTER[name].split()) >= 3 for name in listed)


def test_nothing_is_listed_that_is_no_key() -> None:
    assert set(CANNOT_MATTER) <= set(KEYS)


def test_a_key_added_later_changes_the_fingerprint() -> None:
    class Later(Recipe):
        momentum: float = 0.0

    one, other = (Later(env=({"name": "hops"},), momentum=value) for value in (0.0, 0.5))
    assert fingerprint(one) != fingerprint(other)


UNLIKE = [
    "steps=9",
    "max_lag=1",
    "schedule.stall_warning_seconds=1.0",
    "groups_per_step=8",
    "groups_per_update=2",
    "epochs=2",
    "guards.max_logprob_gap=0.5",
    "lora.rank=4",
    "rollout.group_size=7",
    "rollout.failures.retries=3",
    "rollout.failures.min_attempts=3",
    "rollout.failures.on_failure.name=pay",
    "rollout.failures.on_failure.value=-1.0",
    "rollout.failures.on_truncation=mask",
    "rollout.success_threshold=0.5",
    "engine.max_num_seqs=3",
    "engine.processes=2",
    "weight_check.every=3",
    "filter.name=dynamic_sampling",
    "credit.name=rloo",
    "weighting.name=constant",
    "weighting.value=0.1",
    "loss.name=cispo",
    "entropy=0.1",
    "kl.coefficient=0.1",
    "optimizer.learning_rate=0.5",
    "evaluation.every=1",
    "checkpoints.keep=7",
    "sft.remake=true",
]
"""Of everything that cannot matter, something."""


async def made(recipe: Recipe) -> dict[str, torch.Tensor]:
    set_threads(recipe)
    model, _ = await warm_model(recipe)
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


def test_what_cannot_matter_does_not(tmp_path: Path) -> None:
    plain, other = micro_recipe(tmp_path), micro_recipe(tmp_path, *UNLIKE)
    assert fingerprint(plain) == fingerprint(other)
    one = asyncio.run(made(plain))
    shutil.rmtree(tmp_path / "cache")
    two = asyncio.run(made(other))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    "override", ["sampling.temperature=0.7", "seed=1", "sft.noise=0.1", "max_tokens_per_microbatch=512"]
)
def test_what_matters_does(tmp_path: Path, override: str) -> None:
    assert fingerprint(micro_recipe(tmp_path)) != fingerprint(micro_recipe(tmp_path, override))


def test_the_content_of_demonstrations_counts(tmp_path: Path) -> None:
    data = tmp_path / "shown.jsonl"
    line = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "%s"}]}\n'
    data.write_text(line % "yes")
    recipe = micro_recipe(tmp_path, f"sft.data={data}")
    before = provenance(recipe)
    data.write_text(line % "noo")  # of the same size
    assert differences(before, provenance(recipe)) == [f"files {data}"]


def test_files_that_an_environment_is_given_count(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a")
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    recipe = micro_recipe(tmp_path)
    settings = {"settings": {"deep": [{"words": str(tmp_path / "words.txt")}]}, "tasks": {}}
    entry = recipe.env[0].model_copy(update={**settings, "data": str(tmp_path / "tasks.jsonl")})
    recipe = recipe.model_copy(update={"env": (entry,)})
    before = fingerprint(recipe)
    assert fingerprint(recipe) == before
    (tmp_path / "words.txt").write_text("b")
    between = fingerprint(recipe)
    (tmp_path / "tasks.jsonl").write_text("{ \n")
    assert len({before, between, fingerprint(recipe)}) == 3


def test_the_folder_in_which_a_run_is_started_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = micro_recipe(tmp_path)
    assert recipe.sft.data == ""
    before = fingerprint(recipe)
    (tmp_path / "notes.txt").write_text("of somebody else")
    assert provenance(recipe)["files"] == {}
    assert fingerprint(recipe) == before


def test_the_files_of_a_model_count_and_a_run_s_optimizer_does_not(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["a b c"])
    folder = tmp_path / "model"
    for seed in (0, 1):
        save_policy(build_model(tokenizer, 32, 1, 64, seed), tokenizer, tmp_path / str(seed))
    shutil.copytree(tmp_path / "0", folder)
    text = (tmp_path / "micro.toml", '[[env]]\nname = "hops"\n[sft]\nupdates = 1\n')
    text[0].write_text(text[1])
    from turnwise.recipe.parse import load_recipe

    recipe = load_recipe(text[0], [f"model.path={folder}"])
    before = provenance(recipe)
    (folder / "optimizer").mkdir()
    (folder / "optimizer" / "state").write_text("x")
    assert provenance(recipe) == before
    (folder / MASTERS).mkdir()
    (folder / MASTERS / "contents.json").write_text("{}")
    assert differences(before, provenance(recipe)) == ["model master_weights/contents.json"]
    shutil.rmtree(folder / MASTERS)
    shutil.copy(tmp_path / "1" / "model.safetensors", folder)
    assert differences(before, provenance(recipe)) == ["model model.safetensors"]
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert "model chat_template.jinja" in differences(before, provenance(recipe))


@pytest.mark.parametrize("package", ["torch", "transformers", "tokenizers"])
def test_versions_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    recipe = micro_recipe(tmp_path)
    before = provenance(recipe)
    honest = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0" if name == package else honest(name))
    assert differences(before, provenance(recipe)) == [f"versions {package}"]


def test_our_own_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = provenance(micro_recipe(tmp_path))
    monkeypatch.setattr(module, "code_of_ours", lambda: {**before["turnwise"], "envs/hops.py": "changed"})
    assert differences(before, provenance(micro_recipe(tmp_path))) == ["turnwise envs/hops.py"]

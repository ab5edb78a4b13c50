"""A whole run that samples on a played SGLang server: every load is the learner's weights."""

import asyncio
from typing import Any

import pytest

from engines.sglang.played import PlayedSglang
from support.running import SilentScreen, micro_recipe, train, untimed
from turnwise.assemble import engines as building
from turnwise.assemble import run as running
from turnwise.learn.learner import save_policy
from turnwise.learn.policy import load_model, load_tokenizer
from turnwise.testing.played_server import in_thread

SETTINGS = ("steps=2", "sft.updates=0", "evaluation.every=0", "evaluation.final_tasks=2")


def save_start(recipe, folder):
    """The model that a recipe starts from, as a folder that servers read."""

    async def work():
        async with running.training(recipe, SilentScreen(), asyncio.Event()) as run:
            learner: Any = run.parts.loop.learner
            save_policy(learner.policy.model, run.parts.tokenizer, folder)

    asyncio.run(work())


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_of_two_steps(tmp_path, monkeypatch, lag):
    """Its weights are checked after every load. The server begins with other ones."""
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path / "cache"))
    beginning = micro_recipe(tmp_path, *SETTINGS, f"out={tmp_path / 'beginning'}")
    save_start(beginning, tmp_path / "model")
    model, tokenizer = load_model(tmp_path / "model"), load_tokenizer(tmp_path / "model")
    for tensor in model.parameters():
        tensor.data.mul_(0.5)
    context = building.context_of(beginning)
    server = PlayedSglang(model, decode=tokenizer.decode, own_ends=[tokenizer.eos_token_id], context=context, slots=32)
    own_model = [f"model.path={tmp_path / 'model'}", "model.hidden=", "model.layers="]
    with in_thread(server):
        served = ["engine.name=sglang", f"engine.sglang.servers={server.url}", f"max_lag={lag}"]
        summary = train(micro_recipe(tmp_path, *SETTINGS, *own_model, *served, "weight_check.every=1"))
    assert summary["updates"] == 2
    lines = [line for line in untimed(tmp_path / "run" / "metrics.jsonl") if "gap/mean" in line]
    assert lines
    assert max(line["gap/mean"] for line in lines) < 1e-5
    versions = [int(load["weight_version"].rpartition(".")[2]) for load in server.loads]
    assert versions[0] == 0  # what the server began with is replaced
    assert versions[-2:] == [1, 2]

"""A weight sync that worked, and left a tied head stale.

Elsewhere embedding and output layer of the policy were one tensor, which the learner therefore published once. The
engine had made two of it. Every sync reported success and refreshed the embedding, while tokens were still drawn with
the output layer of the first version: a policy that nobody trained, and ratios that meant nothing.
"""

import asyncio
import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.acting import byte_tokenizer, run
from support.assembling import environments_for
from turnwise.assemble import run as building
from turnwise.assemble.models import ModelSource
from turnwise.engines.slots.engine import SlotEngine
from turnwise.engines.slots.model import SlotModel
from turnwise.envs.base import Reply
from turnwise.learn.tiny import build_model
from turnwise.messages import Message
from turnwise.recipe.parse import parse_recipe
from turnwise.schedule.stopping import RunStopped
from turnwise.schedule.workers import inline
from turnwise.training.loop import Progress, train, unchecked
from turnwise.types import Task

STEPS = 4


async def let_pass(weight_check, version):
    return {}


class Mood:
    """An environment that pays by whim, so that every step has something to learn."""

    @staticmethod
    def tasks(split, seed):
        return [Task(f"{split}-{number}", "mood") for number in range(8)]

    async def open(self, task):
        return Reply((Message("user", task.id),))

    async def step(self, message):
        return Reply((Message("user", "on"),), reward=float(len(message.content) % 2))

    async def close(self):
        return None


RECIPE = {
    "steps": STEPS,
    "groups_per_step": 4,
    "env": {"name": f"{__name__}:Mood"},
    "rollout": {
        "group_size": 4,
        "max_turns": 2,
        "max_prompt_tokens": 90,
        "max_action_tokens": 5,
        "max_trajectory_tokens": 100,
    },
    "optimizer": {"learning_rate": 1e-3},
    "loss": {"name": "ppo_clip", "anchor": "engine"},
}


class TwoTensors(SlotModel):
    """A model whose output layer is a copy of the embedding, and not the embedding itself."""

    def __init__(self, model, **settings):
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        super().__init__(model, **settings)


class StaleHead(TwoTensors):
    """Loads everything but the output layer: it is tied, so it comes with the embedding."""

    def load(self, weights, version):
        super().load({**weights, "lm_head.weight": self.model.get_output_embeddings().weight.detach()}, version)


async def trained(kind, max_logprob_gap, checked):
    """The steps of a run whose engine has weights of its own, by their gaps between engine and learner."""
    tokenizer = byte_tokenizer()
    model = build_model(tokenizer, hidden=32, layers=1, context=100, seed=0)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight

    def engine_of(recipe, model, renderer, version, workers):
        slot_model = kind(
            copy.deepcopy(model),
            slots=16,
            context=100,
            end_tokens=[renderer.end_token],
            decode=renderer.decode,
            dtype=torch.float32,
            version=version,
        )
        return SlotEngine(slot_model, run=inline, shares_weights=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "engine_of", engine_of)
        recipe = parse_recipe({**RECIPE, "guards": {"max_logprob_gap": max_logprob_gap}}, "test")
        patch.setattr(building, "metrics_at_start", let_pass)
        opened = building.run_parts(
            recipe, environments_for(recipe), ModelSource(model, tokenizer), Path("evaluations")
        )
        parts = await opened.__aenter__()
    loop = parts.loop if checked else replace(parts.loop, stages=replace(parts.loop.stages, arrived=unchecked))
    gaps = []

    async def after(progress, metrics, records, waiting):
        gaps.append(metrics["gap/mean"])

    try:
        await train(loop, Progress(), after, asyncio.Event())
    except RunStopped as stopped:
        raise AssertionError(f"stopped after step {len(gaps)}: {stopped}") from stopped
    finally:
        await opened.__aexit__(None, None, None)
    return gaps


def check_a_run_goes_through(kind, max_logprob_gap=0.0, checked=False):
    """A run is not stopped, because its engine draws with the weights that are trained."""
    gaps = run(trained(kind, max_logprob_gap, checked))
    assert len(gaps) == STEPS
    return gaps


@pytest.mark.parametrize("kind", [SlotModel, TwoTensors])
def test_an_engine_that_loads_everything_is_in_step(kind):
    assert max(check_a_run_goes_through(kind)) < 1e-5


def test_a_stale_head_is_caught_at_the_first_step_after_the_load():
    with pytest.raises(AssertionError, match="stopped after step 2: the engine's logprobs differ from the learner's"):
        check_a_run_goes_through(StaleHead)


def test_a_check_of_every_load_catches_it_a_step_earlier():
    with pytest.raises(AssertionError, match="stopped after step 1: the engine's .* after the load of version 1"):
        check_a_run_goes_through(StaleHead, max_logprob_gap=1e9, checked=True)
    assert max(check_a_run_goes_through(TwoTensors, checked=True)) < 1e-5


def test_a_stale_head_goes_unnoticed_without_the_check():
    """And drifts further away with every load."""
    first, *others = check_a_run_goes_through(StaleHead, max_logprob_gap=1e9)
    assert first < 1e-5
    assert others == sorted(others)
    assert others[0] > 1e-3

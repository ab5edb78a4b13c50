"""The parts of benchmarks/quickstart_trl.py that figures depend on: both sides play, see and train the same turns."""

import asyncio
import copy
import importlib
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.acting import attempted, byte_tokenizer, limits, renderer, says
from support.scripts import scripts_by_name
from turnwise.envs.hops import Hops
from turnwise.evaluation.evaluator import Evaluator
from turnwise.learn.tiny import build_model, build_tokenizer
from turnwise.rollout.scene import Attempt

WINDOWED = partial(Hops, window=True)
HOPS = next(iter(Hops.tasks("train", 0)))
SAYINGS = ["get amber", "nonsense that is cut short", "get cedar", "answer jade", "answer elm"]
"""Turn by turn."""


@pytest.fixture(scope="module")
def scripts():
    """The benchmark and its other files, which find each other by name."""
    names = ("trl_trainer", "trl_turns", "against_trl", "matrix", "quickstart_trl")
    with scripts_by_name():
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        del sys.modules[name]


def rollout_of(scripts, tokenizer=None, **bounds):
    bounds = {"max_action_tokens": 16, "max_turns": 5, **bounds}
    tasks = list(Hops.tasks("train", 0, 6))
    return tasks, scripts.trl_turns.TurnRollout(
        "shared", WINDOWED, {task.id: task for task in tasks}, tokenizer or byte_tokenizer(), limits(**bounds)
    )


@pytest.mark.parametrize("max_prompt_tokens", [4000, 130])
def test_an_attempt_has_the_turns_and_the_reward_that_turnwise_gives_it(scripts, max_prompt_tokens):
    tokenizer, render = byte_tokenizer(), renderer("managed")
    turns, sayings = iter(SAYINGS), iter(SAYINGS)
    bounds = {"max_prompt_tokens": max_prompt_tokens, "max_action_tokens": 16, "max_turns": 5}
    engine = says(lambda prompt, session, seed: next(turns), render=render)
    expected = asyncio.run(attempted(WINDOWED, engine, render=render, which=Attempt(0, "train", HOPS), **bounds))

    def sample(live):
        return [[*tokenizer.encode(next(sayings)), render.end_token][:16] for _ in live]

    _, rollout = rollout_of(scripts, **bounds)
    (found,) = asyncio.run(rollout.play([HOPS], sample))
    row = scripts.quickstart_trl.row_of(HOPS.id, expected)
    assert len(row["turns"]) == (4 if max_prompt_tokens == 4000 else 2)
    assert found.turns == row["turns"]
    assert found.reward == row["reward"]


def trainer_like(model, tokenizer, max_tokens):
    """As much of a GRPOTrainer as sampling needs; it samples greedily."""
    from transformers import GenerationConfig

    ends = [tokenizer.eos_token_id]
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max_tokens, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    return SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        generation_config=config,
        eos_token_ids=ends,
        _tokenizer=tokenizer,
    )


def test_going_on_from_shared_prefixes_samples_what_whole_prompts_give(scripts):
    tokenizer = build_tokenizer([])
    model = build_model(tokenizer, 32, 2, 1024, seed=0).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer.eos_token_id] *= 3  # which has actions end at different places
    trainer = trainer_like(model, tokenizer, 12)
    tasks, rollout = rollout_of(scripts, tokenizer, max_action_tokens=12, max_turns=3)
    tally = scripts.trl_trainer.Tally()
    twice = [task for task in tasks for _ in range(2)]
    shared = asyncio.run(rollout.play(twice, scripts.trl_turns.Shared(trainer, tally)))
    prefilled = 0

    def alone(live):
        nonlocal prefilled
        actions = []
        for attempt in live:
            ids = torch.tensor([attempt.known])
            prefilled += ids.numel()
            mask = torch.ones_like(ids)
            whole = model.generate(ids, attention_mask=mask, generation_config=trainer.generation_config)
            actions.append(whole[0, ids.shape[1] :].tolist())
        return actions

    one_by_one = asyncio.run(rollout.play(twice, alone))
    assert [attempt.turns for attempt in shared] == [attempt.turns for attempt in one_by_one]
    assert len({len(action) for attempt in shared for _, action in attempt.turns}) > 1
    assert tally.prefilled < 0.6 * prefilled


def test_a_batch_has_a_row_for_every_turn_and_rows_without_weight_up_to_a_whole_number_of_passes(scripts):
    played = [
        scripts.trl_turns.Played(None, turns=[([1, 2, 3], [4, 5])] * count, reward=reward)
        for count, reward in ((2, 1.0), (3, 0.0), (1, 0.0), (1, 0.0))
    ]
    played[1].turns[0] = ([1], [4, 5, 6])
    batch = scripts.trl_turns.batch_of(played, 2, 4, gap=0)
    assert {len(batch[name]) for name in batch if batch[name].dim()} == {8}
    assert batch["prompt_ids"][2].tolist() == [0, 0, 1]
    assert batch["prompt_mask"][2].tolist() == [0, 0, 1]
    assert batch["completion_ids"][0].tolist() == [4, 5, 0]
    assert batch["completion_mask"][2].tolist() == [1, 1, 1]
    assert batch["tool_mask"].sum(1).tolist() == [3] * 7 + [0]
    assert int(batch["num_items_in_batch"]) == 15
    up = 0.5 / (0.5**0.5 + 1e-4)
    assert batch["advantages"].tolist() == pytest.approx([up] * 2 + [-up] * 3 + [0.0] * 3)
    lean = scripts.trl_turns.batch_of(played, 2, 4, gap=0, lean=True)
    assert lean["tool_mask"].sum(1).tolist() == [3] * 5 + [0] * 3
    assert int(lean["num_items_in_batch"]) == 15
    alike = scripts.trl_turns.batch_of(played[2:], 2, 4, gap=0, lean=True)
    assert alike["tool_mask"].sum(1).tolist() == [0] * 4


def run_of(side, seed, cpu, reached):
    steps = [{"cpu": cpu, "wall": 2 * cpu, "reward": 0.5, "prefilled": 20, "sampled": 10, "trained": 30}] * 4
    evaluations = [{"step": 2 * n, "greedy": greedy, "sampled": 0.5} for n, greedy in enumerate(reached)]
    return {"cell": {"side": side, "seed": seed}, "steps": steps, "evaluations": evaluations, "attempts": 8}


def test_seconds_to_the_goal_are_those_of_the_steps_before_it(scripts, capsys):
    own, other = run_of("turnwise", 0, 1.0, [0.4, 0.9, 1.0]), run_of("trl shared", 0, 3.0, [0.4, 0.5, 1.0])
    found = scripts.quickstart_trl.goal(own, "greedy")
    assert (found["step"], found["cpu"], found["wall"]) == (2, 2.0, 4.0)
    assert scripts.quickstart_trl.goal(own, "sampled") is None
    scripts.quickstart_trl.report([own, other])
    printed = capsys.readouterr().out
    assert "a step            3.00 (3.00 to 3.00), 1 seeds" in printed
    assert "to 0.90 greedy    6.00 (6.00 to 6.00), 1 seeds" in printed
    assert "to 0.90 sampled   none, 1 without" in printed


# ---------------------------------------------------------------- TRL itself


class Fickle(Hops):
    """Pays for nothing one can learn, so that also an untrained model is paid now and then."""

    async def step(self, message):
        reply = await super().step(message)
        return replace(reply, reward=float(sum(message.content.encode()) % 2))


@pytest.mark.slow
def test_trl_computes_the_gradient_of_the_same_turns(scripts, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    script = scripts.quickstart_trl
    monkeypatch.setitem(sys.modules, "fickle", SimpleNamespace(Fickle=Fickle))
    recipe_of = script.recipe_of

    def fickle(seed, **how):
        recipe = recipe_of(seed, **how)
        env = recipe.env[0].model_copy(update={"name": "fickle:Fickle", "dataset": "hops"})
        rollout = recipe.rollout.model_copy(update={"max_prompt_tokens": 300, "max_trajectory_tokens": 308})
        return recipe.model_copy(update={"env": (env,), "rollout": rollout})

    monkeypatch.setattr(script, "recipe_of", fickle)
    tokenizer = copy.deepcopy(byte_tokenizer())
    script.save_policy(build_model(tokenizer, 32, 2, 1024, seed=0), tokenizer, tmp_path / "model")
    request = {"seed": 0, "quick": True, "parts": 4, "attention": "sdpa", "every": 2, "variant": "shared"}
    request |= {"folder": "model", "gradient": "gradient", "rows": "rows", "weights": "weights", "scratch": "."}
    monkeypatch.chdir(tmp_path)
    kept = script.Kept(2, 3)
    own = asyncio.run(script.train_turnwise(request, kept))
    assert len(own["steps"]) == 3
    assert list(kept.weights) == [0, 2, 3]
    assert len({row["reward"] for row in json.loads(Path("rows").read_text())}) > 1
    assert script.train_trl({**request, "variant": "replay"}, script.Kept(2, 3))["gradient"] < 1e-3
    steps = script.train_trl(request, script.Kept(2, 3))["steps"]
    assert len(steps) == 3
    assert all(step["sampled"] > 0 and step["trained"] >= step["sampled"] for step in steps)
    torch.save(kept.weights, "weights")
    seen = {}

    class Spy(Evaluator):
        async def evaluate_together(self, version, *given, **named):
            engine: Any = self.engine
            state = engine.model.model.state_dict()
            seen[version] = {name: value.clone() for name, value in state.items()}
            return await super().evaluate_together(version, *given, **named)

    monkeypatch.setattr(script, "Evaluator", Spy)
    judged = asyncio.run(script.judge(request))["evaluations"]
    assert [one["step"] for one in judged] == list(seen) == [0, 2, 3]
    for step, weights in kept.weights.items():
        assert all(torch.equal(value, seen[step][name]) for name, value in weights.items())
    assert not all(torch.equal(value, seen[3][name]) for name, value in seen[0].items())

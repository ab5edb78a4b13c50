"""The parts of benchmarks/against_trl.py that figures depend on: both sides play, see and train the same."""

import asyncio
import copy
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from support.acting import attempted, byte_tokenizer, limits, renderer, says
from support.assembling import environments_for
from support.making import make_trajectory
from support.scripts import scripts_by_name
from turnwise.assemble.model import tiny_texts
from turnwise.envs.hops import Hops
from turnwise.learn.tiny import build_model, build_tokenizer
from turnwise.messages import Message
from turnwise.rollout.scene import Attempt

HOPS = next(iter(Hops.tasks("train", 0)))
SAYINGS = ["get amber", "nonsense that is cut short", "get cedar", "answer jade", "answer elm"]
"""Turn by turn."""


@pytest.fixture(scope="module")
def scripts():
    """The benchmark and its two other files, which find each other by name."""
    names = ("pages", "trl_trainer", "against_trl")
    with scripts_by_name():
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        del sys.modules[name]


# ---------------------------------------------------------------- pages


def opened(pages, task, says):
    """The replies to what is said in an attempt, and the environment."""

    async def play():
        environment = pages.Pages()
        first = await environment.open(task)
        replies = []
        while not (replies and replies[-1].finished):
            said = says(environment, len(replies))
            replies.append(await environment.step(Message("assistant", said)))
        return first, replies

    return asyncio.run(play())


def test_an_expert_reads_to_the_right_page_in_eight_turns(scripts):
    for task in list(scripts.pages.Pages.tasks("train", 0, 5)):
        _, replies = opened(scripts.pages, task, lambda environment, turn: environment.demonstrate(0.0, Random(0)))
        assert [reply.outcome for reply in replies] == [0.0] * 7 + [1.0]


def test_one_wrong_page_or_word_costs_the_outcome_and_no_turn(scripts):
    task = next(iter(scripts.pages.Pages.tasks("train", 0, 1)))
    for wrong in ("open sesame", "shut the book", ""):
        says = lambda environment, turn, wrong=wrong: wrong if turn == 3 else environment.demonstrate(0.0, Random(0))
        _, replies = opened(scripts.pages, task, says)
        assert len(replies) == 8
        assert not any(reply.outcome for reply in replies)
        assert replies[3].messages == replies[2].messages


def test_pages_have_200_to_400_tokens(scripts):
    recipe = scripts.against_trl.recipe_of("pages-1M")
    tokenizer = build_tokenizer(asyncio.run(tiny_texts(recipe, environments_for(recipe), 64)))
    for task in scripts.pages.Pages.tasks("train", 0, 20):
        _, replies = opened(scripts.pages, task, lambda environment, turn: environment.demonstrate(0.3, Random(turn)))
        lengths = [len(tokenizer.encode(reply.messages[0].content)) for reply in replies[:-1]]
        assert min(lengths) >= 200
        assert max(lengths) <= 400


# ---------------------------------------------------------------- rollouts


def rollout_of(scripts, variant="cached", tokenizer=None, **bounds):
    bounds = {"max_action_tokens": 16, "max_turns": 5, **bounds}
    tokenizer = tokenizer or byte_tokenizer()
    return scripts.trl_trainer.Rollout(variant, Hops, {HOPS.id: HOPS}, tokenizer, limits(**bounds))


@pytest.mark.parametrize("max_prompt_tokens", [4000, 170])
def test_an_attempt_has_the_tokens_and_the_reward_that_turnwise_gives_it(scripts, max_prompt_tokens):
    tokenizer, end = byte_tokenizer(), renderer().end_token
    turns = iter(SAYINGS)
    bounds = {"max_prompt_tokens": max_prompt_tokens, "max_action_tokens": 16, "max_turns": 5}
    engine = says(lambda prompt, session, seed: next(turns))
    expected = asyncio.run(attempted(Hops, engine, which=Attempt(0, "train", HOPS), **bounds))
    sayings = iter(SAYINGS)

    def sample(live):
        return [[*tokenizer.encode(next(sayings)), end][:16] for _ in live]

    (found,) = asyncio.run(rollout_of(scripts, **bounds).play([HOPS], sample))
    row = scripts.against_trl.row_of(HOPS.id, expected)
    assert len(expected.turns) == (4 if max_prompt_tokens == 4000 else 2)
    assert found.prompt == row["prompt"]
    assert found.completion == row["completion"]
    assert found.sampled == row["sampled"]
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


def test_going_on_from_the_cache_samples_what_whole_prompts_give(scripts):
    tokenizer = build_tokenizer([])
    model = build_model(tokenizer, 32, 2, 1024, seed=0).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer.eos_token_id] *= 3  # which has actions end at different places
    trainer = trainer_like(model, tokenizer, 12)
    tasks = list(Hops.tasks("train", 0, 6))
    rollout = rollout_of(scripts, tokenizer=tokenizer, max_action_tokens=12, max_prompt_tokens=340)
    tally = scripts.trl_trainer.Tally()
    cached = asyncio.run(rollout.play(tasks, scripts.trl_trainer.Cached(trainer, tally)))

    def alone(live):
        actions = []
        for attempt in live:
            ids = torch.tensor([attempt.known])
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=trainer.generation_config
            )
            actions.append(whole[0, ids.shape[1] :].tolist())
        return actions

    one_by_one = asyncio.run(rollout.play(tasks, alone))
    assert [attempt.completion for attempt in cached] == [attempt.completion for attempt in one_by_one]
    lengths = [sum(attempt.sampled) for attempt in cached]
    assert len(set(lengths)) > 1, "attempts of one length would not show a wrong gap"
    # Every token of a conversation once, the last of every action but the last with what follows it, and the gaps.
    whole = sum(len(attempt.known) for attempt in one_by_one)
    assert tally.prefilled < 1.5 * whole


# ---------------------------------------------------------------- figures


def test_a_trajectory_is_one_sequence_with_a_mask(scripts):
    trajectory = make_trajectory([(5, 2), (3, 1), (2, 2)], outcome=1.0)
    row = scripts.against_trl.row_of("a", trajectory)
    assert len(row["prompt"]) == 5
    assert row["sampled"] == [1, 1, 0, 0, 0, 1, 0, 0, 1, 1]
    assert row["completion"][-2:] == trajectory.turns[-1].action.tolist()
    with pytest.raises(AssertionError):
        scripts.against_trl.row_of("a", make_trajectory([(5, 2), (3, 1)], growing=False))


def line(side, variant, cpu):
    steps = [{"wall": 9.0, "cpu": 9.0, "reward": 0.0, "prefilled": 900, "sampled": 1, "trained": 900}]
    steps += [{"wall": c + 0.1, "cpu": c, "reward": 0.5, "prefilled": 20, "sampled": 10, "trained": 30} for c in cpu]
    return {"case": "hops-1M", "threads": 1, "side": side, "variant": variant, "steps": steps, "peak": 9, "resting": 5}


def test_figures_leave_the_first_step_out_and_compare_with_the_fastest(scripts, capsys):
    found = scripts.against_trl.figures_of(line("trl", "cached", [2.0, 4.0, 3.0]))
    assert (found["cpu"], found["least"], found["most"]) == (3.0, 2.0, 4.0)
    assert (found["prefilled"], found["trained"]) == (2.0, 3.0)
    lines = [line("turnwise", "", [1.0, 1.0]), line("trl", "generate", [5.0, 5.0]), line("trl", "cached", [3.0, 3.0])]
    scripts.against_trl.report([*lines, {**line("trl", "replay", [1.0]), "gradient": 2e-4}])
    printed = capsys.readouterr().out
    rows = {row[:18].strip(): row[18:].split() for row in printed.splitlines()[2:]}
    assert [rows[name][4] for name in ("turnwise", "trl generate", "trl cached")] == ["3.00", "0.60", "1.00"]
    assert "TRL against turnwise: 2.0e-04" in printed


# ---------------------------------------------------------------- TRL itself


class Moody(Hops):
    """Pays for nothing one can learn, so that also an untrained model is paid now and then."""

    async def step(self, message):
        reply = await super().step(message)
        return replace(reply, reward=float(sum(message.content.encode()) % 2))


@pytest.mark.slow
def test_trl_computes_the_gradient_of_the_same_attempts(scripts, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    against = scripts.against_trl
    monkeypatch.setitem(sys.modules, "moody", SimpleNamespace(Moody=Moody))
    recipe_of = against.recipe_of

    def moody(case, **how):
        recipe = recipe_of(case, **how)
        env = recipe.env[0].model_copy(update={"name": "moody:Moody", "dataset": "hops"})
        rollout = recipe.rollout.model_copy(update={"max_prompt_tokens": 900, "max_trajectory_tokens": 908})
        return recipe.model_copy(update={"env": (env,), "rollout": rollout})

    monkeypatch.setattr(against, "recipe_of", moody)
    tokenizer = copy.deepcopy(byte_tokenizer())
    against.save_policy(build_model(tokenizer, 32, 2, 1024, seed=0), tokenizer, tmp_path / "model")
    request = {"case": "hops-1M", "threads": 1, "steps": 2, "quick": True, "micro_batch": 4, "attention": "sdpa"}
    request |= {"folder": "model", "gradient": "gradient", "rows": "rows", "scratch": "."}
    monkeypatch.chdir(tmp_path)
    own = asyncio.run(against.train_turnwise(request))
    assert len(own["steps"]) == 2
    assert len({row["reward"] for row in json.loads(Path("rows").read_text())}) > 1
    assert against.train_trl({**request, "variant": "replay"})["gradient"] < 1e-3
    sampled = against.train_trl({**request, "variant": "cached"})["steps"]
    assert len(sampled) == 2
    assert all(step["sampled"] > 0 and step["trained"] >= step["sampled"] for step in sampled)

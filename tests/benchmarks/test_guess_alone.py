"""The game of benchmarks/guess_alone.py is the environment's, and its tasks are split."""

import asyncio

import pytest
import torch

from support.scripts import script_module
from turnwise.envs.guess import Guess
from turnwise.messages import Message
from turnwise.types import Task


@pytest.fixture(scope="module")
def alone():
    with script_module("guess_alone") as module:
        yield module


@pytest.mark.parametrize("heldout", [True, False])
def test_tasks_are_of_their_split_and_secrets_within_bounds(alone, heldout):
    low, high, secret = alone.draw(300, torch.Generator().manual_seed(0), heldout=heldout)
    assert len(low) == 300
    assert bool((alone.is_heldout(low, high) == heldout).all())
    assert bool(((low <= secret) & (secret <= high) & (low < high)).all())
    assert bool((low >= 1).all())
    assert bool((high <= alone.HIGH).all())


async def replayed(alone, task, guesses):
    """(states that the environment comes to, outcome) after guesses."""
    environment = Guess(guesses=alone.GUESSES, window=True)
    await environment.open(task)
    states, outcome = [], 0.0
    for guess in guesses:
        states.append([environment.low, environment.high, alone.HIGH + environment.left])
        outcome = (await environment.step(Message("assistant", str(guess)))).outcome
    return states, outcome


def test_the_game_is_that_of_the_environment(alone):
    """The same random guesses come to the same bounds, guess by guess, and to the same outcome."""
    tasks = alone.draw(40, torch.Generator().manual_seed(1), heldout=False)
    torch.manual_seed(2)
    played = alone.play(alone.at_random, *tasks)
    for place, (low, high, secret) in enumerate(zip(*(part.tolist() for part in tasks), strict=True)):
        made = played.made[place]
        task = Task("task", "guess", {"low": low, "high": high, "secret": secret})
        states, outcome = asyncio.run(replayed(alone, task, played.guesses[place][made].tolist()))
        assert played.states[place][made].tolist() == states
        assert outcome == played.outcomes[place]


def test_credit_compares_the_attempts_of_a_group(alone):
    tasks = alone.draw(2, torch.Generator().manual_seed(3), heldout=False)
    made = alone.play(alone.at_random, *(part.repeat_interleave(alone.GROUP) for part in tasks))
    advantages = alone.advantages_of(made, None, None, "grpo").reshape(2, alone.GROUP, alone.GUESSES)
    assert advantages.sum(1).abs().max() < 1e-4
    assert bool((advantages == advantages[..., :1]).all())
    assert bool((advantages[..., 0].flatten()[made.outcomes == 1] >= 0).all())


def test_a_whole_case_runs(alone):
    found = alone.train(alone.Case(3, "critic", steps=2, attempts=16), seed=0)
    assert found["attempts"] == 32
    assert 0.85 < found["bisection"] <= 1.0
    assert 0.6 < found["random"] < 0.85

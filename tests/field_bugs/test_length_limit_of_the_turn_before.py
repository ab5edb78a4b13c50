"""A length limit that was checked against the turn before.

Elsewhere the agent loop compared the tokens at hand with the limit, then rendered the prompt anew from the history and
sent that. The tokens at hand were those of the turn before, so a prompt could be over the limit by as much as one
observation is long: where 4k tokens were allowed, up to 10k were sent.
"""

from dataclasses import dataclass, field

import pytest

from support.acting import TASK, Puppet, renderer, run, says, user
from turnwise.engines.base import Sampling
from turnwise.envs.base import Reply
from turnwise.rollout.attempt import run_attempt
from turnwise.rollout.limits import Limits
from turnwise.rollout.scene import Attempt, Scene
from turnwise.types import Status

BOUNDS = {"max_turns": 20, "max_action_tokens": 40, "max_trajectory_tokens": 305}
OBSERVATION = "found: " + "x" * 60


def check_prompts_are_within_the_limits(kind, history, longest_prompt=300, context=10_000):
    """Every prompt that is sent fits and leaves room for its action; the first that does not ends the attempt."""
    limits, render = kind(max_prompt_tokens=longest_prompt, **BOUNDS), renderer(history)
    engine = says("y" * 100, render=render, context=context)
    environment = Puppet(*[Reply(user(OBSERVATION))] * 20)
    which = Attempt(0, "train", TASK)
    made = run(run_attempt(which, lambda: environment, Scene(engine, render, Sampling(200), limits)))
    assert len(engine.prompts) == len(made.turns) > 1
    longest = max(len(prompt) for prompt in engine.prompts)
    assert longest <= limits.max_prompt_tokens, f"a prompt of {longest} tokens was sent"
    for turn in made.turns:
        assert 0 < len(turn.action) <= limits.max_action_tokens
        whole = len(turn.prompt) + len(turn.action)
        assert whole <= min(limits.max_trajectory_tokens, context), f"a call of {whole} tokens was made"
    assert made.status is Status.too_long
    spoken = [message for turn in made.turns for message in (turn.said, *turn.heard)]
    unsent = len(render.first((*user("go"), *spoken)).tokens)
    assert unsent > min(limits.max_prompt_tokens, context - 1), f"an attempt ended, and {unsent} tokens would have fit"


@dataclass(frozen=True, slots=True)
class LimitsOfTheTurnBefore(Limits):
    """Limits that are asked before the prompt is rendered: they know the prompt of the turn before."""

    known: list[int] = field(default_factory=list)

    def room_for_action(self, prompt_tokens, context):
        self.known.append(prompt_tokens)
        return Limits.room_for_action(self, self.known[-2:][0], context)


@pytest.mark.parametrize(("longest_prompt", "context"), [(300, 10_000), (300, 250), (260, 10_000)])
@pytest.mark.parametrize("history", ["extend", "rerender"])
def test_limits_are_checked_on_the_prompt_that_is_sent(history, longest_prompt, context):
    check_prompts_are_within_the_limits(Limits, history, longest_prompt, context)


@pytest.mark.parametrize(("longest_prompt", "sent"), [(300, 405), (260, 277)])
@pytest.mark.parametrize("history", ["extend", "rerender"])
def test_a_check_of_the_turn_before_is_caught(history, longest_prompt, sent):
    with pytest.raises(AssertionError, match=f"a prompt of {sent} tokens was sent"):
        check_prompts_are_within_the_limits(LimitsOfTheTurnBefore, history, longest_prompt)


def test_an_action_that_no_longer_fits_is_caught():
    """Room for an action, too, was what the turn before had left of it."""

    @dataclass(frozen=True, slots=True)
    class RoomOfTheTurnBefore(LimitsOfTheTurnBefore):
        def room_for_action(self, prompt_tokens, context):
            room = LimitsOfTheTurnBefore.room_for_action(self, prompt_tokens, context)
            return room if prompt_tokens <= self.max_prompt_tokens else 0

    with pytest.raises(AssertionError, match="a call of 317 tokens was made"):
        check_prompts_are_within_the_limits(RoomOfTheTurnBefore, "extend")

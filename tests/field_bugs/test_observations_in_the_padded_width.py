"""Observations in the padded width.

Elsewhere a row's response held the action and the observation that came after it, which the model saw in the next row's
prompt anyway, and the last one never. Rows were padded to the longest: with limits of 4096 and 500 tokens a search
agent's rows were 9434 tokens wide, where 3897 would do.
"""

from dataclasses import replace

import numpy as np
import pytest

from support.acting import Puppet, attempted, renderer, run, says, user
from support.making import make_turn
from turnwise.engines.base import Completion
from turnwise.envs.base import Reply
from turnwise.interop.skyrl import to_generator_output
from turnwise.plan.pack import pack
from turnwise.rollout import agent
from turnwise.types import Group, Status, Task, turns_of

BOUNDS = {"max_turns": 6, "max_prompt_tokens": 4096, "max_action_tokens": 500, "max_trajectory_tokens": 4596}
FOUND = (400, 600, 450, 700, 500, 5300)
"""Characters, which are tokens here, of what a search finds at each of six turns. The last is heard by nobody."""
QUERIES = (60, 90, 350, 40, 150, 70)


class Search(Puppet):
    """Six turns of searching in long documents."""

    def __init__(self):
        pages = [Reply(user("page " + "x" * (size - 5))) for size in FOUND]
        super().__init__(*pages, opening=Reply(user("Which river passes the most capitals?")))


def searched(monkeypatch, recorded=None):
    """An attempt by the agent loop, in which turns may be recorded otherwise."""
    sizes = iter(QUERIES)
    render = renderer("rerender")
    engine = says(lambda prompt, session, seed: "q" * next(sizes), render=render)
    with monkeypatch.context() as patch:
        if recorded:
            patch.setattr(agent, "recorded", recorded)
        made = run(attempted(Search(), engine, render=render, **BOUNDS))
    assert (made.status, len(made.turns)) == (Status.too_many_turns, 6)
    return Group(Task("search", "test"), (made,))


def padded_width(group):
    """Columns of a batch with the prompts of all turns left of their responses, each side padded to its longest."""
    rows = to_generator_output([group])
    return max(map(len, rows["prompt_token_ids"])) + max(map(len, rows["response_ids"]))


def check_width_is_that_of_prompts_and_actions(group):
    """No response is longer than an action may be, and no batch wider than a call: padded, or in a plan."""
    allowed = BOUNDS["max_prompt_tokens"] + BOUNDS["max_action_tokens"]
    assert padded_width(group) <= allowed, f"padded to {padded_width(group)} tokens, where {allowed} are allowed"
    turns = list(turns_of([group]))
    [plan] = pack(turns, 100_000)
    assert plan.depth.max() + 1 == max(len(turn.prompt) + len(turn.action) for turn in turns) <= allowed
    longest = int(np.diff(plan.offsets).max())
    assert longest <= BOUNDS["max_action_tokens"], f"a response of {longest} tokens"
    assert longest == max(QUERIES) + 1  # and an end token


def recorded_with_observation(real=agent.recorded):
    """The record of a turn as the other system made it: what was sampled, then the tokens of the answer, masked."""

    def recorded(*parts):
        [reply] = [part for part in parts if isinstance(part, Reply)]
        heard = renderer().encode("".join(message.content for message in reply.messages))
        nothing = np.zeros(len(heard))

        def longer(completion):
            return replace(
                completion,
                tokens=np.append(completion.tokens, heard),
                logprobs=np.append(completion.logprobs, nothing.astype(np.float32)),
                versions=np.append(completion.versions, nothing.astype(np.int32)),
            )

        return real(*(longer(part) if isinstance(part, Completion) else part for part in parts))

    return recorded


def test_responses_are_actions(monkeypatch):
    check_width_is_that_of_prompts_and_actions(searched(monkeypatch))


def test_observations_in_responses_are_caught(monkeypatch):
    group = searched(monkeypatch, recorded_with_observation())
    with pytest.raises(AssertionError, match=r"padded to \d{4} tokens, where 4596 are allowed"):
        check_width_is_that_of_prompts_and_actions(group)


def test_the_width_both_ways(monkeypatch):
    narrow = padded_width(searched(monkeypatch))
    wide = padded_width(searched(monkeypatch, recorded_with_observation()))
    assert (narrow, wide) == (3852, 8872)


def test_a_turn_has_no_place_for_observations():
    with pytest.raises(ValueError, match="one logprob and one version per action token"):
        make_turn([1, 2], [3, 4, *[5] * 40], logprobs=[-0.5, -0.5])

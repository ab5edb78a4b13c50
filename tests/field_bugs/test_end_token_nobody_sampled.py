"""An end token that nobody sampled, and that was trained on.

Elsewhere the agent loop closed an action that a stop string or a limit had cut with the end token of the chat template,
in the action itself, with loss mask 1 and a logprob of 0.0 that no model had given. The policy learned to end where it
had never decided to.
"""

from dataclasses import replace

import numpy as np
import pytest

from support.acting import Parrot, Puppet, attempted, byte_tokenizer, renderer, run, says, slot_engine, user
from support.making import make_turn
from turnwise.credit.weighting import token_mean
from turnwise.engines.base import Completion
from turnwise.envs.base import Reply
from turnwise.rollout import agent
from turnwise.types import Group, Status, StopReason, Task

SPOKEN = "<a>one</a> and more"
CUTS = {
    StopReason.stop_string: ({"opening": Reply(user("go"), stop=("</a>",))}, {}, "<a>one</a>"),
    StopReason.length: ({}, {"max_action_tokens": 7}, "<a>one<"),
    StopReason.end_token: ({}, {}, "<a>one</a> and more<|im_end|>"),
}


def parrot():
    """The in-process engine over a stand-in for a model, which says the same whatever it hears."""
    render = renderer()
    prompt = render.first(user("go")).tokens
    script = [*prompt, *render.encode(SPOKEN), render.end_token]
    model = Parrot([int(token) for token in script], len(byte_tokenizer()))
    return slot_engine(model, context=400, end_tokens=[render.end_token], decode=render.decode)


ENGINES = {"scripted": lambda: says(SPOKEN), "slots": parrot}


def check_only_sampled_tokens_train(engine, cut):
    """An action is what the engine sampled, token by token, and every one of these tokens has a weight."""
    sampled = []
    generate = engine.generate

    async def listened(prompt, sampling, **call):
        sampled.append(await generate(prompt, sampling, **call))
        return sampled[-1]

    engine.generate = listened
    how, bounds, text = CUTS[cut]

    async def made():
        try:
            return await attempted(Puppet(Reply(finished=True, outcome=1.0), **how), engine, **bounds)
        finally:
            await engine.close()

    trajectory = run(made())
    assert trajectory.status is Status.finished, f"the attempt ended as {trajectory.status}"
    [turn], [completion] = trajectory.turns, sampled
    assert turn.stop is cut
    assert renderer().decode(completion.tokens) == text
    [weights] = token_mean([Group(Task("a", "b"), (trajectory,))])
    trained = turn.action[weights > 0].tolist()
    assert trained == completion.tokens.tolist(), f"{len(trained)} tokens train, {len(completion.tokens)} were sampled"
    assert turn.logprobs.tolist() == completion.logprobs.tolist()


def recorded_with_end_token(logprobs):
    """The record of a turn as the other system made it: closed by the end token, with these logprobs for it."""
    real, end = agent.recorded, renderer().end_token

    def closed(completion):
        if completion.tokens[-1] == end:
            return completion
        return replace(
            completion,
            tokens=np.append(completion.tokens, np.int32(end)),
            logprobs=np.append(completion.logprobs, np.array(logprobs, np.float32)),
            versions=np.append(completion.versions, completion.versions[-1:]),
        )

    def recorded(*parts):
        return real(*(closed(part) if isinstance(part, Completion) else part for part in parts))

    return recorded


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ENGINES)
def test_an_action_is_what_was_sampled(name, cut):
    check_only_sampled_tokens_train(ENGINES[name](), cut)


@pytest.mark.parametrize("cut", [StopReason.stop_string, StopReason.length])
@pytest.mark.parametrize("name", ENGINES)
def test_an_appended_end_token_is_caught(name, cut, monkeypatch):
    monkeypatch.setattr(agent, "recorded", recorded_with_end_token([0.0]))
    with pytest.raises(AssertionError, match=r"\d+ tokens train, \d+ were sampled"):
        check_only_sampled_tokens_train(ENGINES[name](), cut)


def test_an_appended_end_token_without_a_logprob_cannot_be_recorded(monkeypatch):
    monkeypatch.setattr(agent, "recorded", recorded_with_end_token([]))
    with pytest.raises(AssertionError, match="the attempt ended as failed"):
        check_only_sampled_tokens_train(says(SPOKEN), StopReason.length)
    with pytest.raises(ValueError, match="one logprob and one version per action token"):
        make_turn([1, 2], [3, 4, 5], logprobs=[-0.5, -0.5])


@pytest.mark.parametrize("cut", [StopReason.stop_string, StopReason.length])
def test_the_next_prompt_closes_a_cut_action(cut):
    """The end token that the template wants is context, and nobody trains on it."""
    how, bounds, _ = CUTS[cut]
    replies = Reply(user("on"), stop=("</a>",)), Reply(finished=True)
    first, second = run(attempted(Puppet(*replies, **how), says(SPOKEN), **bounds)).turns
    before = len(first.prompt) + len(first.action)
    assert second.prompt[:before].tolist() == [*first.prompt, *first.action]
    assert second.prompt[before] == renderer().end_token

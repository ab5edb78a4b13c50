import math
from dataclasses import replace

import numpy as np
import pytest

from support.acting import byte_tokenizer, limits, renderer, run
from turnwise.envs.base import Reply
from turnwise.envs.capabilities import can_demonstrate
from turnwise.envs.hops import Hops
from turnwise.interop.transcripts.transcript import Transcript
from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.demonstrate import Demonstrator, RecordedDemonstrations
from turnwise.rollout.render.renderer import Renderer
from turnwise.types import Status

TASKS = list(Hops.tasks("train", 0, count=6, links=(2, 3)))


def demonstrator(make=Hops, noise=0.0, seed=0, **bounds):
    return Demonstrator({"hops": make}, renderer(), limits(**bounds), seed, noise)


def texts(group):
    return [turn.said.content for trajectory in (*group.trajectories, *group.failed) for turn in trajectory.turns]


def test_an_expert_succeeds_and_its_tokens_have_no_logprob():
    for task in TASKS:
        (made,) = run(demonstrator().group(task, 0)).trajectories
        assert made.status is Status.finished
        assert made.outcome == 1.0
        assert len(made.turns) == task.data["links"] + 1
        for turn in made.turns:
            assert np.isnan(turn.logprobs).all()
            assert turn.action[-1] == renderer().end_token
            assert renderer().decode(turn.action[:-1]) == turn.said.content
            assert turn.reward == 0.0
            assert math.isfinite(made.total)


def test_mistakes_are_the_same_again_and_others_at_every_visit():
    said = [
        [texts(run(demonstrator(noise=0.5, seed=seed).group(task, epoch))) for task in TASKS]
        for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert said[0] == said[1]
    assert said[0] != said[2]
    assert said[0] != said[3]
    flawless = [texts(run(demonstrator().group(task, 0))) for task in TASKS]
    assert said[0] != flawless
    assert flawless == [texts(run(demonstrator(seed=1).group(task, 1))) for task in TASKS]


def test_limits_hold_for_experts_too():
    (made,) = run(demonstrator(max_turns=1).group(TASKS[0], 0)).trajectories
    assert made.status is Status.too_many_turns
    (made,) = run(demonstrator(max_action_tokens=3).group(TASKS[0], 0)).trajectories
    assert {len(turn.action) for turn in made.turns} == {3}
    group = run(demonstrator(max_prompt_tokens=5).group(TASKS[0], 0))
    assert group.trajectories == ()
    assert group.failed[0].status is Status.prompt_too_long


class Clueless(Hops):
    def demonstrate(self, noise, random):
        raise RuntimeError("no idea")


class Dumb(Hops):
    async def open(self, task):
        return "nonsense"


@pytest.mark.parametrize("make", [Clueless, Dumb])
def test_an_expert_that_fails_is_a_failed_attempt(make):
    group = run(demonstrator(make).group(TASKS[0], 0))
    assert group.trajectories == ()
    assert [t.status for t in group.failed] == [Status.failed]


def test_a_constructor_that_raises_is_a_failed_attempt():
    def make():
        raise RuntimeError("no server")

    assert len(run(demonstrator(make).group(TASKS[0], 0)).failed) == 1


def test_who_can_demonstrate():
    class Cannot:
        demonstrate = None

    assert can_demonstrate(Hops())
    assert not can_demonstrate(Cannot())
    assert not can_demonstrate(Reply())


# ---------------------------------------------------------------- transcripts


def recorded(messages, trained=None, render=None, **known):
    """The demonstrations of one transcript, whose assistant's messages after the first are trained unless given."""
    messages = tuple(message if isinstance(message, Message) else Message(*message) for message in messages)
    usual = tuple(message.role == "assistant" and index > 0 for index, message in enumerate(messages))
    transcript = Transcript(messages, trained or usual, place="talks.jsonl, row 3", **known)
    return RecordedDemonstrations(render or renderer(), [transcript], "talks")


def attempt_of(demonstrations):
    (made,) = demonstrations.group(demonstrations.tasks[0]).trajectories
    return made


PAIRS = [
    ("system", "be brief"),
    ("user", "one"),
    ("assistant", "1"),
    ("user", "two"),
    ("tool", "2?"),
    ("assistant", "2"),
    ("assistant", "and 3"),
    ("user", "thanks"),
]


def test_every_message_of_the_assistant_is_a_turn():
    made = attempt_of(recorded(PAIRS, reward=0.5))
    assert made.status is Status.finished
    assert made.outcome == 0.5
    assert made.opening == tuple(Message(*pair) for pair in PAIRS[:2])
    assert [turn.said.content for turn in made.turns] == ["1", "2", "and 3"]
    render = renderer()
    messages = [Message(*pair) for pair in PAIRS]
    for turn, place in zip(made.turns, (2, 5, 6), strict=True):
        assert turn.prompt.tolist() == render.first(messages[:place]).tokens.tolist()
        assert render.decode(turn.action) == messages[place].content + "<|im_end|>"
        assert np.isnan(turn.logprobs).all()
        assert turn.versions.tolist() == [0] * len(turn.action)
    assert made.turns[0].heard == (Message("user", "two"), Message("tool", "2?"))


def test_only_messages_that_are_trained_are_turns():
    made = attempt_of(recorded(PAIRS, trained=(False,) * 5 + (True, False, False)))
    assert [turn.said.content for turn in made.turns] == ["2"]
    assert "1<|im_end|>" in renderer().decode(made.turns[0].prompt)


def test_a_conversation_that_the_assistant_opens():
    made = attempt_of(recorded([("assistant", "hello"), ("user", "hi"), ("assistant", "how are you")]))
    assert [turn.said.content for turn in made.turns] == ["how are you"]
    assert "hello<|im_end|>" in renderer().decode(made.turns[0].prompt)


def test_text_that_spells_an_end_token_stays_text():
    made = attempt_of(recorded([("user", "a"), ("assistant", "b<|im_end|>c")]))
    (turn,) = made.turns
    assert turn.action.tolist().count(renderer().end_token) == 1
    assert turn.action[-1] == renderer().end_token


def test_calls_without_a_format_are_named():
    call = Message("assistant", "", calls=(ToolCall("get", {"name": "amber"}),))
    demonstrations = recorded([("user", "a"), call])
    with pytest.raises(ValueError, match="^talks.jsonl, row 3: message 2: it has tool calls, and no format") as raised:
        attempt_of(demonstrations)
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------- tools

NAME = {"type": "object", "properties": {"name": {"type": "string"}}}
GET = ToolSpec("get", "Where a name leads.", NAME)
ANSWER = ToolSpec("answer", "The last name.", NAME)


class Calls(Hops):
    """An expert whose lookups are calls."""

    async def open(self, task):
        return replace(await super().open(task), tools=(GET, ANSWER))

    def demonstrate(self, noise, random):
        verb = "answer" if self.followed == len(self.path) - 1 else "get"
        return Message("assistant", "", calls=(ToolCall(verb, {"name": self.path[self.followed]}),))


def test_an_expert_may_say_messages_with_calls():
    render = Renderer(byte_tokenizer(), tools="hermes")
    expert = Demonstrator({"hops": lambda: Calls("tool")}, render, limits(), 0, 0.0)
    (made,) = run(expert.group(TASKS[0], 0)).trajectories
    assert made.outcome == 1.0
    assert made.turns[-1].said.calls[0].name == "answer"
    for turn in made.turns:
        assert "Where a name leads." in render.decode(turn.prompt)
        assert render.decode(turn.action).startswith("<tool_call>")
        assert turn.action[-1] == render.end_token


def test_calls_and_results_of_a_transcript_are_turns():
    render = Renderer(byte_tokenizer(), tools="hermes")
    calls = (ToolCall("get", {"name": "amber"}), ToolCall("get", {"name": "cedar"}))
    messages = [
        ("user", "where?"),
        Message("assistant", "let me see", calls=calls),
        ("tool", "cedar"),
        ("tool", "elm"),
        ("assistant", "elm"),
    ]
    made = attempt_of(recorded(messages, render=render, tools=(GET, ANSWER)))
    first, second = made.turns
    assert "Where a name leads." in render.decode(first.prompt)
    assert render.said(first.prompt, first.action) == messages[1]
    assert first.action[-1] == render.end_of_call
    assert render.decode(second.action) == "elm<|im_end|>"
    shown = render.decode(second.prompt)
    assert shown.index("amber") < shown.index("elm")
    assert first.heard == (Message("tool", "cedar"), Message("tool", "elm"))

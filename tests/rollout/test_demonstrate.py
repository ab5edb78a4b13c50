import json
import math
from dataclasses import replace

import numpy as np
import pytest

from support.acting import byte_tokenizer, limits, renderer, run
from turnwise.envs.base import Reply
from turnwise.envs.capabilities import can_demonstrate
from turnwise.envs.hops import Hops
from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.demonstrate import Demonstrator, RecordedDemonstrations, read_demonstrations
from turnwise.rollout.render.renderer import Renderer
from turnwise.types import Status, Task

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


# ---------------------------------------------------------------- conversations from a file


def conversation(*pairs):
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in pairs]}, ensure_ascii=False)


def written(tmp_path, *lines):
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


GOOD = conversation(("user", "hé"), ("assistant", "ho"))


def test_conversations_become_tasks(tmp_path):
    path = written(
        tmp_path, GOOD, "", "   ", conversation(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    )
    tasks = read_demonstrations(path)
    assert [task.id for task in tasks] == ["talks.jsonl:1", "talks.jsonl:4"]
    assert {task.dataset for task in tasks} == {"talks"}
    assert tasks[0].data == {"messages": [["user", "hé"], ["assistant", "ho"]]}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("not json", "line 2: expected"),
        ("[1, 2]", "line 2: expected"),
        ('"text"', "line 2: expected"),
        ("{}", "line 2: expected"),
        ('{"messages": 3}', "line 2: expected"),
        ('{"messages": "hello"}', "line 2: expected"),
        ('{"messages": [{"role": "user"}]}', "line 2: expected"),
        ('{"messages": [["user", "hi"]]}', "line 2: expected"),
        (conversation(("user", "a"), ("assistant", None)), "line 2: expected"),
        (conversation(("user", [{"type": "text"}]), ("assistant", "b")), "line 2: expected"),
        ('{"messages": []}', "line 2: needs a message of the assistant"),
        (conversation(("user", "a")), "line 2: needs a message of the assistant"),
        (conversation(("assistant", "a"), ("user", "b")), "line 2: needs a message of the assistant"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_says_where(tmp_path, line, says):
    with pytest.raises(ValueError, match=says) as raised:
        read_demonstrations(written(tmp_path, GOOD, line))
    assert "talks.jsonl" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="cannot read demonstrations"):
        read_demonstrations(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="cannot read demonstrations"):
        read_demonstrations(tmp_path)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot read demonstrations"):
        read_demonstrations(tmp_path / "binary.jsonl")
    with pytest.raises(ValueError, match="holds no demonstrations"):
        read_demonstrations(written(tmp_path, "", " "))


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\u2029"])
def test_separators_that_json_allows_in_a_string(tmp_path, separator):
    (task,) = read_demonstrations(written(tmp_path, conversation(("user", f"a{separator}b"), ("assistant", "c"))))
    assert task.data["messages"][0][1] == f"a{separator}b"


def test_every_message_of_the_assistant_is_a_turn():
    pairs = [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "1"),
        ("user", "two"),
        ("tool", "2?"),
        ("assistant", "2"),
        ("assistant", "and 3"),
        ("user", "thanks"),
    ]
    group = run(RecordedDemonstrations(renderer()).group(Task("x", "talks", {"messages": pairs}), 0))
    (made,) = group.trajectories
    assert made.status is Status.finished
    assert made.outcome == 0.0
    assert group.failed == ()
    assert [turn.said.content for turn in made.turns] == ["1", "2", "and 3"]
    render = renderer()
    messages = [Message(*pair) for pair in pairs]
    for turn, place in zip(made.turns, (2, 5, 6), strict=True):
        assert turn.prompt.tolist() == render.first(messages[:place]).tokens.tolist()
        assert render.decode(turn.action) == messages[place].content + "<|im_end|>"
        assert np.isnan(turn.logprobs).all()
        assert turn.versions.tolist() == [0] * len(turn.action)


def test_a_conversation_that_the_assistant_opens():
    pairs = [("assistant", "hello"), ("user", "hi"), ("assistant", "how are you")]
    (made,) = run(RecordedDemonstrations(renderer()).group(Task("x", "talks", {"messages": pairs}), 0)).trajectories
    assert [turn.said.content for turn in made.turns] == ["how are you"]
    assert "hello<|im_end|>" in renderer().decode(made.turns[0].prompt)


# ---------------------------------------------------------------- tools

GET = ToolSpec("get", "Where a name leads.", {"type": "object", "properties": {"name": {"type": "string"}}})


class Calls(Hops):
    """An expert whose lookups are calls."""

    async def open(self, task):
        return replace(await super().open(task), tools=(GET,))

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


def test_tools_of_a_recorded_conversation_are_described(tmp_path):
    row = {**json.loads(GOOD), "tools": [GET.schema, {"type": "function", "function": {"name": "stop"}}]}
    (task,) = read_demonstrations(written(tmp_path, json.dumps(row)))
    render = Renderer(byte_tokenizer(), tools="hermes")
    (made,) = run(RecordedDemonstrations(render).group(task, 0)).trajectories
    shown = render.decode(made.turns[0].prompt)
    assert "Where a name leads." in shown
    assert '"stop"' in shown


@pytest.mark.parametrize("tools", [3, {}, [3], [{}], [{"function": {"name": "no name"}}]])
def test_tools_that_are_none_are_a_mistake_in_the_file(tmp_path, tools):
    if tools == {}:
        tools = {"function": {"name": "get"}}  # one, and not a list of them
    with pytest.raises(ValueError, match="line 1: expected"):
        read_demonstrations(written(tmp_path, json.dumps({**json.loads(GOOD), "tools": tools})))

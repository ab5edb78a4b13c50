import json
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.acting import limits, renderer, run
from turnwise.envs.hops import NAMES, Hops
from turnwise.messages import Message, ToolCall
from turnwise.rollout.demonstrate import Demonstrator
from turnwise.tokens import extends
from turnwise.types import Status, Task

SETTINGS = [
    {},
    {"commands": "tool"},
    {"window": True},
    {"link_reward": 0.1},
    {"commands": "tool", "window": True, "link_reward": 0.1},
]


def opened(links=3, store=5, **chosen):
    environment = Hops(**chosen)
    run(environment.open(Task("t", "hops", {"store": store, "links": links})))
    return environment


def say(environment, text):
    return run(environment.step(Message("assistant", text)))


@pytest.mark.parametrize("chosen", SETTINGS, ids=repr)
def test_the_expert_always_succeeds(chosen):
    expert = Demonstrator({"hops": lambda: Hops(**chosen)}, renderer(), limits(max_turns=6), 0, noise=0.0)
    for split in ("train", "heldout"):
        for task in Hops.tasks(split, 7, count=8, links=(1, 5)):
            (made,) = run(expert.group(task, 0)).trajectories
            links = task.data["links"]
            assert made.status is Status.finished
            assert made.outcome == 1.0
            assert made.total == pytest.approx(1.0 + links * chosen.get("link_reward", 0.0))
            assert len(made.turns) == links + 1
            assert made.marks["links_followed"] == 1.0


@pytest.mark.parametrize("window", [False, True])
def test_a_window_makes_prompts_that_are_not_extensions(window):
    expert = Demonstrator({"hops": lambda: Hops(window=window)}, renderer(), limits(), 0, noise=0.0)
    (task,) = Hops.tasks("train", 0, count=1, links=(4, 4))
    (made,) = run(expert.group(task, 0)).trajectories
    for before, turn in zip(made.turns, made.turns[1:], strict=False):
        assert extends(turn, before) is not window
    if window:
        assert len({len(turn.prompt) for turn in made.turns[1:]}) <= 3  # they do not grow: only names differ
        assert "3 to go" in renderer().decode(made.turns[1].prompt)
        assert "get" not in renderer().decode(made.turns[3].prompt).partition("user")[2]


def test_a_mistaken_expert_makes_mistakes_and_can_recover():
    tasks = list(Hops.tasks("train", 0, count=60, links=(2, 2)))
    noisy = Demonstrator({"hops": Hops}, renderer(), limits(), 0, noise=0.4)
    made = [run(noisy.group(task, 0)).trajectories[0] for task in tasks]
    wins = [t for t in made if t.outcome == 1.0]
    assert 10 < len(wins) < 55
    assert any(len(t.turns) > 3 for t in wins)


def test_looking_up_and_answering():
    environment = opened(links=2)
    start, middle, end = environment.path
    assert say(environment, f"get {start}").messages == (Message("user", f"leads to {middle}"),)
    assert say(environment, f" get {middle}\n").messages == (Message("user", f"leads to {end}"),)
    reply = say(environment, f"answer {end}")
    assert reply.finished
    assert reply.outcome == 1.0
    assert reply.marks == {"links_followed": 1.0}


def test_a_wrong_answer_ends_the_attempt_without_pay():
    environment = opened(links=2, link_reward=0.1)
    say(environment, f"get {environment.path[0]}")
    for name in (environment.path[0], environment.path[1], "nonsense", ""):
        reply = say(environment, f"answer {name}")
        assert reply.finished
        assert reply.outcome == 0.0
        assert reply.reward == 0.0
        assert reply.marks == {"links_followed": 0.5}


def test_each_link_is_paid_once_and_in_order():
    environment = opened(links=3, link_reward=0.25)
    a, b, c, d = environment.path
    paid = [say(environment, f"get {name}").reward for name in (b, c, a, a, c, b, b, a, c, c, d, a)]
    assert paid == [0, 0, 0.25, 0, 0, 0.25, 0, 0, 0.25, 0, 0, 0]


def test_every_link_leads_on_from_the_start_to_the_answer():
    for task in Hops.tasks("train", 1, count=40, links=(1, len(NAMES) - 1)):
        environment = Hops()
        opening = run(environment.open(task))
        text = opening.messages[1].content
        name, links = text.split()[1].rstrip(","), int(text.split()[-1])
        for _ in range(links):
            name = say(environment, f"get {name}").messages[0].content.removeprefix("leads to ")
        assert say(environment, f"answer {name}").outcome == 1.0


@pytest.mark.parametrize(
    ("commands", "text"),
    [
        ("plain", ""),
        ("plain", "hello there"),
        ("plain", "GET amber"),
        ("tool", "get amber"),
        ("tool", "<tool_call></tool_call>"),
        ("tool", "<tool_call>[]</tool_call>"),
        ("tool", "<tool_call>null</tool_call>"),
        ("tool", '<tool_call>"get"</tool_call>'),
        ("tool", '<tool_call>{"name": "get"}</tool_call>'),
        ("tool", '<tool_call>{"name": "get", "arguments": "amber"}</tool_call>'),
        ("tool", '<tool_call>{"name": "get", "arguments": {}}</tool_call>'),
        ("tool", '<tool_call>{"name": "fly", "arguments": {"name": "amber"}}</tool_call>'),
        ("tool", "<tool_call>{not json}</tool_call>"),
        ("tool", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("tool", "<tool_call>" + "9" * 10_000 + "</tool_call>"),
        ("tool", '<tool_call>{"name": "get", "arguments": {"name": "amber"}}'),
    ],
    ids=lambda text: text[:60],
)
def test_a_message_that_is_not_a_command_gets_a_hint(commands, text):
    reply = say(opened(commands=commands, link_reward=0.1), text)
    assert not reply.finished
    assert reply.reward == reply.outcome == 0.0
    assert reply.messages == (Message("user", "say get NAME or answer NAME"),)


@pytest.mark.parametrize("text", ["get nobody", "get", "get amber please", "get Amber"])
def test_a_name_that_does_not_exist_is_an_observation(text):
    assert say(opened(), text).messages == (Message("user", "no such name"),)


def test_a_tool_call_may_stand_among_other_words():
    environment = opened(commands="tool")
    call = json.dumps({"name": "get", "arguments": {"name": environment.path[0]}})
    reply = say(environment, f"I will look.\n<tool_call>\n{call}\n</tool_call> Good.")
    assert reply.messages == (Message("user", f"leads to {environment.path[1]}"),)


HOSTILE = st.one_of(
    st.text(max_size=60),
    st.text('<>/tol_ca {}[]":,0', max_size=40).map(lambda inner: f"<tool_call>{inner}</tool_call>"),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "arguments", "x"]), inner),
        max_leaves=6,
    ).map(lambda value: f"<tool_call>{json.dumps(value)}</tool_call>"),
    st.sampled_from(["get ", "answer "]).flatmap(lambda verb: st.text(max_size=9).map(lambda name: verb + name)),
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SETTINGS), st.lists(HOSTILE, min_size=1, max_size=4))
@example({}, ["answer \ud800", "\x00", "get \ud800"])
def test_hostile_text_never_raises(chosen, texts):
    environment = opened(**chosen)

    async def talk():
        for text in texts:
            reply = await environment.step(Message("assistant", text))
            assert reply.outcome == 0.0 or text.endswith(environment.path[-1]) or "tool_call" in text
            assert reply.finished or len(reply.messages) == 1
        environment.demonstrate(0.5, Random(0))
        await environment.close()

    run(talk())


def test_white_space_does_not_stall_the_parser():
    environment = opened(commands="tool")
    say(environment, "<tool_call>" + " " * 300_000)  # hours, where time grows with the square


def test_a_seed_decides_the_tasks_and_they_differ():
    first, again, other = (list(Hops.tasks("train", seed, count=200)) for seed in (0, 0, 1))
    assert [t.id for t in first] == [t.id for t in again]
    assert [t.data for t in first] == [t.data for t in again]
    assert len({t.id for t in first}) == 200
    assert {t.id for t in first} != {t.id for t in other}
    assert {t.data["links"] for t in first} == {1, 2, 3, 4}
    assert {t.dataset for t in first} == {"hops"}


@pytest.mark.parametrize("links", [(0, 2), (3, 2), (1, len(NAMES)), (-1, -1)])
def test_bounds_that_make_no_task_are_a_mistake(links):
    with pytest.raises(ValueError, match="write two bounds"):
        Hops.tasks("train", 0, links=links)


def test_attempts_at_one_task_do_not_share_anything():
    first, second = opened(), opened()
    assert first.path == second.path
    say(first, f"get {first.path[0]}")
    assert (first.followed, second.followed) == (1, 0)


def test_opening_again_starts_over():
    environment = opened()
    say(environment, f"get {environment.path[0]}")
    run(environment.open(Task("t", "hops", {"store": 6, "links": 2})))
    assert environment.followed == 0
    assert len(environment.path) == 3


def test_calls_that_were_parsed_already_are_taken():
    async def play():
        environment = Hops(commands="tool")
        await environment.open(next(iter(Hops.tasks("train", 0, links=(1, 1)))))
        first, last = environment.path
        get, answer = ToolCall("get", {"name": first}), ToolCall("answer", {"name": last})
        await environment.step(Message("assistant", "", calls=(get,)))
        return await environment.step(Message("assistant", "", calls=(answer,)))

    assert run(play()).outcome == 1.0


@pytest.mark.parametrize("done", [False, True])
def test_a_half_mistake_keeps_the_verb_or_the_name(done):
    """So a demonstration may go on where it should have answered, which a policy has to try before it can learn it."""
    environment = opened(links=1, mistakes="half")
    right = ("get", environment.path[0])
    if done:
        say(environment, f"get {environment.path[0]}")
        right = ("answer", environment.path[1])
    said = [environment.demonstrate(1.0, Random(seed)).split() for seed in range(200)]
    kept_name = [verb for verb, name in said if name == right[1]]
    assert all(verb == right[0] for verb, name in said if name != right[1])
    assert 60 < sum(verb != right[0] for verb in kept_name) < 140


def test_a_question_may_leave_the_number_of_links_to_the_window():
    environment = opened(links=2, window=True, announce=False)
    start, *_ = environment.path
    assert environment.head[-1].content == f"start {start}"
    assert say(environment, f"get {start}").messages[0].content.endswith(", 1 to go")
    with pytest.raises(ValueError, match="needs window = true"):
        Hops(announce=False)


def test_a_seen_mistake_takes_a_name_that_was_seen():
    environment = opened(links=1, mistakes="seen")
    start, end = environment.path
    astray = next(name for name in NAMES if name not in (start, end))

    def mistakes():
        return {tuple(environment.demonstrate(1.0, Random(seed)).split()) for seed in range(200)}

    first = mistakes()
    assert ("answer", start) in first
    assert len({name for verb, name in first if verb == "get"}) > 20  # nothing else was seen: any name
    say(environment, f"get {astray}")
    assert mistakes() == {("answer", start), ("get", environment.leads_to[astray])}
    say(environment, f"get {start}")
    assert mistakes() == {("get", end), ("answer", start)}


@pytest.mark.parametrize(("lookups", "said"), [(0, 3), (1, 1), (2, 2), (9, 3)])
def test_a_demonstration_may_answer_after_some_lookups(lookups, said):
    environment = opened(links=3, lookups=lookups)
    spoken = []
    while not spoken or not spoken[-1].startswith("answer"):
        spoken.append(environment.demonstrate(0.0, Random(0)))
        reply = say(environment, spoken[-1])
    assert spoken == [*(f"get {name}" for name in environment.path[:said]), f"answer {environment.path[said]}"]
    assert reply.outcome == float(said == 3)

import asyncio
import os
import signal
from random import Random
from typing import Any

import pytest

from support.acting import attempted, limits, renderer, run, says
from support.worlds import invented_factbook
from turnwise.assemble.environments import environment_makers, tasks_of
from turnwise.envs.search.env import INVALID, Search, is_right, normalised, parse, passages_text
from turnwise.envs.search.retrieval.service import Local, Passage
from turnwise.messages import Message
from turnwise.recipe.parse import parse_recipe
from turnwise.rollout.batching.batches import Batched, Batches
from turnwise.rollout.batching.flush import Adaptive
from turnwise.rollout.batching.microbatch import Lane
from turnwise.rollout.demonstrate import Demonstrator
from turnwise.rollout.scene import Attempt
from turnwise.types import Status, Task

PATIENT = {"call_seconds": 60.0, "attempt_seconds": 100.0, "max_prompt_tokens": 9000, "max_trajectory_tokens": 9200}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache with the invented factbook and its index, and the one server that all tests here search."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_CACHE", str(folder))
        invented_factbook(folder)
        service = Search().service
        yield folder
        assert isinstance(service, Local)
        service.close()


@pytest.fixture(autouse=True)
def use_it(cache, monkeypatch):
    monkeypatch.setenv("TURNWISE_CACHE", str(cache))


def opened(task=None, **settings):
    environment = Search(**settings)
    environment.open(task or next(Search.tasks("train", 0, count=1, hops=(3, 3))))
    return environment


def say(environment, text):
    return environment.step(Message("assistant", text))


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_expert_always_succeeds_and_found_what_it_says(split):
    expert = Demonstrator({"search": Search}, renderer(), limits(max_turns=5, **PATIENT), 0, noise=0.0)
    for task in Search.tasks(split, 3, count=12):
        (made,) = run(expert.group(task, 0), 100).trajectories
        assert (made.status, made.outcome) == (Status.finished, 1.0)
        assert len(made.turns) == len(task.data["steps"]) + 1
        assert made.marks == {"searches": len(task.data["steps"]), "steps_found": 1.0}
        said = task.data["answers"][-1]
        assert any(said in message.content for turn in made.turns for message in turn.heard)


def test_guessing_never_succeeds():
    random = Random(0)
    for task in Search.tasks("heldout", 3, count=40):
        environment = opened(task)
        guess = random.choice([*task.data["question"].split(), "Paris", str(random.randint(0, 99999)), "yes"])
        reply = say(environment, f"<answer>{guess}</answer>")
        assert (reply.finished, reply.outcome) == (True, 0.0)


def test_with_noise_the_expert_makes_mistakes_and_goes_on():
    expert = Demonstrator({"search": Search}, renderer(), limits(max_turns=8, **PATIENT), 0, noise=0.3)
    groups = [run(expert.group(task, 0), 100) for task in Search.tasks("train", 3, count=20)]
    made = [group.trajectories[0] for group in groups]
    assert 0.3 < sum(one.outcome for one in made) / len(made) < 1.0
    assert any(len(one.turns) > len(g.task.data["steps"]) + 1 for one, g in zip(made, groups, strict=True))


def test_a_search_is_answered_with_passages():
    task = Task("t", "search", {"question": "What is the capital of Landddd?", "answers": ["Townddd"]})
    reply = say(opened(task, topk=2), "<think>hm</think>\n<search> Landddd \n Capital </search> and more")
    [heard] = reply.messages
    assert heard.content.startswith(
        '<information>\nDoc 1(Title: "Landddd: Capital") name: Townddd (since 1901)\nDoc 2('
    )
    assert heard.content.endswith("\n</information>")
    assert heard.content.count("\n") == 3
    assert reply.stop == ("</search>", "</answer>")
    assert not reply.finished


def test_passages_share_the_characters_evenly():
    found = [Passage("A", "x" * 100, 1.0), Passage("B", "short", 0.5)]
    assert passages_text(found, 30) == 'Doc 1(Title: "A") xxxxxxxxxxxx\nDoc 2(Title: "B") short\n'
    assert passages_text([], 30) == "nothing found\n"


@pytest.mark.parametrize(
    "text", ["", "Suva", "<search></search>", "<search> </search>", "<answer>x", "</answer>x<answer>"]
)
def test_a_message_without_a_command_gets_a_hint(text):
    reply = say(opened(), text)
    assert [message.content for message in reply.messages] == [INVALID]
    assert (reply.finished, reply.reward, reply.outcome) == (False, 0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("<search>a</search><answer>b</answer>", ("search", "a")),
        ("<think><answer>b</answer></think>", ("answer", "b")),
        ("<search>a</answer><answer>b</answer>", ("answer", "b")),
        ("<search>" + "x" * 9999 + "</search>", ("search", "x" * 2000)),
        ("<SEARCH>a</SEARCH>", ("", "")),
    ],
)
def test_the_first_whole_command_counts(text, command):
    assert parse(text) == command


def test_answers_are_compared_as_question_answering_does():
    assert normalised(" The  Mont-Blanc, 4,807 m! ") == "montblanc 4807 m"
    assert is_right(".FJ", [".fj"])
    assert is_right("4,853", ["4,853 km", "4,853"])
    assert not is_right("Mont Blanc or Everest", ["Mont Blanc"])
    assert not is_right("", ["Suva"])


def test_steps_found_can_be_paid_once_each():
    environment = opened(found_reward=0.25)
    query = environment.steps[0]["query"]
    rewards = [say(environment, f"<search>{text}</search>").reward for text in ("zzz", query, query)]
    assert rewards[:2] == [0.0, 0.25]
    assert rewards[2] == 0.0 or environment.reached == 2


def test_64_searches_are_one_call(monkeypatch):
    environments = [opened(task) for task in Search.tasks("train", 0, count=64)]
    calls = []
    search = Local.search
    monkeypatch.setattr(
        Local, "search", lambda self, queries, topk: calls.append(len(queries)) or search(self, queries, topk)
    )
    messages = [Message("assistant", f"<search>{own.steps[0]['query']}</search>") for own in environments]
    messages[5], messages[6] = Message("assistant", "<answer>x</answer>"), Message("assistant", "hm")
    replies = Search.step_many(environments, messages)
    assert calls == [62]
    assert [reply.finished for reply in replies] == [place == 5 for place in range(64)]
    assert [own.reached for own in environments] == [int(place not in (5, 6)) for place in range(64)]


def test_a_search_that_fails_is_an_error_for_those_who_searched_and_changes_nothing(monkeypatch):
    def fail(self, queries, topk):
        raise ConnectionError("gone")

    monkeypatch.setattr(Local, "search", fail)
    searching, answering = opened(), opened()
    before = vars(searching).copy()
    error, reply = Search.step_many(
        [searching, answering], [Message("assistant", "<search>a</search>"), Message("assistant", "<answer>a</answer>")]
    )
    assert isinstance(error, ConnectionError)
    assert reply.finished
    assert vars(searching) == before
    with pytest.raises(ConnectionError):
        say(searching, "<search>a</search>")


def test_a_killed_server_loses_no_attempt():
    batches = Batches(Search, rule=Adaptive(max_batch=16), slots=4, call_seconds=60.0)
    service: Any = Search().service
    kills = []

    async def play(task):
        own = Search()

        async def script(prompt, session, seed):
            if len(kills) < 2 and own.searches == 1 + len(kills):
                process, _ = service.running()
                os.kill(process.pid, signal.SIGKILL)
                kills.append(process.pid)
            return own.demonstrate(0.0, Random(0))

        which = Attempt(0, "train", task)
        make = lambda: Batched(own, batches, Lane(rank=0))
        return await attempted(make, says(script), which=which, **PATIENT)

    async def play_all():
        return await asyncio.gather(*(play(task) for task in Search.tasks("train", 0, count=16, hops=(3, 3))))

    made = run(play_all(), 110)
    assert len(kills) == 2
    assert [(one.status, one.outcome) for one in made] == [(Status.finished, 1.0)] * 16


def test_tasks_are_as_many_of_each_kind_and_the_same_every_time():
    tasks = list(Search.tasks("train", 1, count=90, hops=(1, 3)))
    assert [task.id for task in tasks] == [task.id for task in Search.tasks("train", 1, count=90)]
    assert len({task.id for task in tasks}) == 90
    assert min(sum(len(task.data["steps"]) == n for task in tasks) for n in (1, 2, 3)) > 15
    heldout = {task.id for task in Search.tasks("heldout", 1, count=90)}
    assert heldout.isdisjoint(task.id for task in Search.tasks("train", 2, count=400))
    assert {len(task.data["steps"]) for task in Search.tasks("heldout", 0, count=10**6, hops=(1, 1))} == {1}
    with pytest.raises(ValueError, match=r"hops = \[0, 3\]: write two bounds"):
        list(Search.tasks("train", 0, hops=(0, 3)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "http://x:1", "retriever": "dense"}, "retriever and corpus are settings of the server at url"),
        ({"url": "x:1"}, "write the address of a retrieval server"),
        ({"topk": 0}, "topk = 0 and characters = 2000: set topk from 1 to 100"),
        ({"corpus": "nowhere"}, "no corpus at nowhere"),
        ({"retriever": "sparse"}, "Input should be 'bm25' or 'dense'"),
    ],
)
def test_settings_are_refused_before_anything_starts(settings, message):
    recipe = parse_recipe({"env": [{"name": "search", "settings": settings}]}, "here")
    with pytest.raises(ValueError, match=message):
        environment_makers(recipe)


def test_tasks_from_the_users_file(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"question": "Which town?", "answers": ["Townddd"]}\n{"question": "Which?", "answers": "Townddd"}\n'
    )
    recipe = parse_recipe({"env": [{"name": "search", "data": str(path), "heldout": str(path)}]}, "here")
    with pytest.raises(ValueError, match=r"mine.jsonl, row 2: answers: Input should be a valid list, got \"Townddd\""):
        tasks_of(recipe, "train")
    environment = opened(tasks_of(recipe, "train", 1)["search"][0])
    assert say(environment, "<answer>townddd</answer>").outcome == 1.0

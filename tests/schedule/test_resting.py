import json
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.making import make_trajectory
from turnwise.recipe.parse import parse_recipe
from turnwise.schedule.resting import Heard, Rests, heard_of
from turnwise.schedule.stream import Used
from turnwise.schedule.tasks import FreshTasks, TaskOrder
from turnwise.training.loop import Progress
from turnwise.training.state import State
from turnwise.types import Group, Status, Task


def order(sizes, max_rest=8, seed=0):
    datasets = {name: [Task(f"{name}-{place}", name) for place in range(size)] for name, size in sizes.items()}
    return TaskOrder(datasets, dict.fromkeys(sizes, 1.0), seed, max_rest)


def group(task, *totals):
    return Group(task, tuple(make_trajectory([(2, 1)], outcome=total) for total in totals))


def rounds_left_out(rests, task):
    left_out = 0
    while rests.passes_over(task):
        left_out += 1
    return left_out


def test_a_task_rests_longer_each_time_and_never_for_ever():
    rests = Rests(longest=8)
    lengths = []
    for _ in range(6):
        rests.hear("a", differed=False)
        lengths.append(rounds_left_out(rests, "a"))
    assert lengths == [1, 2, 4, 8, 8, 8]


def test_attempts_that_differ_end_a_rest():
    rests = Rests(longest=8)
    for _ in range(3):
        rests.hear("a", differed=False)
    rests.hear("a", differed=True)
    assert rounds_left_out(rests, "a") == 0
    rests.hear("a", differed=False)
    assert rounds_left_out(rests, "a") == 1


@pytest.mark.parametrize("totals", [(1.0, 1.0), (0.0, 0.0)])
def test_a_task_that_is_solved_or_hopeless_is_left_out_of_the_next_round(totals):
    tasks = order({"a": 4})
    first = [tasks.draw().task for _ in range(4)]
    tasks.hear([group(first[0], *totals), *(group(task, 0.0, 1.0) for task in first[1:])])
    second = [tasks.draw().task.id for _ in range(3)]
    assert sorted(second) == sorted(task.id for task in first[1:])
    assert sorted(tasks.draw().task.id for _ in range(4)) == sorted(task.id for task in first)


def test_tasks_that_all_rest_are_drawn_all_the_same():
    tasks = order({"a": 3})
    for _ in range(50):
        tasks.hear([group(tasks.draw().task, 1.0, 1.0)])
    assert tasks.number == 50


def test_without_rests_nothing_is_remembered_and_the_order_is_the_old_one():
    plain, told = (order({"a": 5}, max_rest=0) for _ in range(2))
    for _ in range(20):
        assert told.draw() == (drawn := plain.draw())
        assert list(told.hear([group(drawn.task, 1.0, 1.0)])) == []
    assert "tasks/resting" not in told.metrics(20)


def test_what_is_known_of_a_task_and_its_rest():
    tasks = order({"a": 4})
    drawn = [tasks.draw().task for _ in range(4)]
    tasks.hear([group(drawn[0], 1.0, 1.0), group(drawn[1], 0.0, 0.0), group(drawn[2], 0.0, 1.0)])
    assert tasks.metrics(4)["tasks/resting"] == 2.0


def test_attempts_that_failed_say_nothing_of_their_task():
    task = Task("a-0", "a")
    assert heard_of([Group(task, (), (make_trajectory([(2, 1)], status=Status.failed),))], 3) == []
    assert heard_of([group(task, 0.5, 0.5)], 3) == [Heard(3, "a", "a-0", differed=False)]


def test_fresh_tasks_do_not_rest():
    tasks = TaskOrder({"a": FreshTasks(lambda number: Task("a-0", "a"))}, {"a": 1.0}, 0, max_rest=4)
    drawn = tasks.draw()
    tasks.hear([group(drawn.task, 1.0, 1.0)])
    assert tasks.draw().task == drawn.task


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    lag=st.integers(0, 3),
    stop=st.integers(0, 30),
    seed=st.integers(0, 99),
)
def test_a_run_that_goes_on_draws_what_it_would_have_drawn(sizes, lag, stop, seed):
    """Groups are heard of some draws after they were drawn, as with lag; the checkpoint is written between."""
    named = {str(place): size for place, size in enumerate(sizes)}
    random = Random(seed)
    whole = order(named, seed=seed)
    drawn, remembered, at_stop = [], [], 0
    for number in range(60):
        drawn.append(whole.draw())
        if number >= lag:
            task = drawn[number - lag].task
            heard = whole.hear([group(task, 1.0, float(random.random() < 0.4))])
            if number - lag < stop:
                remembered, at_stop = list(heard), number + 1
    base = min(stop, max(0, at_stop - lag))
    state = State(Progress(used=Used(base), heard=remembered))
    read = State.from_json(json.loads(json.dumps(state.to_json()))).progress
    assert read.heard == remembered
    resumed = order(named, seed=seed)
    resumed.skip(read.used.base, read.heard)
    again = [resumed.draw() for _ in range(at_stop - base)]
    assert again == drawn[base:at_stop]
    assert list(resumed.hear([])) == remembered


def test_a_checkpoint_of_an_earlier_version_remembers_nothing():
    data = State().to_json()
    del data["progress"]["heard"]
    assert State.from_json(data).progress.heard == []


def test_rests_that_no_task_could_take_are_refused():
    with pytest.raises(ValueError, match=r"schedule.max_rest is ignored with env.fresh = true"):
        parse_recipe({"env": [{"name": "hops", "fresh": True}], "schedule": {"max_rest": 4}}, "test")
    mixed = {"env": [{"name": "hops", "fresh": True}, {"name": "guess"}], "schedule": {"max_rest": 4}}
    assert parse_recipe(mixed, "test").schedule.max_rest == 4


def test_what_resting_gains_and_what_it_makes_of_training_success():
    """A third of the tasks is solved, a third hopeless, a third solved by half of the attempts: groups with credit come
    more than twice as often, and the success of training is no longer that of the tasks (the bias that docs name)."""
    success = {f"a-{place}": (0.0, 0.5, 1.0)[place % 3] for place in range(30)}

    def play(max_rest):
        tasks, random = order({"a": 30}, max_rest), Random(0)
        found = Counter()
        for _ in range(3000):
            task = tasks.draw().task
            totals = [float(random.random() < success[task.id]) for _ in range(8)]
            tasks.hear([group(task, *totals)])
            found["with credit"] += len(set(totals)) > 1
            found["of the middle"] += success[task.id] == 0.5
        return found["with credit"] / 3000, found["of the middle"] / 3000

    assert play(0) == (pytest.approx(0.33, abs=0.02), pytest.approx(1 / 3, abs=0.001))
    credit, middle = play(8)
    assert credit > 0.75
    assert middle > 0.75

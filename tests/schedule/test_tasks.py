from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.schedule.tasks import FreshTasks, TaskOrder
from turnwise.types import Task


def dataset(name, size):
    return [Task(f"{name}-{number}", name) for number in range(size)]


def order(sizes, weights=None, seed=0):
    datasets = {name: dataset(name, size) for name, size in sizes.items()}
    return TaskOrder(datasets, weights or dict.fromkeys(sizes, 1.0), seed)


def ids(tasks, count):
    return [tasks.draw().task.id for _ in range(count)]


def test_how_often_tasks_are_drawn():
    metrics = order({"a": 10, "b": 2}, {"a": 3.0, "b": 1.0}).metrics(num_draws=40)
    assert metrics == {"tasks/distinct": 12.0, "tasks/epochs": 5.0}


def test_draws_are_numbered_and_know_their_visit():
    tasks = order({"a": 3})
    drawn = [tasks.draw() for _ in range(7)]
    assert [draw.number for draw in drawn] == list(range(7))
    assert [draw.epoch for draw in drawn] == [0, 0, 0, 1, 1, 1, 2]


def test_every_visit_meets_every_task_once_in_a_new_order():
    tasks = order({"a": 40})
    epochs = [ids(tasks, 40) for _ in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(epochs[0])
        assert len(set(epoch)) == 40
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[0] != [f"a-{number}" for number in range(40)]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 7), st.floats(0.05, 20)), min_size=1, max_size=5),
    st.integers(1, 200),
    st.integers(0, 9),
)
def test_any_stretch_of_a_run_is_mixed_by_weight(parts, count, seed):
    weights = {str(place): weight for place, (_, weight) in enumerate(parts)}
    tasks = order({str(place): size for place, (size, _) in enumerate(parts)}, weights, seed)
    counts = Counter()
    for number in range(1, count + 1):
        counts[tasks.draw().task.dataset] += 1
        for name, weight in weights.items():
            share = number * weight / sum(weights.values())
            assert abs(counts[name] - share) < len(parts)
    for name, number in counts.items():
        counts = Counter(task.id for task in tasks.datasets[name].tasks)
        assert number <= count
        assert len(counts) == len(tasks.datasets[name].tasks)


def test_weights_are_relative():
    weights = {"a": 1.0, "b": 3.0}
    scaled = {name: 40 * weight for name, weight in weights.items()}
    first, second = (ids(order({"a": 5, "b": 9}, w), 80) for w in (weights, scaled))
    assert first == second
    assert Counter(name[0] for name in first) == {"a": 20, "b": 60}


def test_the_seed_and_nothing_else_decides():
    sizes, weights = {"a": 11, "b": 6}, {"a": 2.0, "b": 1.0}
    first, again, other = (ids(order(sizes, weights, seed), 60) for seed in (4, 4, 5))
    assert first == again
    assert first != other


def test_a_dataset_is_met_in_the_same_order_whatever_it_is_mixed_with():
    alone = ids(order({"a": 9}), 30)
    mixed = [name for name in ids(order({"b": 4, "a": 9}, {"a": 1.0, "b": 2.5}), 105) if name.startswith("a")]
    assert mixed == alone[: len(mixed)]
    assert len(mixed) == 30


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 9), st.floats(0.1, 9), st.integers(0, 5))
def test_skipping_is_drawing(count, size_a, size_b, weight, seed):
    first, second = (order({"a": size_a, "b": size_b}, {"a": weight, "b": 1.0}, seed) for _ in range(2))
    for _ in range(count):
        first.draw()
    second.skip(count)
    assert [first.draw() for _ in range(20)] == [second.draw() for _ in range(20)]


def test_a_dataset_without_tasks_is_a_mistake():
    with pytest.raises(ValueError, match="dataset b has no tasks"):
        order({"a": 2, "b": 0})


def test_a_single_task_is_met_again_and_again():
    tasks = order({"a": 1})
    assert [(tasks.draw().task.id, epoch) for epoch in range(3)] == [("a-0", 0), ("a-0", 1), ("a-0", 2)]
    assert tasks.draw().epoch == 3


def fresh(worlds=1000, seed=0):
    """A dataset of new tasks, from a world of so many."""
    return FreshTasks(lambda number: Task(f"a-{Random(f'{seed}/{number}').randrange(worlds)}", "a"))


def test_a_fresh_task_depends_on_its_visit_alone():
    whole, resumed = (TaskOrder({"a": fresh()}, {"a": 1.0}, 0) for _ in range(2))
    resumed.skip(13)
    assert [whole.draw() for _ in range(20)][13:] == [resumed.draw() for _ in range(7)]


def test_a_fresh_task_that_comes_again_knows_how_often():
    """Its sampling noise depends on that, so that a second visit is not the first one once more."""
    tasks = TaskOrder({"a": fresh(worlds=3)}, {"a": 1.0}, 0)
    drawn = [tasks.draw() for _ in range(30)]
    assert len({(draw.task.id, draw.epoch) for draw in drawn}) == 30
    assert tasks.metrics(30) == {"tasks/distinct": 3.0, "tasks/epochs": 10.0}
    assert tasks.metrics(1) == {"tasks/distinct": 1.0, "tasks/epochs": 1.0}


def test_fresh_and_fixed_tasks_mix():
    tasks = TaskOrder({"a": fresh(), "b": dataset("b", 2)}, {"a": 1.0, "b": 1.0}, 0)
    assert Counter(tasks.draw().task.dataset for _ in range(10)) == {"a": 5, "b": 5}

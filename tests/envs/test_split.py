from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.envs.guess import Guess
from turnwise.envs.hops import Hops
from turnwise.envs.split import HELDOUT_SHARE, draw_tasks


def numbers(limit):
    return lambda random: {"n": random.randrange(limit)}


def names(split, seed, count=60, limit=400):
    return [task.id for task in draw_tasks("numbers", split, count, seed, numbers(limit))]


@settings(max_examples=50, deadline=None)
@given(st.integers(), st.integers())
def test_no_seed_leaks_a_heldout_task_into_training(seed, other):
    train, heldout = names("train", seed), names("heldout", other)
    assert not set(train) & set(heldout)
    assert len(set(train)) == len(set(heldout)) == 60


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([Hops, Guess]), st.integers(0, 2**40), st.integers(0, 2**40))
def test_built_in_environments_share_no_task_between_splits(environment, seed, other):
    few = {"links": (1, 2)} if environment is Hops else {"high": 12}
    train = {task.id for task in environment.tasks("train", seed, count=50, **few)}
    heldout = {task.id for task in environment.tasks("heldout", other, count=30, **few)}
    contents = [
        {tuple(sorted(task.data.items())) for task in environment.tasks(split, s, count=30, **few)}
        for split, s in (("train", seed), ("heldout", other))
    ]
    assert not train & heldout
    assert not contents[0] & contents[1]


def test_a_seed_decides_the_tasks():
    assert names("train", 3) == names("train", 3)
    assert names("train", 3) != names("train", 4)
    assert names("train", 3, count=10) == names("train", 3)[:10]


def test_the_split_is_a_property_of_the_content():
    """The same content has the same id and the same split, whichever seed draws it."""
    everything = [set(names("train", seed, count=300)) for seed in range(3)]
    heldout = [set(names("heldout", seed, count=70)) for seed in range(3)]
    assert len(set.union(*everything)) < 2 * 300
    assert len(set.union(*heldout)) < 2 * 70
    for one in everything:
        for other in heldout:
            assert not one & other


def test_about_a_fifth_is_held_out():
    whole = [len(set(islice(draw_until_empty(split), 3000))) for split in ("train", "heldout")]
    assert sum(whole) == 3000
    assert whole[1] / 3000 == pytest.approx(HELDOUT_SHARE, abs=0.03)


def draw_until_empty(split):
    counter = iter(range(3000))

    def draw(random):
        return {"n": next(counter)}

    try:
        for task in draw_tasks("numbers", split, 10**6, 0, draw):
            yield task.id
    except RuntimeError:  # the counter is through
        return


def test_asking_for_more_than_there_is_says_so():
    with pytest.raises(ValueError, match="numbers has fewer than 400 different train tasks"):
        names("train", 0, count=400)
    assert len(names("train", 0, count=300)) == 300


def test_an_unknown_split_is_a_mistake():
    with pytest.raises(ValueError, match="no split 'test'; choose one of train, heldout"):
        names("test", 0)


def test_a_part_of_a_task_may_decide_its_split_and_another_what_is_the_same():
    def draw(random):
        return {"who": random.randrange(30), "n": random.randrange(9), "noise": random.random()}

    made = {
        split: list(draw_tasks("x", split, 40, 0, draw, lambda d: d["who"], lambda d: [d["who"], d["n"]]))
        for split in ("train", "heldout")
    }
    who = {split: {task.data["who"] for task in tasks} for split, tasks in made.items()}
    assert who["train"]
    assert who["heldout"]
    assert not who["train"] & who["heldout"]
    for tasks in made.values():
        assert len({(task.data["who"], task.data["n"]) for task in tasks}) == 40

import pytest

from support.acting import run
from support.adapting import check_independence, played, tasks_for, texts, total
from turnwise.assemble.environments import environment_class
from turnwise.envs.adapters.gymnasium import LEGEND, last_word, legend_of
from turnwise.envs.adapters.gymnasium_labels import in_words

EMPTY = "gymnasium:MiniGrid-Empty-Random-6x6-v0"
CROSSING = "gymnasium:MiniGrid-SimpleCrossingS9N1-v0"


@pytest.mark.parametrize("name", [EMPTY, CROSSING])
def test_the_expert_walks_to_the_goal(name):
    for split in ("train", "heldout"):
        for task in tasks_for(name, split, 2):
            replies = run(played(name, task, "expert"))
            assert replies[-1].finished
            assert 0.5 < total(replies) < 1.0  # the library takes a little off for every step
            assert replies[-1].marks == {"truncated": 0}


def test_the_picture_shows_the_visible_cells():
    (task,) = tasks_for(EMPTY)
    opening, after = texts(run(played(EMPTY, task, ["left"])))
    lines = opening.splitlines()
    assert lines[0] == "Mission: get to the green goal square"
    assert lines[7][3] == "^"
    assert "G" in opening + after
    assert all(len(line) == 7 and set(line) <= set("#.G^?") for line in lines[1:8])
    assert lines[8].startswith("Legend: ^ you, looking up, # wall, . free")
    assert lines[9] == "Say one of: left, right, forward, pickup, drop, toggle, done."
    assert "Say one of" not in after


def test_things_have_colours_and_places():
    (task,) = tasks_for("gymnasium:MiniGrid-DoorKey-6x6-v0")
    heard = "\n".join(texts(run(played("gymnasium:MiniGrid-DoorKey-6x6-v0", task, ["left"] * 3))))
    assert "yellow key" in heard
    assert "locked yellow door" in heard


def test_time_that_is_up_ends_the_attempt_and_is_marked():
    (task,) = tasks_for(EMPTY)
    replies = run(played(EMPTY, task, ["left"] * 5, options={"max_steps": 3}))
    assert len(replies) == 4
    assert replies[-1].finished
    assert total(replies) == 0
    assert replies[-1].marks == {"truncated": 1}


def test_the_environments_own_text_is_shown():
    name = "gymnasium:FrozenLake-v1"
    (task,) = tasks_for(name)
    names = ("left", "down", "right", "up")
    replies = run(
        played(name, task, ["I go down", "Down, then", "right"], options={"is_slippery": False}, actions=names)
    )
    opening, down, *_ = texts(replies)
    assert opening.splitlines()[0] == "[S]FFF"
    assert down.splitlines()[1:3] == ["SFFF", "[F]HFH"]
    assert "Say one of: left, down, right, up." in opening
    assert not replies[-1].finished


def test_numbers_are_numbers():
    (task,) = tasks_for("gymnasium:CartPole-v1")
    replies = run(played("gymnasium:CartPole-v1", task, ["1", "0", "say 1"]))
    assert [reply.reward for reply in replies[1:]] == [1, 1, 1]
    named = dict(line.split(": ") for line in texts(replies)[1].splitlines())
    assert list(named) == ["cart position", "cart velocity", "pole angle", "pole angular velocity"]
    assert all(len(number) < 9 for number in named.values())
    assert texts(replies)[0].endswith("Say one of: left, right.")


def test_words_and_numbers_are_the_same_actions():
    (task,) = tasks_for("gymnasium:CartPole-v1")
    said = (["right", "left", "right"], ["1", "0", "1"], ["go right", " 0\n", "Right"])
    assert len({tuple(texts(run(played("gymnasium:CartPole-v1", task, script)))) for script in said}) == 1


def test_the_parts_of_an_observation_have_names():
    (task,) = tasks_for("gymnasium:Blackjack-v1")
    (opening,) = texts(run(played("gymnasium:Blackjack-v1", task, [])))
    assert [line.partition(":")[0] for line in opening.splitlines()] == [
        "your sum",
        "dealer's card",
        "usable ace",
        "Say one of",
    ]
    assert opening.endswith("Say one of: stick, hit.")
    renamed = texts(run(played("gymnasium:Blackjack-v1", task, [], observations=("a", "b", "c"))))
    assert renamed[0].startswith("a: ")


def test_nested_observations_are_labelled():
    assert in_words({"left": (1, 2.00004), "right": [3]}) == "left: part 0: 1\npart 1: 2.0\nright: [3]"
    assert in_words((1, 2), ("one", "two")) == "one: 1\ntwo: 2"


def test_a_ball_and_a_box_look_different():
    assert len(set(LEGEND.values())) == len(LEGEND) == 10
    assert legend_of("Mission: x\n#X.\n.^B\nIn view: grey box 1 ahead") == (
        "Legend: ^ you, looking up, # wall, . free, B ball, X box."
    )


def test_words_that_are_no_action_change_nothing():
    (task,) = tasks_for(EMPTY)
    opening, hint, moved = run(played(EMPTY, task, ["hello", "left"]))
    assert texts([hint]) == ["Say one of: left, right, forward, pickup, drop, toggle, done."]
    assert texts([moved]) == texts(run(played(EMPTY, task, ["left"]))[1:])
    assert not opening.finished


@pytest.mark.parametrize(
    ("text", "word"),
    [("forward", "forward"), ("LEFT!", "left"), ("not left but right.", "right"), ("leftover", None), ("", None)],
)
def test_the_last_action_that_is_named_counts(text, word):
    assert last_word(text, ("left", "right", "forward")) == word


def test_numbers_are_whole_words_too():
    assert last_word("10", ("0", "1")) is None
    assert last_word("-1", ("0", "1")) is None
    assert last_word("I say 1", ("0", "1")) == "1"


@pytest.mark.parametrize(
    ("name", "settings", "scripts"),
    [
        ("gymnasium:MiniGrid-Dynamic-Obstacles-6x6-v0", {}, (["left", "left", "left"], ["right", "left", "right"])),
        (
            "gymnasium:FrozenLake-v1",
            {"options": {"is_slippery": True, "map_name": "8x8"}},
            (["1", "2", "1", "2"], ["2", "2", "2", "2"]),
        ),
    ],
)
def test_attempts_of_a_group_are_independent(name, settings, scripts):
    (task,) = tasks_for(name)
    run(check_independence(name, task, scripts, **settings))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("MiniGrid-Emty-5x5-v0", {}, "did you mean MiniGrid-Empty-5x5-v0?"),
        ("Pendulum-v1", {}, "cannot be named; choose discrete actions"),
        ("FrozenLake-v1", {"actions": ["a", "b"]}, "actions names 2 actions, but FrozenLake-v1 has 4"),
        ("CartPole-v1", {"observations": ["a"]}, "names 1 parts, but observations of CartPole-v1 have 4"),
        ("nowhere:Nothing-v0", {}, "cannot make nowhere:Nothing-v0"),
    ],
)
def test_names_and_settings_that_cannot_work_are_refused_at_the_start(name, settings, message):
    with pytest.raises(ValueError) as error:
        environment_class(f"gymnasium:{name}").check_settings(**settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)

import pytest

from support.acting import run
from support.adapting import check_independence, played, tasks_for, texts, total
from turnwise.assemble.environments import environment_class

GAME = "textworld:custom"
SMALL = {"nb_rooms": 2, "nb_objects": 3, "quest_length": 2}


def test_the_expert_wins_and_is_paid_one_in_all():
    (task,) = tasks_for(GAME)
    replies = run(played(GAME, task, "expert", options=SMALL), 250)
    assert replies[-1].finished
    assert total(replies) == pytest.approx(1.0)
    assert replies[-1].marks == {"won": 1}
    assert len(replies) == 1 + 2
    assert "Would you like to RESTART" not in texts(replies)[-1]
    assert not any("\n>" in text or "\n\n\n" in text for text in texts(replies))  # no prompt, no line of status


def test_the_opening_is_the_objective_and_the_first_room():
    (task,) = tasks_for(GAME)
    (plain, _) = texts(run(played(GAME, task, ["look"], options=SMALL), 250))
    assert "\n-= " in plain
    assert "$$$" not in plain  # the library's name in letters
    (shown, after) = texts(run(played(GAME, task, ["inventory"], options=SMALL, show_commands=True), 250))
    assert "You can: " in shown
    assert "look" in after.rpartition("You can: ")[2]


def test_what_the_game_does_not_understand_is_an_observation():
    (task,) = tasks_for(GAME)
    (_, *replies) = run(played(GAME, task, ["fly to the moon", "", "look\nsecond line"], options=SMALL), 250)
    assert not any(reply.finished or reply.reward for reply in replies)
    assert all(texts(replies))


def test_attempts_of_a_group_are_independent():
    (task,) = tasks_for(GAME)
    scripts = (["look", "inventory", "look"], ["inventory", "nonsense", "look"])
    run(check_independence(GAME, task, scripts, options=SMALL), 250)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("tw-simpel", {}, "textworld has no game tw-simpel; did you mean tw-simple?"),
        ("custom", {"options": {"rooms": 2}}, "env.settings.options: custom has no option rooms"),
    ],
)
def test_names_and_settings_that_cannot_work_are_refused_at_the_start(name, settings, message):
    with pytest.raises(ValueError) as error:
        environment_class(f"textworld:{name}").check_settings(**settings)
    assert message in str(error.value)

import pytest

from support.acting import run
from support.adapting import check_independence, played, tasks_for, texts, total
from turnwise.assemble.environments import environment_class

GUESS = "gem:game:GuessTheNumber-v0-easy"
SLIDE = "gem:game:Game2048-v0-easy"


def test_the_expert_finishes_every_game_and_wins():
    for split in ("train", "heldout"):
        for task in tasks_for(GUESS, split, 3):
            replies = run(played(GUESS, task, "expert"))
            assert replies[-1].finished
            assert total(replies) == 1.0
            assert replies[-1].marks == {"truncated": 0}


def test_rewards_are_paid_turn_by_turn():
    (task,) = tasks_for(GUESS)
    replies = run(played(GUESS, task, ["\\boxed{99}", "\\boxed{1}", "nothing"]))
    assert "outside the range" in texts(replies)[1]
    assert replies[-1].finished
    assert [reply.outcome for reply in replies] == [0, 0, 0, 0]
    assert [reply.reward < 0 for reply in replies] == [False, False, False, True]


def test_the_librarys_suffix_is_shown():
    (task,) = tasks_for(GUESS)
    heard = texts(run(played(GUESS, task, ["\\boxed{99}"])))
    assert heard[1].endswith("Enter your next guess.")
    assert "Guess The Number" not in heard[1]


@pytest.mark.parametrize(
    ("name", "scripts"),
    [
        (GUESS, (["\\boxed{1}", "\\boxed{2}", "\\boxed{9}"], ["\\boxed{7}", "\\boxed{3}"])),
        (SLIDE, (["\\boxed{left}", "\\boxed{up}", "\\boxed{left}"], ["\\boxed{down}", "\\boxed{right}"])),
    ],
)
def test_attempts_of_a_group_are_independent(name, scripts):
    (task,) = tasks_for(name)
    run(check_independence(name, task, scripts))


def test_a_name_that_is_not_there():
    with pytest.raises(ValueError, match="gem has no environment game:Guess-v0"):
        environment_class("gem:game:Guess-v0").check_settings()

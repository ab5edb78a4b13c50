import random

import pytest

from support.acting import run
from support.adapting import check_independence, played, shown, tasks_for, texts, total
from turnwise.assemble.environments import environment_class
from turnwise.envs.adapters import adapted
from turnwise.envs.adapters.textarena import TextArena
from turnwise.messages import Message
from turnwise.types import Task

GUESS = "textarena:GuessTheNumber-v0"


def test_the_expert_finishes_every_game_and_wins():
    for split in ("train", "heldout"):
        for task in tasks_for(GUESS, split, 4):
            replies = run(played(GUESS, task, "expert"))
            assert replies[-1].finished
            assert total(replies) == 1.0
            assert len(replies) <= 1 + 5  # bisection of twenty numbers
            assert replies[-1].marks == {"turns": len(replies) - 1, "invalid_move": 0}


def test_only_new_text_is_shown():
    (task,) = tasks_for(GUESS)
    heard = texts(run(played(GUESS, task, ["[1]", "[20]", "19"])))
    assert heard[0].startswith("You are Player 0. You are playing Guess The Number.")
    assert heard[1:] == ["The target number is higher.", "The target number is lower.", "The target number is lower."]


def test_pay_comes_once_when_the_game_is_over():
    (task,) = tasks_for(GUESS)
    replies = run(played(GUESS, task, ["[1]", "no number", "still none"]))
    assert [reply.outcome for reply in replies[:-1]] == [0, 0, 0]
    assert "invalid move" in texts(replies)[2]
    assert replies[-1].finished
    assert 0 < replies[-1].outcome < 1  # how near the last guess was
    assert replies[-1].marks["invalid_move"] == 1


def test_a_near_miss_can_be_worth_nothing():
    (task,) = tasks_for(GUESS)
    for script, won in ((["[1]", "no number", "still none"], 0), ("expert", 1)):
        assert run(played(GUESS, task, script, pays="win"))[-1].outcome == won


def test_options_change_the_game():
    (task,) = tasks_for(GUESS)
    (opening,) = run(played(GUESS, task, [], options={"max_number": 77, "max_turns": 3}))
    assert "between 1 and 77 within 3 turns" in texts([opening])[0]


@pytest.mark.parametrize("player", [0, 1])
def test_a_second_player_plays_at_random(player):
    wins = []
    for task in tasks_for("textarena:TicTacToe-v0", count=4):
        moves = [f"[{n}]" for n in (4, 0, 8, 2, 6, 1, 7, 3, 5) * 2]
        replies = run(played("textarena:TicTacToe-v0", task, moves, player=player))
        assert f"You are Player {player}" in texts(replies)[0]
        assert any(f"Player {1 - player}: [" in text for text in texts(replies))
        assert not any(f"Player {player}: [" in text for text in texts(replies))  # no echo
        assert replies[-1].finished
        wins.append(replies[-1].outcome)
    assert set(wins) <= {-1, 0, 1}


@pytest.mark.parametrize(
    ("name", "scripts"),
    [
        (GUESS, (["[3]", "[11]", "[15]"], ["[18]", "[2]", "[2]", "[2]"])),
        ("textarena:2048-v0", (["[left]", "[up]", "[left]", "[up]"], ["[down]", "[right]", "[down]", "[right]"])),
        ("textarena:KuhnPoker-v0", (["[check]", "[bet]", "[call]", "[check]"], ["[bet]", "[fold]", "[bet]", "[call]"])),
    ],
)
def test_attempts_of_a_group_are_independent(name, scripts):
    (task,) = tasks_for(name)
    run(check_independence(name, task, scripts))


def test_in_one_process_they_would_not_be():
    """What isolation is for: two games of this library share one generator."""

    def play(games):
        heard = [[game.open(Task("t", "x", {"seed": 5}))] for game in games]
        for move in ("[left]", "[up]", "[left]", "[down]"):
            for game, replies in zip(games, heard, strict=True):
                replies.append(game.step(Message("assistant", move)))
        return [shown(replies) for replies in heard]

    kind = type("Game", (TextArena,), {"name": "2048-v0"})
    state = random.getstate()
    try:
        assert play([kind(), kind()])[1] != play([kind()])[0]
    finally:
        random.setstate(state)


def test_the_run_keeps_its_own_random_numbers():
    (task,) = tasks_for(GUESS)
    random.seed(7)
    state = random.getstate()
    run(played(GUESS, task, ["[1]", "[20]"]))
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("GuessTheNumbr-v0", {}, "textarena has no environment GuessTheNumbr-v0; did you mean GuessTheNumber-v0?"),
        ("SecretMafia-v0", {}, "SecretMafia-v0 is not for one player or two"),
        ("GuessTheNumber-v0", {"player": 1}, "env.settings.player = 1: GuessTheNumber-v0 has 1 players; choose 0 to 0"),
        ("TicTacToe-v0", {"player": 2}, "env.settings.player = 2: TicTacToe-v0 has 2 players; choose 0 to 1"),
        ("ColonelBlotto-v0", {}, "ColonelBlotto-v0 names no moves in square brackets for a second player"),
        ("GuessTheNumber-v0", {"options": {"nonsense": 1}}, "GuessTheNumber-v0 cannot be opened: TypeError"),
    ],
)
def test_names_and_settings_that_cannot_work_are_refused_at_the_start(name, settings, message):
    with pytest.raises(ValueError, match=message) as error:
        environment_class(f"textarena:{name}").check_settings(**settings)
    assert "\n" not in str(error.value)


def test_only_games_with_an_expert_demonstrate():
    assert hasattr(adapted("textarena", "GuessTheNumber-v0-hardcore"), "demonstrate")
    assert not hasattr(adapted("textarena", "TicTacToe-v0"), "demonstrate")


def test_a_noisy_expert_guesses_elsewhere():
    (task,) = tasks_for(GUESS)
    game = type("Game", (TextArena,), {"name": "GuessTheNumber-v0"})()
    state = random.getstate()
    try:
        game.open(task)
    finally:
        random.setstate(state)
    assert game.demonstrate(0.0, random.Random(0)) == "[10]"
    assert len({game.demonstrate(1.0, random.Random(n)) for n in range(40)}) > 10

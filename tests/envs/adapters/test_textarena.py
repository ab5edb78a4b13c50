import random
import re

import pytest

from support.acting import run
from support.adapting import check_independence, played, shown, tasks_for, texts, total
from turnwise.assemble.environments import environment_class
from turnwise.envs.adapters.textarena import TextArena
from turnwise.envs.adapters.textarena_moves import candidates, named_moves
from turnwise.envs.capabilities import heldout_settings_of, models_of
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
        ("ColonelBlotto-v0", {}, "ColonelBlotto-v0 names no legal moves in square brackets"),
        ("TicTacToe-v0", {"opponent": "randm"}, 'opponent = "randm": write "random", "self", "frozen"'),
        ("TicTacToe-v0", {"opponent": "nowhere:play"}, 'opponent = "nowhere:play": No module named'),
        ("GuessTheNumber-v0", {"opponent": "self"}, "opponent would be ignored: GuessTheNumber-v0 is for one player"),
        ("IteratedPrisonersDilemma-v0", {"view": "board"}, "shows no board"),
        ("Nim-v0", {"opening": -1}, "opening = -1: write 0 or more"),
        ("GuessTheNumber-v0", {"options": {"nonsense": 1}}, "GuessTheNumber-v0 cannot be opened: TypeError"),
    ],
)
def test_names_and_settings_that_cannot_work_are_refused_at_the_start(name, settings, message):
    with pytest.raises(ValueError, match=message) as error:
        environment_class(f"textarena:{name}").check_settings(**settings)
    assert "\n" not in str(error.value)


def test_a_demonstration_is_a_legal_move():
    for name in ("textarena:Nim-v0", "textarena:TicTacToe-v0"):
        for task in tasks_for(name, count=3):
            replies = run(played(name, task, "expert", player="alternate"))
            assert replies[-1].finished
            assert replies[-1].marks["invalid_move"] == 0


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


NIM = "textarena:Nim-v0"


def smallest(text, player, random):
    """Takes one from the first pile that has any."""
    piles = re.findall(r"pile (\d): (\d+)", text)[-3:]
    return next(f"[{pile} 1]" for pile, size in piles if size != "0")


def test_an_opponent_may_be_a_function():
    (task,) = tasks_for(NIM)
    replies = run(played(NIM, task, ["[0 1]", "[1 1]"], opponent=f"{__name__}:smallest"))
    assert "Player 1: [0 1]" in texts(replies)[1]


def test_random_opponents_make_legal_moves_that_the_text_does_not_name():
    moves = set()
    for task in tasks_for(NIM, count=6):
        replies = run(played(NIM, task, "expert"))
        moves |= set(re.findall(r"Player 1: (\[\d \d\])", "".join(texts(replies))))
        assert replies[-1].finished
    assert len(moves - {"[0 3]"}) > 2  # the example of the rules


def test_openings_make_tasks_differ_and_are_the_tasks():
    openings = [texts(run(played(NIM, task, [], opening=2, view="board")))[0] for task in tasks_for(NIM, count=5)]
    assert len(set(openings)) > 2
    again = [texts(run(played(NIM, task, [], opening=2, view="board")))[0] for task in tasks_for(NIM, count=5)]
    assert openings == again
    assert all(text.startswith("Player 0\nCurrent Pile:\n  pile 0: ") for text in openings)


def test_the_board_alone_is_what_the_model_sees():
    (task,) = tasks_for(NIM)
    opening, after = run(played(NIM, task, ["[2 5]"], view="board"))
    assert opening.history == opening.messages
    assert after.history == after.messages
    assert texts([after])[0].count("pile 0") == 1


def test_a_game_of_two_models_says_what_each_seat_hears():
    (task,) = tasks_for(NIM)
    script = ["[0 3]", "[1 4]", "[2 5]"]
    replies = run(played(NIM, task, script, opponent="self", pays="win"))
    assert [reply.moves_next for reply in replies[:-1]] == [0, 1, 0]
    assert [[len(seat.messages) for seat in reply.seats] for reply in replies[:-1]] == [[1, 0], [0, 1], [1, 0]]
    assert "Player 0: [0 3]" in replies[1].seats[1].messages[0].content
    assert "Player 1: [1 4]" in replies[2].seats[0].messages[0].content
    assert replies[-1].finished
    assert [seat.outcome for seat in replies[-1].seats] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "models"),
    [
        ({}, ("policy",)),
        ({"opponent": "self"}, ("policy", "policy")),
        ({"opponent": "frozen"}, ("policy", "frozen")),
        ({"opponent": "frozen:here", "player": 1}, ("frozen:here", "policy")),
    ],
)
def test_the_opponent_decides_which_models_play(settings, models):
    assert models_of(environment_class(NIM), settings) == models
    assert heldout_settings_of(environment_class(NIM), settings)["opponent"] == "random"


def test_held_out_games_have_a_named_opponent():
    with pytest.raises(ValueError, match='evaluation_opponent = "self": write "random"'):
        heldout_settings_of(environment_class(NIM), {"evaluation_opponent": "self"})


def test_moves_are_found_by_their_shape():
    assert "[9 0]" in candidates(["[0 3]"])
    assert "[B7]" not in candidates(["[0 3]"])
    assert candidates(["[check]", "[bet]"]) == ["[check]", "[bet]"]
    assert named_moves("[GAME] say [pile quantity], [Player 1]") == ["[pile quantity]"]

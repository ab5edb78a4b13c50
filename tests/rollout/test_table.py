import asyncio

import pytest

from support.acting import limits, renderer, run, says, user
from turnwise.engines.base import Sampling
from turnwise.envs.base import Reply
from turnwise.rollout.group import AttemptMaker
from turnwise.rollout.open_limit import with_open_limit
from turnwise.rollout.table import ABANDONED
from turnwise.testing.clock import run as virtual_run
from turnwise.types import Status, Task

TASK = Task("t-1", "count", {})


class Count:
    """Two seats say a number in turn; whoever says the last one wins. It plays `length` moves."""

    closed = 0

    def __init__(self, length=4, first=0, fails_at=None, hangs_at=None):
        self.length, self.first, self.fails_at, self.hangs_at = length, first, fails_at, hangs_at
        self.moves = []

    async def open(self, task):
        return self.reply()

    async def step(self, message):
        if len(self.moves) == self.fails_at:
            raise RuntimeError("the board broke")
        if len(self.moves) == self.hangs_at:
            await asyncio.sleep(10_000)
        self.moves.append(message.content)
        return self.reply()

    def reply(self):
        mover = (self.first + len(self.moves)) % 2
        if len(self.moves) == self.length:
            return Reply(seats=[Reply(finished=True, outcome=float(seat != mover)) for seat in range(2)], finished=True)
        heard = user(f"seat {mover}, after {self.moves[-1] if self.moves else 'nothing'}")
        return Reply(seats=[Reply(heard if seat == mover else ()) for seat in range(2)], moves_next=mover)

    async def close(self):
        self.closed += 1


class Players:
    """Makes games with engines that remember what they were asked."""

    def __init__(self, games, attempts=1, retries=0, said=lambda session: "one", frozen=None, **bounds):
        self.games, self.asked, games = [], [], iter(games)

        def make():
            self.games.append(next(games))
            return self.games[-1]

        def script(prompt, session, seed):
            self.asked.append((session, seed))
            return said(session)

        engine = says(script)
        seats = [engine, engine] if frozen is None else [engine, frozen]
        self.attempt_maker = AttemptMaker(
            {"count": make},
            engine,
            renderer(),
            Sampling(99),
            limits(**bounds),
            seed=5,
            split="train",
            attempts=attempts,
            retries=retries,
            seats={"count": seats},
        )

    def group(self, runner=run):
        return runner(self.attempt_maker.group(TASK, 0))


def test_each_seat_is_an_attempt_with_its_own_turns_and_outcome():
    group = Players([Count(), Count()], attempts=2).group()
    assert [one.seat for one in group.trajectories] == [0, 0, 1, 1]
    assert [one.outcome for one in group.trajectories] == [0.0, 0.0, 1.0, 1.0]
    assert [len(one.turns) for one in group.trajectories] == [2, 2, 2, 2]
    assert all(one.status is Status.finished for one in group.trajectories)
    first, second = group.trajectories[0], group.trajectories[2]
    assert [turn.heard[0].content for turn in first.turns[:1]] == ["seat 0, after one"]
    assert second.turns[0].heard[0].content == "seat 1, after one"


def test_every_seat_has_its_own_noise_and_session():
    players = Players([Count(), Count()], attempts=2)
    players.group()
    assert len({session for session, _ in players.asked}) == 4
    assert len({seed for _, seed in players.asked}) == len(players.asked) == 8


def test_games_are_the_same_in_any_order():
    """Noise depends on the seat and the turn, and not on when a game is played."""
    asked = []
    for attempts in (1, 3):
        players = Players([Count() for _ in range(attempts)], attempts=attempts)
        players.group()
        asked.append(dict(players.asked[:4]) if attempts == 1 else dict(players.asked))
    assert asked[0].items() <= asked[1].items()


def test_a_game_that_breaks_blames_no_seat_for_the_others_move():
    players = Players([Count(fails_at=2)])
    group = players.group()
    assert group.trajectories == ()
    broke, left = group.failed
    assert (broke.seat, left.seat) == (0, 1)
    assert "the board broke" in broke.failure
    assert (left.failure, left.turns) == (ABANDONED, ())  # no setting can count an attempt without turns
    assert players.games[0].closed == 1


def test_a_game_that_hangs_times_out_for_its_mover_and_ends_for_the_other():
    players = Players([Count(hangs_at=1)])
    group = players.group(virtual_run)
    assert [(one.seat, one.status) for one in group.failed] == [(0, Status.failed), (1, Status.timed_out)]
    assert group.failed[0].failure == ABANDONED
    assert players.games[0].closed == 1


def test_waiting_for_the_other_side_costs_no_time():
    async def think(session):
        await asyncio.sleep(4.0 if session.endswith("seat 1") else 0.1)
        return "one"

    group = Players([Count(8)], said=think, call_seconds=5.0, attempt_seconds=17.0).group(virtual_run)
    assert [one.status for one in group.trajectories] == [Status.finished] * 2  # seat 0 alone waited for 16 seconds


def test_a_seat_that_is_cut_short_counts_and_the_other_does_not():
    group = Players([Count(8)], max_turns=2).group()
    assert [(one.seat, one.status) for one in group.trajectories] == [(0, Status.too_many_turns)]
    assert [(one.seat, one.failure) for one in group.failed] == [(1, ABANDONED)]


def test_a_seat_without_a_turn_is_in_no_statistics():
    group = Players([Count(1)]).group()
    assert [(one.seat, one.outcome) for one in group.trajectories] == [(0, 1.0)]
    assert group.failed == ()


def test_a_game_that_failed_is_played_again_with_all_its_seats():
    players = Players([Count(fails_at=1), Count()], retries=1)
    group = players.group()
    assert [one.outcome for one in group.trajectories] == [0.0, 1.0]
    assert group.failed == ()
    assert len({seed for _, seed in players.asked}) == len(players.asked)  # new noise


def test_one_permit_is_one_game():
    """With a permit for each seat, the first seats of many games would wait for each other for ever."""
    games = [Count() for _ in range(8)]
    players = Players(games, attempts=8)
    maker = with_open_limit(players.attempt_maker.environments["count"])
    maker.open_limit.limit = 2
    assert len(players.group().trajectories) == 16
    assert [game.closed for game in games] == [1] * 8


def test_attempts_of_a_frozen_opponent_are_not_the_policys():
    frozen = []
    group = Players([Count()], frozen=says(lambda prompt, session, seed: frozen.append(session) or "two")).group()
    assert [one.seat for one in group.trajectories] == [0]
    assert len(frozen) == 2
    assert "after two" in group.trajectories[0].turns[0].heard[0].content


@pytest.mark.parametrize("reply", [Reply(), Reply(seats=(Reply(),))])
def test_a_game_that_forgets_a_seat_fails(reply):
    class Forgetful(Count):
        def reply(self):
            return reply

    group = Players([Forgetful()]).group()
    assert any("a game of 2 seats answers with a Reply(seats=...)" in one.failure for one in group.failed)

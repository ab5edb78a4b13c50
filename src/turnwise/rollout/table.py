"""A game of several seats, each played by an ordinary attempt: the table is where these attempts meet.

The environment of the game answers each move with what every seat hears and whose turn it is. A seat is an
`Environment` for the agent loop: its `step` makes the move and returns when it is this seat's turn again. So both sides
of a game are attempts of the one agent loop, with their own turns, noise, limits and outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from turnwise.envs.base import Environment, Reply
from turnwise.messages import Message
from turnwise.rollout.agent import play
from turnwise.rollout.attempt import run_now
from turnwise.rollout.calls import EnvironmentFailure, call, checked
from turnwise.rollout.concurrently import all_of
from turnwise.rollout.deadline import Deadline
from turnwise.rollout.open_limit import EnvironmentMaker
from turnwise.rollout.scene import Attempt, RunningAttempt, Scene
from turnwise.types import Status, Task, Trajectory

ABANDONED = "the other seat of the game left it before the end; this attempt is not counted"
NO_TURN = "the game was over before the first turn of this seat"


class LeftOut(RuntimeError):
    """The attempt of this seat has no outcome, and is not to blame: another seat left the game before its end, or the
    game ended before this seat had a turn."""


class GameTable:
    """One game and its seats.

    Example:
        table = GameTable(make_game, num_seats=2)
        seats = [Seat(table, 0), Seat(table, 1)]
    """

    def __init__(self, make: Callable[[], Environment], num_seats: int) -> None:
        self.make = make
        self.game: Environment | None = None
        self.waiting: list[Reply | None] = [None] * num_seats
        """What each seat has not heard yet."""
        self.seated = set(range(num_seats))
        self.opened = self.over = False
        self.abandoned = False
        self.changed = [asyncio.Event() for _ in range(num_seats)]

    async def open(self, task: Task) -> None:
        """Open the game, once: the first seat that comes does it."""
        if not self.opened:
            self.opened = True
            self.game = self.make()
            self.deal(checked(await call(self.game.open, task), self.game.open))

    async def step(self, message: Message) -> None:
        assert self.game is not None, "it was not opened"
        self.deal(checked(await call(self.game.step, message), self.game.step))

    def deal(self, reply: Reply) -> None:
        """Hand out what each seat hears. The seat that moves next goes on; every seat does when the game is over."""
        if len(reply.seats) != len(self.waiting):
            raise EnvironmentFailure(
                f"a game of {len(self.waiting)} seats answers with a Reply(seats=...) for each, got {len(reply.seats)}"
            )
        self.over = reply.finished
        for seat, heard in enumerate(reply.seats):
            self.waiting[seat] = heard if (before := self.waiting[seat]) is None else joined(before, heard)
        for seat in range(len(self.waiting)) if self.over else (reply.moves_next,):
            self.changed[seat].set()

    async def turn_of(self, seat: int) -> Reply:
        """What a seat hears when it is its turn, or when the game is over."""
        await self.changed[seat].wait()
        if self.abandoned and not self.over:
            raise LeftOut(ABANDONED)
        self.changed[seat].clear()
        heard, self.waiting[seat] = self.waiting[seat], None
        assert heard is not None
        return replace(heard, finished=True) if self.over else heard

    async def leave(self, seat: int) -> None:
        """The attempt of a seat has ended. The others are told if the game was not over; the last one closes it."""
        self.seated.discard(seat)
        if not self.over:
            self.abandoned = True
            for changed in self.changed:
                changed.set()
        if not self.seated and self.game is not None:
            await call(self.game.close)


def joined(before: Reply, now: Reply) -> Reply:
    """Two replies as one: what a seat heard while it was not its turn."""
    return replace(
        now,
        messages=(*before.messages, *now.messages),
        reward=before.reward + now.reward,
        outcome=before.outcome + now.outcome,
        marks={**before.marks, **now.marks},
        raised=(*before.raised, *now.raised),
    )


class Seat:
    """`Environment` of one side of a game. Waiting for the other side costs it no time."""

    def __init__(self, table: GameTable, number: int) -> None:
        self.table = table
        self.number = number
        self.deadline: Deadline | None = None

    async def open(self, task: Task) -> Reply:
        await self.table.open(task)
        heard = await self.wait()
        if heard.finished:
            raise LeftOut(NO_TURN)
        return heard

    async def step(self, message: Message) -> Reply:
        await self.table.step(message)
        return await self.wait()

    async def close(self) -> None:
        await self.table.leave(self.number)

    async def wait(self) -> Reply:
        if self.deadline is None:
            return await self.table.turn_of(self.number)
        self.deadline.suspend()
        heard = await self.table.turn_of(self.number)
        self.deadline.resume()
        return heard


async def play_seat(scene: Scene, running: RunningAttempt) -> Status:
    """The agent loop, for a seat that knows the deadline of its attempt."""
    assert isinstance(running.environment, Seat)
    running.environment.deadline = running.deadline
    try:
        return await play(scene, running)
    except LeftOut as left_out:
        running.log.turns.clear()
        running.log.failure = str(left_out)
        return Status.failed


async def run_game(which: Attempt, maker: EnvironmentMaker, scenes: Sequence[Scene]) -> list[Trajectory]:
    """One game: the attempt of each seat that had a turn, in order. `scenes` says which model plays each seat.

    A game has one permit of the open environments, however many seats. A seat whose game was left by another one before
    the end has failed without a turn, so that no setting can count it."""
    async with maker.open_limit.permit():
        table = GameTable(maker.make, len(scenes))
        makers = [replace(maker, make=partial(Seat, table, number)) for number in range(len(scenes))]
        trajectories = await all_of(
            run_now(replace(which, seat=number), makers[number], scene, play_seat)
            for number, scene in enumerate(scenes)
        )
    return [
        replace(trajectory, seat=number)
        for number, trajectory in enumerate(trajectories)
        if trajectory.failure != NO_TURN
    ]

"""Micro-batches: a queue in front of a call that takes several items at once."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from turnwise.envs.raised import Raised, carrying, error_line
from turnwise.rollout import calls
from turnwise.rollout.batching.costs import CallCosts, CostFit
from turnwise.rollout.batching.flush import REASONS, Adaptive, Rule, View

Content = TypeVar("Content")
Result = TypeVar("Result")
RESOLUTION = 1e-6
"""Seconds by which a timer may be early."""


class BatchFailure(RuntimeError):
    """The call that an item was part of has failed, or answered nonsense."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A class of callers, such as training or validation. Items of a lane with a lower rank go first."""

    rank: int = 0
    max_wait: float = 0.0
    """Seconds that an item may be held back for a larger call."""
    max_wait_prices: float = 0.0
    """More time to hold an item back, in multiples of the fitted fixed cost of a call."""


AT_ONCE = Lane()
ADAPTIVE = Adaptive()


@dataclass(slots=True, eq=False)
class Item(Generic[Content, Result]):
    """An item in the queue or in a call."""

    content: Content
    lane: Lane
    submitted: float
    answer: asyncio.Future[Result]
    call: BatchCall[Content, Result] | None = None
    """The call that serves it."""


@dataclass(slots=True, eq=False)
class BatchCall(Generic[Content, Result]):
    """A running call."""

    items: Sequence[Item[Content, Result]]
    task: asyncio.Task[None] | None = None
    """Runs the call, once it has started."""

    @property
    def wanted(self) -> int:
        """How many callers still wait for its answer."""
        return sum(not item.answer.done() for item in self.items)


@dataclass(slots=True)
class QueueTally:
    """Counts since the last report."""

    since: float
    calls: int = 0
    items: int = 0
    largest: int = 0
    failed: int = 0
    """Calls that raised, took too long or answered nonsense."""
    left: int = 0
    """Items whose callers went away."""
    waited: float = 0.0
    """Seconds of items in the queue."""
    ended: int = 0
    served: float = 0.0
    """Seconds of the calls that ended."""
    busy: float = 0.0
    """Seconds of slots with a call."""
    flushes: Counter[str] = field(default_factory=Counter)


class MicroBatcher(Generic[Content, Result]):
    """A queue in front of `function(items) -> list of results or exceptions`: a coroutine function, or a plain one,
    which runs in threads of its own, as many as there are slots.

    An item whose result is an exception fails alone. Where the whole call raises, all its items fail, unless the
    function is `idempotent`: then each is asked for again by itself. A caller that is cancelled, or out of its seconds,
    takes its item out of the queue; the result of one in service is dropped.

    Example:
        async def grade(answers: list[str]) -> list[float]: ...

        judge = MicroBatcher(grade, slots=8)
        score = await judge.submit("an answer", seconds=60.0)
    """

    def __init__(
        self,
        function: Callable[[list[Content]], Any],
        *,
        slots: int = 4,
        rule: Rule = ADAPTIVE,
        idempotent: bool = False,
        call_seconds: float | None = None,
        name: str = "",
    ) -> None:
        self.function = function
        self.slots = slots
        self.rule = rule
        self.idempotent = idempotent
        self.call_seconds = call_seconds
        """After this a call is given up, so that its slot is free again; None for never."""
        self.name = name or calls.name_of(function)
        self.fit = CostFit()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Start with nobody there."""
        self.live = 0
        self.lanes: dict[Lane, deque[Item[Content, Result]]] = {}
        self.again: deque[Item[Content, Result]] = deque()
        self.calls: set[BatchCall[Content, Result]] = set()
        self.in_service = 0
        self.pumping: asyncio.Handle | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.changed = now
        self.tally = QueueTally(now)

    def now(self) -> float:
        """The time of the running loop; whoever waited in another one is gone with it."""
        loop = asyncio.get_running_loop()
        if loop is not self.loop:
            self.loop = loop
            self.begin(loop.time())
        return loop.time()

    # ------------------------------------------------------------ coming and going

    def enter(self) -> None:
        """Somebody is there who may submit, until they `leave`."""
        self.now()
        self.live += 1

    def leave(self) -> None:
        self.now()
        self.live -= 1
        self.wake()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Live as long as the block lasts."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    async def submit(self, content: Content, lane: Lane = AT_ONCE, seconds: float | None = None) -> Result:
        """The result for an item; TimeoutError where it is not there within so many seconds."""
        async with asyncio.timeout(seconds):
            now = self.now()
            item = Item[Content, Result](content, lane, now, asyncio.get_running_loop().create_future())
            if lane not in self.lanes:
                self.lanes = dict(sorted([*self.lanes.items(), (lane, deque())], key=lambda entry: entry[0].rank))
            self.lanes[lane].append(item)
            self.wake()
            try:
                return await item.answer
            except asyncio.CancelledError:
                self.withdraw(item)
                raise

    def withdraw(self, item: Item[Content, Result]) -> None:
        """Forget an item whose caller went away; a call that nobody waits for any more is given up."""
        self.tally.left += 1
        if not item.answer.cancelled():
            item.answer.exception()  # it came too late, and nobody is left to raise it
        elif item.call is not None:
            self.in_service -= 1
            if not item.call.wanted and item.call.task is not None:
                item.call.task.cancel()
        for queue in (self.again, self.lanes[item.lane]):
            if item in queue:
                queue.remove(item)
        self.wake()

    # ------------------------------------------------------------ deciding

    @property
    def queued(self) -> int:
        return sum(map(len, self.lanes.values()))

    def wake(self) -> None:
        """Decide once everybody who can run has run: those who submit together go together."""
        if self.pumping is None:
            self.pumping = asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """Start calls while there are slots and reasons."""
        self.pumping = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        while len(self.calls) < self.slots:
            if self.again:
                self.tally.flushes["again"] += 1
                self.start([self.again.popleft()])
            elif not self.queued or not self.flush():
                break

    def flush(self) -> bool:
        """Start the calls of one flush; where it is too early for one, set a timer and say no."""
        now, due = self.now(), self.due()
        view = View(
            queued=self.queued,
            in_service=self.in_service,
            live=self.live,
            overdue=now >= due - RESOLUTION,
            slots=self.slots,
            free=self.slots - len(self.calls),
            costs=self.fit.costs,
            learning=any(len(call.items) > 1 for call in self.calls),
        )
        reason = self.rule.reason(view)
        if not reason:
            if not view.overdue and due < math.inf:
                self.timer = asyncio.get_running_loop().call_at(due, self.wake)
            return False
        self.tally.flushes[reason] += 1
        for size in self.rule.sizes(view):
            self.start(self.take(size))
        return True

    def due(self) -> float:
        """When the first item will have waited as long as its lane allows."""
        return min(queue[0].submitted + self.patience(lane) for lane, queue in self.lanes.items() if queue)

    def patience(self, lane: Lane) -> float:
        price = 0.0 if self.fit.costs is None else self.fit.costs.per_call
        return lane.max_wait + lane.max_wait_prices * price

    def take(self, size: int) -> list[Item[Content, Result]]:
        """The next items, by rank and then by age."""
        taken: list[Item[Content, Result]] = []
        for queue in self.lanes.values():
            taken += [queue.popleft() for _ in range(min(len(queue), size - len(taken)))]
        return taken

    # ------------------------------------------------------------ calling

    def start(self, items: Sequence[Item[Content, Result]]) -> None:
        """Begin a call in a free slot, for those whose callers are still there."""
        now = self.now()
        call = BatchCall([item for item in items if not item.answer.done()])
        if not call.items:
            return
        for item in call.items:
            item.call = call
            self.tally.waited += now - item.submitted
        self.account(now)
        self.calls.add(call)
        size = len(call.items)
        self.in_service += size
        self.tally.calls += 1
        self.tally.items += size
        self.tally.largest = max(self.tally.largest, size)
        asyncio.get_running_loop().create_task(self.serve(call), name=f"{self.name} of {size}")

    async def serve(self, call: BatchCall[Content, Result]) -> None:
        """Make a call and hand out its answers."""
        call.task, began = asyncio.current_task(), self.now()
        if not call.wanted:
            self.end(call, 0.0)
            return
        try:
            async with asyncio.timeout(self.call_seconds):
                answers = await calls.call(self.function, [item.content for item in call.items])
        except BaseException as error:
            if not is_running(call.task):  # the loop is gone, and with it whoever waited
                raise
            self.end(call, self.now() - began)
            if calls.is_from_outside(error):
                raise
            self.pass_on(call, error)
        else:
            seconds = self.now() - began
            self.end(call, seconds)
            self.answer(call, answers, seconds)

    def end(self, call: BatchCall[Content, Result], seconds: float) -> None:
        """Give back the slot."""
        self.account(self.now())
        self.calls.discard(call)
        self.in_service -= call.wanted
        self.tally.ended += 1
        self.tally.served += seconds
        asyncio.get_running_loop().call_soon(self.wake)  # after those who are answered now

    def answer(self, call: BatchCall[Content, Result], answers: Any, seconds: float) -> None:
        """Give every item its own result."""
        size, is_list = len(call.items), type(answers) in (list, tuple)
        if not is_list or len(answers) != size:
            got = f"a list of {len(answers)}" if is_list else type(answers).__name__
            self.fail(call, lambda: BatchFailure(f"{self.name} must return a list of {size} results, got {got}"))
            return
        self.fit.observe(size, seconds)
        for item, answer in zip(call.items, answers, strict=True):
            if item.answer.done():
                continue
            if issubclass(type(answer), BaseException):
                item.answer.set_exception(raisable(answer))
            else:
                item.answer.set_result(answer)

    def pass_on(self, call: BatchCall[Content, Result], error: BaseException) -> None:
        """Fail the items of a call that raised, or ask for each of them again."""
        size = len(call.items)
        if size == 1:
            self.fail(call, lambda: raisable(error))
        elif self.idempotent:
            self.tally.failed += 1
            waiting = [item for item in call.items if not item.answer.done()]
            for item in waiting:
                item.call = None
            self.again.extend(waiting)
        else:
            kind: type[Exception] = TimeoutError if issubclass(type(error), TimeoutError) else BatchFailure
            text, raised = f"{self.name} failed for a batch of {size}: {error_line(error)}", Raised.of(error)
            self.fail(call, lambda: carrying(kind(text), raised))

    def fail(self, call: BatchCall[Content, Result], failure: Callable[[], Exception]) -> None:
        """Fail all items of a call, each with an error of its own."""
        self.tally.failed += 1
        for item in call.items:
            if not item.answer.done():
                item.answer.set_exception(failure())

    # ------------------------------------------------------------ figures

    def account(self, now: float) -> None:
        """Count the slots that were busy until now."""
        self.tally.busy += len(self.calls) * (now - self.changed)
        self.changed = now

    def report(self) -> dict[str, float]:
        """Figures since the last report; a mean over nothing is NaN."""
        now = self.now()
        self.account(now)
        tally, self.tally = self.tally, QueueTally(now)
        costs = self.fit.costs or CallCosts(math.nan, math.nan)
        return {
            "calls": float(tally.calls),
            "items": float(tally.items),
            "failed_calls": float(tally.failed),
            "left_items": float(tally.left),
            "size_mean": ratio(tally.items, tally.calls),
            "size_max": float(tally.largest),
            "wait_seconds": ratio(tally.waited, tally.items),
            "call_seconds": ratio(tally.served, tally.ended),
            "slot_use": ratio(tally.busy, self.slots * (now - tally.since)),
            **{f"flush/{reason}": float(tally.flushes[reason]) for reason in (*REASONS, "again")},
            "fitted/per_call": costs.per_call,
            "fitted/per_item": costs.per_item,
        }


def is_running(task: asyncio.Task[None] | None) -> bool:
    try:
        return asyncio.current_task() is task
    except RuntimeError:
        return False


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def raisable(error: BaseException) -> Exception:
    """An error that a future takes, and that ends nothing but what it is raised in."""
    plain = issubclass(type(error), Exception) and not issubclass(type(error), StopIteration)
    return error if plain else carrying(BatchFailure(error_line(error)), Raised.of(error))  # type: ignore[return-value]

import asyncio
import math
import threading
import time
from random import Random

import pytest

from support import acting
from turnwise.rollout.batching.flush import Adaptive, Lockstep
from turnwise.rollout.batching.microbatch import AT_ONCE, BatchFailure, Lane, MicroBatcher
from turnwise.testing.clock import run

PATIENT = Lane(rank=0, max_wait=2.0)


def now():
    return asyncio.get_running_loop().time()


class Service:
    """A batched call of known prices, and what it was asked when."""

    def __init__(self, per_call=1.0, per_item=0.0, answer=lambda item: item):
        self.per_call = per_call
        self.per_item = per_item
        self.answer = answer
        self.calls = []

    async def ask(self, items):
        self.calls.append((round(now(), 3), list(items)))
        await asyncio.sleep(self.per_call + self.per_item * len(items))
        return [self.answer(item) for item in items]

    def batcher(self, **settings):
        """In front of it; prices are known."""
        batcher = MicroBatcher(self.ask, **settings)
        for size in (1, 2):
            batcher.fit.observe(size, self.per_call + self.per_item * size)
        return batcher


async def arrive(batcher, schedule, lane=AT_ONCE, **how):
    """Submit what is named at the times given: the outcomes, and when they were there."""

    async def one(at, item):
        await asyncio.sleep(at)
        outcome = await outcome_of(batcher.submit(item, lane, **how))
        return item, outcome, round(now(), 3)

    return await asyncio.gather(*(one(at, item) for at, item in schedule))


async def outcome_of(work):
    try:
        return await work
    except Exception as error:
        return error


def crowd(batcher, live):
    """So many who could come."""
    for _ in range(live):
        batcher.enter()


def played(batcher, schedule, live=0, **how):
    async def work():
        crowd(batcher, live)
        return await arrive(batcher, schedule, **how)

    return run(work())


# ---------------------------------------------------------------- when and how much


def test_those_who_come_together_go_together():
    service = Service(answer=str.upper)
    outcomes = played(service.batcher(slots=1), [(0, "a"), (0, "b"), (0, "c")])
    assert service.calls == [(0, ["a", "b", "c"])]
    assert outcomes == [("a", "A", 1), ("b", "B", 1), ("c", "C", 1)]


def test_no_call_waits_while_a_slot_is_free():
    service = Service()
    outcomes = played(service.batcher(slots=2), [(0, "a"), (0.1, "b"), (0.2, "c"), (0.3, "d")], live=9)
    assert service.calls == [(0, ["a"]), (0.1, ["b"]), (1, ["c", "d"])]
    assert [at for _, _, at in outcomes] == [1, 1.1, 2, 2]


def test_a_call_is_held_back_until_the_oldest_has_waited():
    service = Service()
    played(service.batcher(slots=1), [(0, "a"), (1, "b"), (1.9, "c"), (2.1, "d")], live=9, lane=PATIENT)
    assert service.calls == [(2, ["a", "b", "c"]), (4.1, ["d"])]


def test_what_waited_for_a_slot_has_waited():
    service = Service(per_call=5.0)
    played(service.batcher(slots=1), [(0, "a"), (3, "b"), (4, "c")], live=9, lane=PATIENT)
    assert service.calls == [(2, ["a"]), (7, ["b", "c"])]


def test_the_wait_may_be_in_prices_of_a_call():
    service = Service(per_call=4.0, per_item=0.01)
    played(service.batcher(slots=1), [(0, "a"), (1, "b")], live=9, lane=Lane(max_wait_prices=0.5))
    assert service.calls == [(2, ["a", "b"])]


def test_nothing_is_held_back_while_costs_are_unknown():
    service = Service(per_call=4.0)
    played(MicroBatcher(service.ask, slots=1), [(0, "a"), (1, "b")], live=9, lane=Lane(max_wait_prices=0.5))
    assert service.calls == [(0, ["a"]), (4, ["b"])]


def test_a_full_batch_goes_at_once():
    service = Service()
    played(service.batcher(slots=1, rule=Adaptive(2)), [(0, "a"), (0.5, "b"), (0.6, "c")], live=9, lane=PATIENT)
    assert service.calls == [(0.5, ["a", "b"]), (2.6, ["c"])]


def test_the_last_ones_go_at_once():
    service = Service()
    batcher = service.batcher(slots=1)

    async def work():
        crowd(batcher, 3)
        waiting = asyncio.create_task(arrive(batcher, [(0, "a"), (0.5, "b")], Lane(max_wait=math.inf)))
        await asyncio.sleep(7)
        assert service.calls == []
        batcher.leave()
        await waiting

    run(work())
    assert service.calls == [(7, ["a", "b"])]


def test_who_is_in_service_cannot_come_either():
    service = Service(per_call=5.0)
    forever = Lane(max_wait=math.inf)
    played(service.batcher(slots=2, rule=Adaptive(2)), [(0, "a"), (0, "b"), (1, "c")], live=3, lane=forever)
    assert service.calls == [(0, ["a", "b"]), (1, ["c"])]


def test_present_counts_as_live_whatever_happens():
    batcher = Service().batcher()

    async def work():
        with pytest.raises(KeyError), batcher.present():
            assert batcher.live == 1
            raise KeyError
        return batcher.live

    assert run(work()) == 0


def test_the_size_follows_the_prices():
    cheap, dear = Service(0.05, 2.0), Service(6.0, 0.05)
    everybody = [(0, str(number)) for number in range(40)]
    for service, sizes in ((cheap, [1] * 40), (dear, [40])):
        played(service.batcher(slots=4), everybody)
        assert [len(items) for _, items in service.calls] == sizes


def test_prices_are_learned_by_one_call_at_a_time():
    service = Service(0.05, 2.0)
    batcher = MicroBatcher(service.ask, slots=4)
    played(batcher, [(0, str(number)) for number in range(40)])
    assert [len(items) for _, items in service.calls[:4]] == [10, 1, 1, 1]
    assert max(len(items) for _, items in service.calls[1:]) == 1
    assert batcher.fit.costs.per_call == pytest.approx(0.05)
    assert batcher.fit.costs.per_item == pytest.approx(2.0)


def test_lockstep_waits_for_everyone_each_round():
    service = Service()

    async def attempt(batcher, name, waits):
        with batcher.present():
            for number, wait in enumerate(waits):
                await asyncio.sleep(wait)
                await batcher.submit(f"{name}{number}")

    async def work(slots):
        batcher = service.batcher(slots=slots, rule=Lockstep())
        waits = {"a": [1, 1, 1], "b": [5], "c": [2, 9]}
        await asyncio.gather(*(attempt(batcher, name, own) for name, own in waits.items()))
        return batcher.report()

    assert run(work(1))["flush/everyone"] == 3
    assert service.calls == [(5, ["a0", "c0", "b0"]), (15, ["a1", "c1"]), (17, ["a2"])]
    service.calls.clear()
    assert run(work(2))["flush/everyone"] == 3  # as many rounds, in two parts each
    assert [at for at, _ in service.calls] == [5, 5, 15, 15, 17]


def test_lockstep_in_parts_is_still_lockstep():
    """A part that returns early does not start a round of its own."""
    service = Service(0.0, 1.0)
    batcher = service.batcher(slots=2, rule=Lockstep())

    async def attempt(name):
        with batcher.present():
            for number in range(2):
                await batcher.submit(f"{name}{number}")

    async def work():
        await asyncio.gather(*map(attempt, "abc"))

    run(work())
    assert service.calls == [(0, ["a0", "b0"]), (0, ["c0"]), (2, ["c1", "a1"]), (2, ["b1"])]


# ---------------------------------------------------------------- priorities


def test_training_goes_before_validation():
    service = Service()
    batcher = service.batcher(slots=1, rule=Adaptive(2))
    training, validation = Lane(rank=0), Lane(rank=1)

    async def work():
        await asyncio.gather(
            arrive(batcher, [(0, "v1"), (0.1, "v2"), (0.1, "v3")], validation),
            arrive(batcher, [(0.2, "t1"), (0.3, "t2"), (1.5, "t3")], training),
        )

    run(work())
    assert service.calls == [(0, ["v1"]), (1, ["t1", "t2"]), (2, ["t3", "v2"]), (3, ["v3"])]


def test_impatient_training_takes_patient_validation_along():
    service = Service(per_call=1.0, per_item=0.001)
    batcher = service.batcher(slots=1)

    async def work():
        crowd(batcher, 9)
        await asyncio.gather(
            arrive(batcher, [(0, "v")], Lane(rank=1, max_wait=60.0)), arrive(batcher, [(5, "t")], Lane(rank=0))
        )

    run(work())
    assert service.calls == [(5, ["t", "v"])]


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("error", [KeyError("b"), StopIteration("b"), SystemExit("b"), asyncio.CancelledError("b")])
def test_an_item_fails_alone(error):
    service = Service(answer=lambda item: error if item == "b" else item)
    (_, a, _), (_, b, _), (_, c, _) = played(service.batcher(slots=1), [(0, "a"), (0, "b"), (0, "c")])
    assert (a, c) == ("a", "c")
    assert isinstance(b, Exception)
    assert "b" in str(b)


def test_a_call_that_raises_fails_everybody_in_it():
    async def break_down(items):
        await asyncio.sleep(1)
        raise OSError("no connection")

    batcher = MicroBatcher(break_down, slots=1)
    outcomes = [outcome for _, outcome, _ in played(batcher, [(0, "a"), (0, "b"), (3, "c")])]
    assert len(set(map(id, outcomes))) == 3
    assert all(isinstance(outcome, BatchFailure) for outcome in outcomes[:2])
    assert "break_down failed for a batch of 2: OSError: no connection" in str(outcomes[0])
    assert isinstance(outcomes[2], OSError)
    assert (len(batcher.calls), batcher.in_service, batcher.fit.costs) == (0, 0, None)


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, GeneratorExit, StopAsyncIteration])
def test_whatever_a_call_raises_ends_only_the_call(kind):
    class Broken(Service):
        async def ask(self, items):
            if "poison" in items:
                await asyncio.sleep(1)
                raise kind("out of here")
            return await super().ask(items)

    service = Broken()
    outcomes = played(service.batcher(slots=1), [(0, "a"), (0, "poison"), (2, "b")])
    assert [isinstance(outcome, Exception) for _, outcome, _ in outcomes] == [True, True, False]


class Fragile(Service):
    """Raises where a batch has poison in it."""

    async def ask(self, items):
        answers = await super().ask(items)
        if "poison" in items:
            raise ValueError("poison")
        return answers


def test_an_idempotent_call_is_asked_again_item_by_item():
    service = Fragile()
    batcher = service.batcher(slots=2, idempotent=True)
    outcomes = played(batcher, [(0, "a"), (0, "poison"), (0, "b"), (0, "c")])
    assert service.calls == [
        (0, ["a", "poison", "b", "c"]),
        (1, ["a"]),
        (1, ["poison"]),
        (2, ["b"]),
        (2, ["c"]),
    ]
    assert [outcome for _, outcome, _ in outcomes][0::2] == ["a", "b"]
    assert str(outcomes[1][1]) == "poison"
    assert outcomes[3][1:] == ("c", 3)


def test_another_call_is_not():
    service = Fragile()
    outcomes = played(service.batcher(slots=2), [(0, "a"), (0, "poison")])
    assert len(service.calls) == 1
    assert all(isinstance(outcome, BatchFailure) for _, outcome, _ in outcomes)


@pytest.mark.parametrize(
    ("answers", "got"),
    [
        (["a"], "a list of 1"),
        (["a", "b", "c"], "a list of 3"),
        ([], "a list of 0"),
        (None, "NoneType"),
        ("ab", "str"),
        ({"a": 1, "b": 2}, "dict"),
        (iter([1, 2]), "list_iterator"),
    ],
)
def test_nonsense_fails_everybody_and_says_why(answers, got):
    async def answer(items):
        return answers

    batcher = MicroBatcher(answer, slots=1, name="Judge.grade", idempotent=True)
    for _, outcome, _ in played(batcher, [(0, "a"), (0, "b")]):
        assert isinstance(outcome, BatchFailure)
        assert str(outcome) == f"Judge.grade must return a list of 2 results, got {got}"


# ---------------------------------------------------------------- going away


def test_a_deadline_counts_from_submission_and_leaves_the_queue():
    service = Service(per_call=5.0)
    batcher = service.batcher(slots=1)

    async def work():
        first = asyncio.create_task(batcher.submit("a"))
        await asyncio.sleep(1)
        late = await arrive(batcher, [(0, "b")], seconds=2)
        await arrive(batcher, [(0, "c")])
        return await first, late

    first, [(_, late, at)] = run(work())
    assert first == "a"
    assert isinstance(late, TimeoutError)
    assert at == 3
    assert service.calls == [(0, ["a"]), (5, ["c"])]


def test_in_service_one_who_leaves_is_dropped_and_the_others_are_not():
    service = Service(per_call=5.0)
    batcher = service.batcher(slots=1)

    async def work():
        one, other = (asyncio.create_task(batcher.submit(item)) for item in "ab")
        await asyncio.sleep(1)
        one.cancel()
        await asyncio.sleep(1)
        assert (one.cancelled(), batcher.in_service, len(batcher.calls)) == (True, 1, 1)
        return await other, now()

    assert run(work()) == ("b", 5)


class Stuck(Service):
    """Never answers, as long as it is stuck."""

    stuck = True

    async def ask(self, items):
        if self.stuck:
            await asyncio.Event().wait()
        return await super().ask(items)


def test_a_call_without_a_waiting_attempt_is_cancelled():
    service = Stuck()
    batcher = service.batcher(slots=1)

    async def work():
        stuck = await arrive(batcher, [(0, "a"), (0, "b")], seconds=3)
        service.stuck = False
        return stuck, await arrive(batcher, [(0, "c")])

    stuck, later = run(work())
    assert all(isinstance(outcome, TimeoutError) for _, outcome, _ in stuck)
    assert later == [("c", "c", 4)]


def test_leaving_before_the_call_has_begun_frees_the_slot():
    service = Service()
    batcher = service.batcher(slots=1)

    async def work():
        call = asyncio.create_task(batcher.submit("a"))
        while not batcher.calls:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return await batcher.submit("b")

    assert run(work()) == "b"
    assert [items for _, items in service.calls] == [["b"]]
    assert (batcher.in_service, len(batcher.calls)) == (0, 0)


@pytest.mark.parametrize("fails", [True, False])
def test_leaving_in_the_moment_of_the_answer(fails):
    """Whoever is cancelled while the call ends has not had the time to take its item back."""
    callers, calls = [], []

    async def ask(items):
        calls.append(list(items))
        await asyncio.sleep(1)
        callers[0].cancel()
        if fails and len(items) > 1:
            raise ValueError("down")
        return items

    async def work():
        batcher = MicroBatcher(ask, slots=1, idempotent=True)
        callers.extend(asyncio.create_task(batcher.submit(item)) for item in "ab")
        outcomes = await asyncio.gather(*callers, return_exceptions=True)
        await asyncio.sleep(5)
        assert (batcher.in_service, batcher.queued, len(batcher.again), len(batcher.calls)) == (0, 0, 0, 0)
        return outcomes

    left, answered = run(work())
    assert isinstance(left, asyncio.CancelledError)
    assert answered == "b"
    assert calls == ([["a", "b"], ["b"]] if fails else [["a", "b"]])


def test_a_call_that_never_returns_is_given_up_in_time():
    batcher = Stuck().batcher(slots=1, call_seconds=10.0)
    outcomes = played(batcher, [(0, "a"), (0, "b"), (1, "c")])
    assert [at for _, _, at in outcomes] == [10, 10, 20]
    assert all(isinstance(outcome, TimeoutError) for _, outcome, _ in outcomes)


def test_another_loop_begins_anew():
    service = Stuck()
    batcher = service.batcher(slots=1)

    async def leave_in_the_middle():
        batcher.enter()
        calls = [asyncio.create_task(batcher.submit(item)) for item in "abc"]
        await asyncio.sleep(1)
        return calls

    run(leave_in_the_middle())
    service.stuck = False
    assert played(batcher, [(0, "d")]) == [("d", "d", 1)]
    assert batcher.live == 0


# ---------------------------------------------------------------- threads


def test_a_plain_function_runs_in_as_many_threads_as_slots():
    at_once, most = [], []

    def block(items):
        at_once.append(threading.get_ident())
        most.append(len(at_once))
        time.sleep(0.05)
        at_once.remove(threading.get_ident())
        return [item * 2 for item in items]

    async def work():
        batcher = MicroBatcher(block, slots=2, rule=Adaptive(1))
        return await asyncio.gather(*(batcher.submit(number) for number in range(6)))

    assert acting.run(work()) == [0, 2, 4, 6, 8, 10]
    assert max(most) == 2


def test_a_slow_service_does_not_hold_up_another():
    release = threading.Event()

    def slow(items):
        release.wait(20)
        return items

    async def work():
        judge, verifier = MicroBatcher(slow, slots=4, rule=Adaptive(1)), MicroBatcher(list, slots=1)
        stuck = [asyncio.create_task(judge.submit(number)) for number in range(40)]
        await asyncio.sleep(0.05)
        checked = await asyncio.gather(*(verifier.submit(number, seconds=10) for number in range(40)))
        assert not any(call.done() for call in stuck)
        release.set()
        assert await asyncio.gather(*stuck) == checked

    acting.run(work())


def test_a_thread_that_never_returns_does_not_keep_its_slot():
    forever = threading.Event()

    def hang_on_poison(items):
        if "poison" in items:
            forever.wait(30)
        return items

    async def work():
        batcher = MicroBatcher(hang_on_poison, slots=1)
        with pytest.raises(TimeoutError):
            await batcher.submit("poison", seconds=0.1)
        return await batcher.submit("a", seconds=10)

    assert acting.run(work()) == "a"
    forever.set()


# ---------------------------------------------------------------- figures


def test_the_report_counts():
    service = Service(per_call=2.0, per_item=0.5, answer=lambda item: 1 / item)
    batcher = service.batcher(slots=2, rule=Adaptive(3))

    async def work():
        crowd(batcher, 9)
        await arrive(batcher, [(0, 1), (0, 2), (1, 3), (2, 4), (2.5, 5)])
        await asyncio.sleep(2.5)
        return batcher.report(), batcher.report()

    first, second = run(work())
    assert service.calls == [(0, [1, 2]), (1, [3]), (3, [4, 5])]
    assert first == {
        "calls": 3,
        "items": 5,
        "failed_calls": 0,
        "left_items": 0,
        "size_mean": pytest.approx(5 / 3),
        "size_max": 2,
        "wait_seconds": pytest.approx(1.5 / 5),
        "call_seconds": pytest.approx((3 + 2.5 + 3) / 3),
        "slot_use": pytest.approx((3 + 2.5 + 3) / (2 * 8.5)),
        "flush/full": 0,
        "flush/everyone": 0,
        "flush/waited": 3,
        "flush/again": 0,
        "fitted/per_call": pytest.approx(2.0),
        "fitted/per_item": pytest.approx(0.5),
    }
    assert (second["calls"], second["items"]) == (0, 0)
    assert math.isnan(second["size_mean"])
    assert second["fitted/per_call"] == pytest.approx(2.0)


def test_the_report_counts_what_went_wrong():
    batcher = Fragile().batcher(slots=1, idempotent=True)

    async def work():
        await arrive(batcher, [(0, "a"), (0, "poison")])
        await arrive(batcher, [(0, "b")], seconds=0.5)
        return batcher.report()

    report = run(work())
    assert (report["failed_calls"], report["left_items"], report["flush/again"]) == (2, 1, 2)


# ---------------------------------------------------------------- all of it at once


class Chaos:
    """A random batcher over a random service, and random callers."""

    def __init__(self, seed):
        self.random = Random(seed)
        self.batcher = MicroBatcher(
            self.ask,
            slots=self.random.randint(1, 4),
            rule=self.random.choice([Lockstep(), Adaptive(1), Adaptive(3), Adaptive(64)]),
            idempotent=self.random.random() < 0.5,
            call_seconds=30.0,
        )
        self.lanes = [Lane(0), Lane(1, max_wait=self.random.choice([0, 1, math.inf])), Lane(1, max_wait_prices=0.5)]
        self.submitted = self.ended = 0

    async def ask(self, items):
        assert len(self.batcher.calls) <= self.batcher.slots
        await asyncio.sleep(self.random.choice([0, 0.5, 1, 5, 100]))
        fate = self.random.random()
        if fate < 0.1:
            raise self.random.choice([ValueError("down"), SystemExit("out"), asyncio.CancelledError("gone")])
        if fate < 0.15:
            return items[1:]
        return [ValueError("no") if self.random.random() < 0.1 else ("answer to", item) for item in items]

    async def attempt(self, name):
        with self.batcher.present():
            for turn in range(self.random.randint(0, 4)):
                await asyncio.sleep(self.random.expovariate(1.0))
                self.submitted += 1
                seconds = self.random.choice([None, 0.5, 3.0, 50.0])
                try:
                    answer = await self.batcher.submit((name, turn), self.random.choice(self.lanes), seconds)
                    assert answer == ("answer to", (name, turn))
                except (BatchFailure, ValueError, TimeoutError):
                    pass
                finally:
                    self.ended += 1

    async def play(self):
        attempts = [asyncio.create_task(self.attempt(name)) for name in range(self.random.randint(1, 8))]
        for attempt in attempts:
            if self.random.random() < 0.2:
                asyncio.get_running_loop().call_later(self.random.expovariate(0.5), attempt.cancel)
        for outcome in await asyncio.gather(*attempts, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
        await asyncio.sleep(200)  # calls whose callers are gone come to an end too
        batcher = self.batcher
        assert self.submitted == self.ended
        assert (batcher.live, batcher.queued, batcher.in_service, len(batcher.calls)) == (0, 0, 0, 0)
        assert not batcher.again


def test_no_schedule_leaves_an_attempt_waiting():
    submitted = 0
    for seed in range(500):
        chaos = Chaos(seed)
        run(chaos.play(), seed)
        submitted += chaos.submitted
    assert submitted > 2000

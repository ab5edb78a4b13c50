"""The first failure of each kind keeps its traceback, the others are counted, wherever the environment lives."""

import asyncio
import logging
import threading

import pytest

from support import odd
from support.acting import Puppet, attempted, limits, renderer, run, says, user
from support.odd import Odd
from turnwise.cli.events import EventHandler
from turnwise.engines.base import Sampling
from turnwise.envs.base import Reply
from turnwise.envs.isolation.isolated import isolate
from turnwise.rollout.batching.batches import Batches
from turnwise.rollout.batching.flush import Adaptive
from turnwise.rollout.batching.microbatch import Lane
from turnwise.rollout.group import AttemptMaker
from turnwise.rollout.scene import Attempt
from turnwise.types import Status, Task


def line_of(path, text):
    """The number of the line with a text."""
    with open(path) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


class Broken(Puppet):
    async def step(self, message):
        return helper(message)


class InThread(Puppet):
    def step(self, message):
        return helper(message)


class Together(Puppet):
    @classmethod
    def step_many(cls, environments, messages):
        return [helper(message) for message in messages]


class OneByOne(Puppet):
    @classmethod
    async def step_many(cls, environments, messages):
        return [caught(message) for message in messages]


def caught(message):
    try:
        return helper(message)
    except IndexError as error:
        return error


def helper(message):
    return [][7]  # here it breaks


HERE = f"{__file__.rpartition('/')[2]}:{line_of(__file__, '# here it breaks')}"


def made_group(make, attempts=6, retries=0, **bounds):
    attempt_maker = AttemptMaker(
        {"hops": make}, says(), renderer(), Sampling(99), limits(**bounds), 0, "train", attempts, retries=retries
    )
    return attempt_maker, run(attempt_maker.group(Task("t-1", "hops", {"n": 3}), 0), seconds=60)


def batched(kind):
    return Batches(kind, rule=Adaptive(), slots=1, call_seconds=None).wrap(kind, Lane())


MAKERS = {
    "in the loop": lambda: Broken,
    "in a thread": lambda: InThread,
    "a batch that raises": lambda: batched(Together),
    "a batch with errors in it": lambda: batched(OneByOne),
}


@pytest.mark.parametrize("where", MAKERS)
def test_the_first_of_a_kind_is_shown_with_its_traceback_and_the_others_are_counted(where, caplog):
    attempt_maker, group = made_group(MAKERS[where]())
    assert [made.status for made in group.failed] == [Status.failed] * 6
    [record] = caplog.records
    assert "failed: IndexError: list index out of range (" in record.getMessage()
    assert HERE in record.getMessage()
    assert "\n" not in record.getMessage()
    assert "Traceback (most recent call last)" in caplog.text
    assert "return [][7]  # here it breaks" in caplog.text
    caplog.clear()
    attempt_maker.environments["hops"].failures.sum_up("step 3")
    [record] = caplog.records
    assert record.getMessage().startswith("step 3: 5 more failures like those before: 5 x IndexError at ")
    assert record.getMessage().endswith(HERE)
    attempt_maker.environments["hops"].failures.sum_up("step 4")
    assert len(caplog.records) == 1


def test_a_separate_process_sends_its_traceback(caplog):
    kind = isolate(Odd, "support.odd:Odd")
    for word, text in (("raise", 'raise KeyError("first'), ("lie", 'reward=float("nan")')):
        caplog.clear()
        made = run(attempted(kind, says(word), which=Attempt(0, "train", odd.TASK)), seconds=60)
        place = f"odd.py:{line_of(odd.__file__, text)}"
        assert place in caplog.records[0].getMessage()
        assert "Traceback (most recent call last)" in caplog.text
        assert text in caplog.text
        assert place in made.failure


def test_a_trajectory_says_why_it_failed():
    [made] = made_group(Broken, attempts=1)[1].failed
    assert made.failure.endswith(f"{HERE}: list index out of range")
    assert made.reason.startswith("IndexError at ")
    assert made.reason.endswith(HERE)
    fine = run(attempted(Puppet(Reply(finished=True))))
    assert (fine.failure, fine.reason) == ("", "")
    long = run(attempted(Puppet(opening=Reply(user("x" * 9000)))))
    assert (long.status, long.reason) == (Status.prompt_too_long, "the first prompt does not fit")
    assert f"it has {long.marks['prompt_tokens']:.0f} tokens; raise rollout.max_prompt_tokens" in long.failure


def test_different_lines_are_different_kinds(caplog):
    class Several(Puppet):
        number = 0

        async def step(self, message):
            self.number = Several.number = (Several.number + 1) % 3
            if self.number == 0:
                raise ValueError("the text is not what tells them apart: " + str(id(self)))
            if self.number == 1:
                raise ValueError("b")
            raise KeyError("c")

    attempt_maker, _ = made_group(Several, attempts=9)
    assert [record.getMessage().count("failed: ") for record in caplog.records] == [1, 1, 1]
    assert sorted(attempt_maker.environments["hops"].failures.hidden.values()) == [2, 2, 2]


def test_attempts_that_are_made_again_are_counted_too():
    attempt_maker, group = made_group(Broken, attempts=2, retries=3)
    assert len(group.failed) == 2
    assert attempt_maker.environments["hops"].failures.counted.total() == 8


def test_a_time_out_names_the_line_that_was_waited_in(caplog):
    class Waits(Puppet):
        async def step(self, message):
            await asyncio.sleep(3600)  # here it waits

    made = run(attempted(Waits(), call_seconds=0.1))
    assert made.status is Status.timed_out
    [record] = caplog.records
    assert f"test_failures.py:{line_of(__file__, '# here it waits')}" in record.getMessage()
    assert "raise rollout.limits.call_seconds" in record.getMessage()
    assert made.reason.startswith("TimeoutError at ")


def test_a_wrong_answer_names_the_method_that_gave_it(caplog):
    class Wrong(Puppet):
        async def step(self, message):  # here it begins
            return 7

    run(attempted(Wrong()))
    [record] = caplog.records
    assert f"must return a Reply, got int ({__file__}:" in record.getMessage() or "test_failures.py:" in caplog.text
    assert str(line_of(__file__, "# here it begins")) in record.getMessage()


def test_unlimited_kinds_of_failures_are_counted_together(caplog):
    class Endless(Puppet):
        async def step(self, message):
            raise type(f"Error{id(self)}{len(caplog.records)}", (Exception,), {})("x")

    attempt_maker, _ = made_group(Endless, attempts=60)
    failures = attempt_maker.environments["hops"].failures
    assert len(caplog.records) == len(failures.kinds) == 40
    assert failures.hidden == {"other kinds": 20}


def test_the_screen_and_the_file_have_every_first_traceback(tmp_path, capsys):
    """Also where ten warnings have been shown already."""
    handler = EventHandler(tmp_path / "events.log")
    log = logging.getLogger("turnwise")
    log.addHandler(handler)
    try:
        for number in range(12):
            log.warning("something else %d", number)
        attempt_maker, _ = made_group(Broken)
        attempt_maker.environments["hops"].failures.sum_up("step 1")
    finally:
        log.removeHandler(handler)
    shown, written = capsys.readouterr().err, (tmp_path / "events.log").read_text()
    for text in (shown, written):
        assert text.count("Traceback (most recent call last)") == 1
        assert text.count("return [][7]  # here it breaks") == 1
        assert HERE in text
    assert "5 more failures like those before" in written
    assert len([line for line in written.splitlines() if "failed" in line]) == 1


def test_threads_that_never_return_have_a_bound(monkeypatch, caplog):
    from turnwise.envs.daemon_threads import DaemonThreads
    from turnwise.rollout import calls

    release = threading.Event()
    monkeypatch.setattr(calls, "threads", DaemonThreads("environments", most_hanging=3))

    class Hangs(Puppet):
        def step(self, message):
            release.wait()

    try:
        _, group = made_group(Hangs, attempts=3, call_seconds=0.1)
        assert [made.status for made in group.failed] == [Status.timed_out] * 3
        _, group = made_group(Hangs, attempts=3, call_seconds=0.1)
        assert [made.status for made in group.failed] == [Status.failed] * 3
        assert "3 calls of environments hang" in group.failed[0].failure
    finally:
        release.set()
    for thread in list(calls.threads.hanging):
        thread.join(10)
    assert made_group(InThread, attempts=1)[1].failed[0].reason.startswith("IndexError")

import asyncio
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import pytest

from support.acting import attempted, says
from support.acting import run as run_it
from support.odd import LEFT_BEHIND, TASK, Odd
from support.paths import TESTS
from turnwise.envs.isolation.isolated import ProcessFailure, fork_server_of, isolate
from turnwise.messages import Message, ToolCall
from turnwise.rollout.concurrently import all_of
from turnwise.rollout.scene import Attempt
from turnwise.types import Status, Task

HERE = "support.odd:Odd"
KIND: Any = isolate(Odd, HERE)


def run(work):
    return run_it(work, 60)


async def opened(**settings):
    environment = KIND(**settings)
    reply = await environment.open(TASK)
    return environment, reply


async def say(environment, text):
    return await environment.step(Message("assistant", text))


def gone(pid):
    """Whether a process has ended, within a while."""
    for _ in range(400):
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.025)
    return False


def test_every_attempt_begins_with_the_same_modules():
    async def play():
        pairs = [await opened(factor=2) for _ in range(3)]
        for environment, _ in pairs:
            await environment.close()
        later, reply = await opened(factor=2)
        await later.close()
        return [reply for _, reply in pairs] + [reply]

    replies = run(play())
    assert {reply.messages[0].content for reply in replies} == {"1 6"}  # nobody has left anything behind
    assert len({reply.marks["pid"] for reply in replies}) == 4
    assert LEFT_BEHIND == []


def test_random_numbers_depend_on_the_task_alone():
    async def play():
        first, _ = await opened()
        alone = [(await say(first, "draw")).messages for _ in range(3)]
        (one, _), (two, _) = await opened(), await opened()
        mixed = []
        for turn in range(3):
            mixed.append((await say(one, "draw")).messages)
            for _ in range(turn):
                await say(two, "draw")
        for environment in (first, one, two):
            await environment.close()
        other = KIND()
        await other.open(Task("t-2", "odd", {"n": 1}))
        elsewhere = (await say(other, "draw")).messages
        await other.close()
        return alone, mixed, elsewhere

    state = random.getstate()
    alone, mixed, elsewhere = run(play())
    assert alone == mixed
    assert elsewhere != alone[0]
    assert random.getstate() == state


def test_replies_and_calls_arrive_as_they_were():
    async def play():
        environment, _ = await opened()
        everything = await say(environment, "all")
        heard = await environment.step(Message("assistant", "calls", calls=(ToolCall("f", {"x": [1, None]}),)))
        long = await say(environment, "long")
        closing = await environment.close()
        return everything, heard, long, closing

    everything, heard, long, closing = run(play())
    assert everything == Odd().step(Message("assistant", "all"))
    assert heard.messages[0].content == "[('f', {'x': [1, None]})]"
    assert len(long.messages[0].content) == 3_000_000
    assert closing.outcome == 0.5


@pytest.mark.parametrize(
    ("word", "error", "message"),
    [
        ("die", ProcessFailure, "the process of odd ended in the middle of step"),
        ("leave", ProcessFailure, "the process of odd ended in the middle of step"),
        ("raise", ProcessFailure, "KeyError: 'first line"),
        ("quit", ProcessFailure, "SystemExit: 1"),
        ("lie", ValueError, "finite numbers"),
    ],
)
def test_what_goes_wrong_there_is_an_error_here(word, error, message):
    async def play():
        environment, reply = await opened()
        try:
            await say(environment, word)
        finally:
            await environment.close()
            pids.append(int(reply.marks["pid"]))

    pids = []
    with pytest.raises(error, match=message):
        run(play())
    assert gone(pids[0])


@pytest.mark.parametrize("word", ["die", "raise", "lie"])
def test_a_crash_is_a_failed_attempt_and_the_others_go_on(word):
    async def play():
        which = Attempt(0, "train", TASK)
        return await all_of(attempted(KIND, says(said), which=which, max_turns=2) for said in ("fine", word, "fine"))

    first, crashed, last = run(play())
    assert [first.status, crashed.status, last.status] == [Status.too_many_turns, Status.failed, Status.too_many_turns]
    assert len(crashed.turns) == 1
    assert first.outcome == 0.5


def test_an_attempt_that_hangs_is_killed_when_it_is_closed():
    async def play():
        environment, reply = await opened()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await say(environment, "hang")
        await environment.close()
        return int(reply.marks["pid"])

    assert gone(run(play()))


def test_many_at_once():
    async def play():
        pairs = await asyncio.gather(*(opened(factor=n) for n in range(40)))
        answers = await asyncio.gather(*(say(environment, f"w{n}") for n, (environment, _) in enumerate(pairs)))
        await asyncio.gather(*(environment.close() for environment, _ in pairs))
        return [reply.messages[0].content for _, reply in pairs], [reply.messages[0].content for reply in answers]

    heard, answers = run(play())
    assert heard == [f"1 {3 * n}" for n in range(40)]
    assert answers == [f"w{n}" for n in range(40)]


def test_a_process_that_died_is_replaced():
    async def play():
        fork_server = fork_server_of(HERE)
        environment, reply = await opened()
        fork_server.process.kill()
        fork_server.process.wait()
        with pytest.raises(ProcessFailure):
            for _ in range(100):
                await say(environment, "still there")
                await asyncio.sleep(0.05)
        await environment.close()
        again, answer = await opened()
        await again.close()
        return int(reply.marks["pid"]), answer

    pid, answer = run(play())
    assert gone(pid)  # it went with the one it was forked from
    assert answer.messages[0].content == "1 3"


def test_all_end_with_the_run_even_while_they_are_busy():
    code = """
import asyncio, os, signal, sys
sys.path.insert(0, sys.argv[1])
from support.odd import TASK, Odd
from turnwise.envs.isolation.isolated import isolate, fork_server_of
from turnwise.messages import Message
async def main():
    environment = isolate(Odd, "support.odd:Odd")()
    reply = await environment.open(TASK)
    asyncio.ensure_future(environment.step(Message("assistant", "hang")))
    await asyncio.sleep(0.2)
    print(int(reply.marks["pid"]), fork_server_of("support.odd:Odd").process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    tests = str(TESTS)
    done = subprocess.run([sys.executable, "-c", code, tests], capture_output=True, text=True, timeout=600)
    child, parent = map(int, done.stdout.split())
    assert gone(child)
    assert gone(parent)


def test_the_expert_is_asked_there_and_a_seed_decides():
    async def play():
        environment, _ = await opened()
        said = [environment.demonstrate(0.0, random.Random(n)) for n in (1, 1, 2)]
        still = await say(environment, "on")
        await environment.close()
        return said, still

    (first, again, other), still = run(play())
    assert first == again != other
    assert still.messages[0].content == "on"


def test_settings_are_those_of_the_adapter():
    from turnwise.recipe.arguments import check_arguments

    assert check_arguments("odd", "env.settings", KIND, {"factor": 3}) == {"factor": 3}
    with pytest.raises(ValueError, match=r"env.settings.facto: odd takes no such setting; did you mean factor\?"):
        check_arguments("odd", "env.settings", KIND, {"facto": 3})
    with pytest.raises(ValueError, match="env.tasks.cont: odd takes no such setting; did you mean count"):
        check_arguments("odd", "env.tasks", KIND.tasks, {"cont": 3}, ("self", "split", "seed"))


def test_settings_are_looked_at_before_anything_starts():
    KIND.check_settings(factor=2)
    with pytest.raises(ValueError, match="thirteen is refused"):
        KIND.check_settings(factor=13)
    with pytest.raises(ValueError, match="odd cannot be opened: KeyError: 'fourteen'"):
        KIND.check_settings(factor=14)


def test_a_library_that_cannot_be_imported_says_why():
    broken = isolate(Odd, "no_such_module:Odd")

    async def play():
        environment = broken()
        try:
            await environment.open(TASK)
        finally:
            await environment.close()

    with pytest.raises(ProcessFailure, match="No module named"):
        run(play())
    with suppress(Exception):
        fork_server_of("no_such_module:Odd").end()


def test_one_that_was_never_opened_closes():
    assert run(KIND().close()) is None

"""A run in which everything fails for one reason stops where that is known, and says why."""

import asyncio

import pytest

from support.acting import Puppet, limits, renderer, run, says, trajectory, user
from support.running import micro_toml
from turnwise.cli.commands import main
from turnwise.engines.base import Sampling
from turnwise.envs.base import Reply
from turnwise.envs.split import draw_tasks
from turnwise.evaluation.result import evaluate
from turnwise.rollout.group import AttemptMaker
from turnwise.schedule.shared_failure import MIN_ATTEMPTS, SharedFailureCheck, shared_failure
from turnwise.schedule.stopping import RunStopped
from turnwise.schedule.stream import GroupStream, LagSlots
from turnwise.schedule.take import take
from turnwise.schedule.tasks import Draw
from turnwise.types import Group, Status, Task, Trajectory


class Typo:
    """What an author of an environment writes in the first hour."""

    opened = 0
    where = "step"

    @staticmethod
    def tasks(split, seed, count=400):
        return draw_tasks("typo", split, count, seed, lambda random: {"n": random.getrandbits(30)})

    async def open(self, task):
        Typo.opened += 1
        if Typo.where == "open":
            return Reply(user(task.data["m"]))  # a typo in open
        return Reply(user("go"))

    async def step(self, message):
        if Typo.where == "step":
            return Reply(finshed=True)  # type: ignore[call-arg]  # a typo in step
        return Reply(finished=True, outcome=1.0)

    async def close(self):
        return None

    def demonstrate(self, noise, random):
        return "go"


@pytest.fixture(autouse=True)
def anew():
    Typo.opened, Typo.where = 0, "step"


def line_of(text):
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def failing(reason="KeyError at maze.py:3", text="'x'", status=Status.failed):
    return Trajectory((), status, failure=f"{reason}: {text}")


# ---------------------------------------------------------------- whole runs


def train_typo(folder, *overrides):
    settings = [f"env.0.name={__name__}:Typo", "env.0.tasks={}", "evaluation.final_tasks=300", *overrides]
    return main(["train", str(micro_toml(folder)), f"out={folder / 'run'}", *settings])


def test_a_first_evaluation_that_only_fails_stops_the_run(tmp_path, capsys):
    assert train_typo(tmp_path, "sft={}", "rollout.failures.retries=0", "env.0.concurrency.max_open=8") == 1
    printed = capsys.readouterr()
    [line] = [line for line in printed.out.splitlines() if "the run stopped" in line]
    place = f"test_shared_failure.py:{line_of('# a typo in step')}"
    assert "all of the first 16 attempts at held-out tasks of Typo failed, for one reason: TypeError at" in line
    assert place in line
    assert "finshed" in line
    assert Typo.opened < 256 + 64  # those of the tokenizer, and not the 300 of the evaluation
    written = (tmp_path / "run" / "events.log").read_text()
    for text in (printed.err, written):
        assert text.count("return Reply(finshed=True)") <= 2  # of the tokenizer, of the evaluation
        assert place in text
    assert "Traceback (most recent call last)" in written


def test_demonstrations_that_only_fail_stop_the_run(tmp_path, capsys):
    assert train_typo(tmp_path, "sft.updates=50", "sft.batch=8", "rollout.failures.retries=0") == 1
    printed = capsys.readouterr().out
    assert "attempts of 16 groups in a row failed, for one reason: TypeError at" in printed
    assert Typo.opened < 256 + 64


def test_an_environment_that_never_opens_stops_before_there_is_a_model(tmp_path, capsys):
    Typo.where = "open"
    assert train_typo(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "failed, for one reason: KeyError at" in printed
    assert f"test_shared_failure.py:{line_of('# a typo in open')}: 'm'" in printed


def test_eval_stops_too(tmp_path, capsys):
    settings = [f"env.0.name={__name__}:Typo", "env.0.tasks={}", "sft={}"]
    found = main(["eval", str(micro_toml(tmp_path)), "--tasks", "200", "--out", str(tmp_path / "e"), *settings])
    printed = capsys.readouterr().out
    assert found == 1, printed
    assert "the evaluation stopped: all of the first 16 attempts" in printed


# ---------------------------------------------------------------- the rule


def test_one_failure():
    one, other = failing(text="a"), failing(text="b")
    task = Task("t", "hops")
    assert shared_failure([Group(task, (), (one,)), Group(task, (), (other,))]) == "KeyError at maze.py:3: a"
    assert shared_failure([Group(task, (trajectory(),), (one,))]) == ""
    assert shared_failure([Group(task, (), (one, failing("KeyError at maze.py:4")))]) == ""
    assert shared_failure([Group(task, (), (trajectory(status=Status.failed),))]) == ""  # nobody knows why
    assert shared_failure([Group(task, (), (failing(status=Status.prompt_too_long),))]) == ""
    assert shared_failure([]) == ""


def examined(tasks, broken, attempts=1, slow=()):
    """How many were made before it stopped; `broken` says which tasks fail, and `slow` ones are done last."""
    made = []

    class Some(Puppet):
        async def open(self, task):
            self.task = task
            return Reply(user("go"))

        async def step(self, message):
            if self.task.id in slow:
                await asyncio.sleep(0.05)
            made.append(self.task.id)
            if broken(self.task):
                raise KeyError("x")
            return Reply(finished=True)

    places = {"a": Some, "b": Some}
    attempt_maker = AttemptMaker(places, says(), renderer(), Sampling(99), limits(), 0, "heldout", attempts)
    run(evaluate(attempt_maker, tasks, 1.0, SharedFailureCheck(tasks, attempts)))
    return len(made)


def tasks_of(count, dataset="a"):
    return [Task(f"{dataset}{number}", dataset) for number in range(count)]


@pytest.mark.parametrize(("count", "attempts"), [(1, 1), (15, 1), (100, 1), (100, 3), (2, 64)])
def test_an_evaluation_in_which_all_fail_alike_stops(count, attempts):
    with pytest.raises(
        RunStopped, match=r"^all of the first \d+ attempts at held-out tasks of a failed, for one reason"
    ):
        examined(tasks_of(count), lambda task: True, attempts)


def test_one_that_counts_among_the_first_is_enough_to_go_on():
    assert examined(tasks_of(100), lambda task: task.id != f"a{MIN_ATTEMPTS - 1}") == 100
    with pytest.raises(RunStopped):
        examined(tasks_of(100), lambda task: task.id != f"a{MIN_ATTEMPTS}")


def test_quick_failures_do_not_speak_for_those_that_take_longer():
    """Failed attempts are done first: it is the first that were begun that are looked at."""
    tasks = tasks_of(60)
    slow = {task.id for task in tasks[::2]}
    assert examined(tasks, lambda task: task.id not in slow, slow=slow) == 60


def test_a_dataset_of_which_nothing_works_stops_the_mixture():
    with pytest.raises(RunStopped, match="held-out tasks of b failed"):
        examined([*tasks_of(40), *tasks_of(40, "b")], lambda task: task.dataset == "b")


def taken(groups, count, limit=1000):
    async def scene():
        numbers = iter(range(10_000))

        async def make_group(draw):
            return groups(draw)

        draw = lambda: Draw(number := next(numbers), Task(f"t-{number}", "hops"), 0)
        async with GroupStream(draw, make_group, LagSlots(count), 1000) as stream:
            return await take(stream, count, lambda group: bool(group.trajectories), limit)

    return run(scene(), seconds=10)


def test_a_step_in_which_all_fail_alike_stops_the_run():
    everything = lambda draw: Group(draw.task, (), (failing(text=str(draw.number)),) * 4)
    with pytest.raises(RunStopped, match="of the first 16 attempts of 4 groups in a row failed.*KeyError at maze.py:3"):
        taken(everything, count=2)
    with pytest.raises(RunStopped, match="of the first 32 attempts of 8 groups in a row failed"):
        taken(everything, count=8)


def test_failures_that_differ_or_are_not_all_do_not():
    differing = lambda draw: Group(draw.task, (), (failing(f"KeyError at maze.py:{draw.number % 2}"),) * 4)
    with pytest.raises(RunStopped, match="100 groups in a row were dropped; last: .*KeyError at maze.py"):
        taken(differing, count=2, limit=100)
    some = lambda draw: Group(draw.task, (trajectory(),) if draw.number % 5 == 4 else (), (failing(),) * 4)
    assert len(taken(some, count=8).kept) == 8
    late = lambda draw: Group(draw.task, (), (failing("TimeoutError at maze.py:9", status=Status.timed_out),) * 4)
    with pytest.raises(RunStopped, match="100 groups in a row were dropped"):  # what hangs may be back soon
        taken(late, count=2, limit=100)

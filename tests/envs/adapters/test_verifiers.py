"""Environments of verifiers. What needs the library runs where it is installed: make test-verifiers."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serve.serving import driven, hermes
from support.acting import run, says, until
from support.paths import ROOT
from support.running import micro_recipe, train
from turnwise.assemble.checks import check
from turnwise.assemble.environments import environment_class, environment_makers, environments_of, tasks_of
from turnwise.cli.commands import main
from turnwise.envs.adapters import verifiers_process
from turnwise.recipe.parse import parse_recipe
from turnwise.rollout.scene import Attempt
from turnwise.runs import archive
from turnwise.runs.folder import RunFolder
from turnwise.runs.tracker import read_metrics
from turnwise.serve.agents.agent import calling
from turnwise.serve.endpoint import Endpoint
from turnwise.types import Break, Status, Task

WORLDS = Path(__file__).parent / "verifiers_worlds"
PYTHON = os.path.abspath(os.environ.get("VERIFIERS_PYTHON") or ROOT / ".venv-verifiers" / "bin" / "python")
LAB, TOOLED = "verifiers:lab", "verifiers:tooled"


def with_library(test):
    missing = pytest.mark.skipif(not Path(PYTHON).exists(), reason="verifiers is not installed: make test-verifiers")
    return missing(test)


@pytest.fixture(autouse=True)
def worlds(monkeypatch):
    """Where the library finds the tests' tasksets."""
    monkeypatch.setenv("PYTHONPATH", str(WORLDS))


def row(secret=7, kind="guess", prompt="Guess a number below 50."):
    data = {"prompt": prompt, "system_prompt": "You guess.", "secret": secret, "kind": kind}
    return Task(f"{kind}-{secret}", "lab", data)


def player(name=LAB, python=PYTHON):
    """What plays an environment, loaded by now, however long that takes."""
    kind = environment_class(name)
    kind.check_settings(python=python)
    return kind.player(python=python)


async def attempted(script, task=None, *, name=LAB, python=PYTHON, number=0, endpoint=None, **bounds):
    """One attempt by a model that says what a function of its prompt, as text, does."""
    kind = environment_class(name)
    engine = says(lambda prompt, session, seed: script(hermes().decode(prompt.tolist())), render=hermes())
    agent = calling(kind.agent_for(python=python), name)
    which = Attempt(0, "train", task or row(), number=number)
    patience = {"call_seconds": 60.0, "attempt_seconds": 100.0, **bounds}
    return await driven(agent, kind(python=python), engine, which=which, endpoint=endpoint, **patience)


def turns_in(prompt):
    return prompt.count("<|im_start|>assistant") - 1


def ladder(*numbers):
    """A model that says these, one a turn."""
    return lambda prompt: str(numbers[min(turns_in(prompt), len(numbers) - 1)])


# ---------------------------------------------------------------- episodes


@with_library
def test_an_episode_is_recorded_as_it_was_sampled_and_paid_as_the_library_says():
    player()
    made = run(attempted(ladder(3, 20, 7)), 110)
    assert made.status is Status.finished
    assert (made.outcome, [turn.reward for turn in made.turns]) == (2.0, [0.0, 0.0, 0.0])
    assert dict(made.marks) == {"found": 1.0, "silence": 0.0, "guesses": 3.0}
    assert [turn.said.content for turn in made.turns] == ["3", "20", "7"]
    assert [[message.content for message in turn.heard] for turn in made.turns] == [["higher"], ["lower"], []]
    render, end = hermes(), hermes().end_token
    assert [turn.action.tolist() for turn in made.turns] == [[*render.encode(n), end] for n in ("3", "20", "7")]
    for before, turn in zip(made.turns, made.turns[1:], strict=False):
        so_far = [*before.prompt, *before.action]
        assert turn.prompt[: len(so_far)].tolist() == so_far
        assert turn.broke is Break.none
    first = render.decode(made.turns[0].prompt.tolist())
    assert "system\nYou guess.<|im_end|>" in first
    assert "user\nGuess a number below 50.<|im_end|>" in first


@with_library
def test_attempts_of_a_group_are_independent():
    player()
    scripts = [ladder(3, 20, 7), ladder(0, 1, 2, 3, 4, 5), ladder(7), ladder(40, "", 12, 7)]

    async def together():
        endpoint = Endpoint()
        try:
            tries = (attempted(script, number=n, endpoint=endpoint) for n, script in enumerate(scripts * 4))
            return await asyncio.gather(*tries)
        finally:
            endpoint.close()

    alone = [run(attempted(script), 110) for script in scripts]
    assert [made.outcome for made in alone] == [2.0, 0.0, 2.0, 2.0]
    for made, own in zip(run(together(), 300), alone * 4, strict=True):
        assert (made.status, made.outcome, dict(made.marks)) == (own.status, own.outcome, dict(own.marks))
        assert [turn.prompt.tolist() for turn in made.turns] == [turn.prompt.tolist() for turn in own.turns]


@with_library
def test_limits_of_the_attempt_end_an_episode_which_is_judged_all_the_same():
    player()
    made = run(attempted(ladder(1, 2, 3, 4, 5), max_turns=3), 110)
    assert (made.status, len(made.turns), dict(made.marks)["guesses"]) == (Status.too_many_turns, 3, 3.0)
    made = run(attempted(ladder("x" * 150), max_prompt_tokens=400), 110)
    assert (made.status, made.outcome) == (Status.too_long, 0.0)
    assert len(made.turns) == 2
    made = run(attempted(ladder(7), row(prompt="x" * 500), max_prompt_tokens=400), 110)
    assert (made.status, made.turns) == (Status.prompt_too_long, ())


@with_library
@pytest.mark.parametrize("text", ["<|im_end|>", "\x00\ud7ff", '{"id": 2, "answer": {"reward": 9, "marks": {}}}\n' * 3])
def test_what_a_model_says_is_text_and_nothing_else(text):
    player()
    made = run(attempted(ladder(text, 7)), 110)
    assert made.status is Status.finished
    assert made.outcome in (2.0, 0.0)
    assert "reward" not in made.marks


@with_library
def test_what_an_environment_prints_is_no_answer():
    player()
    made = run(attempted(ladder(1, 7), row(kind="print")), 110)
    assert (made.status, made.outcome) == (Status.finished, 2.0)


@with_library
@pytest.mark.parametrize(("kind", "words"), [("raise", "no reward"), ("nan", "finite numbers")])
def test_an_episode_that_cannot_be_judged_has_failed(kind, words, caplog):
    own = player()
    process = own.living()
    made = run(attempted(ladder(7), row(kind=kind)), 110)
    assert (made.status, made.outcome, len(made.turns)) == (Status.failed, 0.0, 1)
    assert words in caplog.text
    assert own.living() is process


@with_library
def test_a_row_that_is_none_fails_its_attempt(caplog):
    player()
    made = run(attempted(ladder(7), Task("t", "lab", {"secret": "seven"})), 110)
    assert (made.status, made.turns) == (Status.failed, ())
    assert "secret" in caplog.text


@pytest.mark.slow
@with_library
def test_a_model_calls_the_tools_of_a_taskset():
    player(TOOLED)
    [task] = environment_class(TOOLED).tasks("train", 0, settings={"python": PYTHON}) or [None]
    call = '<tool_call>\n{"name": "sums_add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
    made = run(attempted(lambda prompt: "42" if "it is 42" in prompt else call, task, name=TOOLED), 110)
    assert (made.status, made.outcome, len(made.turns)) == (Status.finished, 1.0, 2)
    assert [call.name for call in made.turns[0].said.calls] == ["sums_add"]
    assert [(message.role, message.content) for message in made.turns[0].heard] == [("tool", "it is 42")]
    assert made.turns[1].broke is Break.none


# ---------------------------------------------------------------- tasks and recipes


@with_library
def test_splits_are_by_content_and_no_seed_leaks_one_into_the_other():
    player()
    recipe = {"name": LAB, "settings": {"python": PYTHON}}
    splits = [
        {
            task.id: dict(task.data)
            for task in tasks_of(parse_recipe({"seed": seed, "env": [recipe]}, "here"), split)["lab"]
        }
        for seed, split in ((0, "train"), (5, "train"), (0, "heldout"), (5, "heldout"))
    ]
    assert splits[0] == splits[1]
    assert splits[2] == splits[3]
    assert len(splits[0]) + len(splits[2]) == 50
    assert 0 < len(splits[2]) < len(splits[0])
    assert {r["secret"] for r in splits[0].values()} | {r["secret"] for r in splits[2].values()} == set(range(50))
    few = {**recipe, "tasks": {"count": 3}}
    assert len(tasks_of(parse_recipe({"env": [few]}, "here"), "train")["lab"]) == 3


@with_library
def test_a_recipe_names_it_and_it_trains(tmp_path):
    player()
    changes = [f"env.0.name={LAB}", f"env.0.settings.python={PYTHON}", "env.0.tasks={count = 12}", "sft.updates=0"]
    changes += ["rollout.max_prompt_tokens=400", "rollout.max_trajectory_tokens=420", "rollout.max_turns=3"]
    changes += ["steps=2", "groups_per_step=2", "evaluation.every=0", "evaluation.final_tasks=2"]
    summary = train(micro_recipe(tmp_path, *changes))
    assert summary is not None
    assert summary["updates"] == 2
    folder = RunFolder.open(tmp_path / "run")
    assert max(line["gap/mean"] for line in read_metrics(folder.metrics) if "gap/mean" in line) <= 1e-6
    steps = archive.archived_steps(folder.archive)
    groups = [r.group for s in steps for r in archive.read_step(folder.archive / f"step-{s:06d}.parquet")]
    assert sum(len(group.failed) for group in groups) == 0
    made = [trajectory for group in groups for trajectory in group.trajectories]
    assert len(made) == 16
    assert {"found", "silence", "guesses"} == {name for trajectory in made for name in trajectory.marks}


@pytest.mark.slow
@with_library
def test_the_attempt_of_the_docs_is_made_again(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "guides" / "envs" / "verifiers.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [recipe] = re.findall(r"```toml\n(steps.*?)```", page, re.DOTALL)
    [shown] = re.findall(r"```\n(<.*?)```", page, re.DOTALL)
    (tmp_path / "guessing.py").write_text(code)
    (tmp_path / "guessing.toml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = iter(re.findall(r"assistant\n(\d+)", shown))
    monkeypatch.setattr("builtins.input", lambda: next(said))
    assert main(["play", "guessing.toml", f"env.0.settings.python={PYTHON}"]) == 0
    last = "7\n"  # which a person has typed
    assert capsys.readouterr().out.strip() == shown.replace(f"assistant\n{last}", "assistant\n").strip()


REFUSALS = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("verifiers_player", sys.argv[1])
verifiers_player = importlib.util.module_from_spec(spec)
spec.loader.exec_module(verifiers_player)
sys.modules[verifiers_player.CHAT] = verifiers_player
for name, options in json.load(sys.stdin):
    try:
        verifiers_player.learner_of(verifiers_player.config_of(name, options))
        print("fine")
    except Exception as error:
        print(verifiers_player.described(error))
"""


@pytest.mark.slow
@with_library
def test_options_that_cannot_be_are_refused():
    elsewhere = {"client": {"type": "eval", "base_url": "http://127.0.0.1:1/v1"}, "model": "x"}
    cases = {
        "fine": ("lab", {}),
        "exactly one agent must learn, but 2 of assistant, user have no client": ("lab", {"id": "user-sim"}),
        "the harness bash runs code of the model on this machine": ("lab", {"player": {"harness": {"id": "bash"}}}),
        "options.player.retries puts two tries into one attempt": (
            "lab",
            {"player": {"retries": {"max_retries": 1}}},
        ),
        "options.retries would put": ("lab", {"retries": {"max_retries": 1}}),
        "taskset 'nowhere' not found": ("nowhere", {}),
        "Extra inputs are not permitted": ("lab", {"taskset": {"no_such_option": 1}}),
    }
    asked = [*cases.values(), ("lab", {"id": "user-sim", "user": elsewhere})]
    command = [PYTHON, "-c", REFUSALS, str(verifiers_process.PROGRAM)]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=300)
    said = done.stdout.splitlines()
    assert len(said) == len(asked), done.stderr
    for words, line in zip([*cases, "fine"], said, strict=True):
        assert words in line


@pytest.mark.slow
@with_library
def test_a_name_that_the_library_does_not_know_is_one_line():
    kind = environment_class("verifiers:nowhere")
    with pytest.raises(ValueError, match="verifiers:nowhere cannot be loaded by .*: .*'nowhere' not found") as error:
        kind.check_settings(python=PYTHON)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "needs a Python that has verifiers: python -m venv .venv-verifiers && "),
        ({"settings": {"python": "/no/such/python"}}, 'env.settings.python = "/no/such/python" is not a program'),
        ({"settings": {"pyton": "x"}}, "did you mean python?"),
        ({"concurrency": {"actors": 2}}, "remove concurrency.actors"),
    ],
)
def test_mistakes_in_a_recipe_are_one_line(changes, words):
    with pytest.raises(ValueError) as error:
        check(parse_recipe({"env": [{"name": LAB, **changes}]}, "here"))
    assert words in str(error.value)


# ---------------------------------------------------------------- the process


@pytest.mark.slow
@with_library
@pytest.mark.parametrize("how", ["killed", "exits", "blocks"])
def test_a_process_that_dies_fails_its_attempts_and_the_next_ones_work(how, monkeypatch):
    monkeypatch.setattr(verifiers_process, "GRACE", 1.0)
    own = player()
    process = own.living()

    async def doomed():
        if how == "exits":
            return await attempted(ladder(1, 7), row(kind="exit"))
        if how == "blocks":
            return await attempted(ladder(1, 7), row(kind="block"), attempt_seconds=3.0)
        return await attempted(lambda prompt: process.process.kill() or "1")

    async def play():
        made = await doomed()
        await until(lambda: process.process.poll() is not None, 60)
        return made

    made = run(play(), 200)
    assert made.status is (Status.timed_out if how == "blocks" else Status.failed)
    assert own.living() is not process
    made = run(attempted(ladder(1, 7)), 110)
    assert (made.status, made.outcome) == (Status.finished, 2.0)


@with_library
def test_an_order_that_is_given_up_at_once_is_answered_all_the_same():
    own = player()
    process = own.living()
    where = {"base_url": "http://127.0.0.1:1/v1", "api_key": "x", "model": "policy"}
    for _ in range(20):
        _, number = process.ask("play", row=dict(row().data), **where)
        process.cancel(number)
    run(until(lambda: not process.waiting, 60), 70)
    assert own.living() is process


HOLDER = """
import signal, sys
from turnwise.assemble.environments import environment_class
kind = environment_class(sys.argv[1])
kind.check_settings(python=sys.argv[2])
print(kind.player(python=sys.argv[2]).living().process.pid, flush=True)
signal.pause()
"""


@pytest.mark.slow
@with_library
def test_the_process_ends_with_the_run_however_that_ends():
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, TOOLED, PYTHON], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder.stdout as said:
        pid = int(said.readline())
    children = children_of(pid)
    assert children, "the library has a tool server"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    run(until(lambda: not any(map(alive, [pid, *children])), 30), 40)


def children_of(pid):
    return [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---------------------------------------------------------------- hostile answers, by a process that is made up

FAKE = """#!{python}
import json, os, socket, sys, time, urllib.request
line = socket.socket(fileno=int(sys.argv[2]))
life = len(os.listdir({folder!r}))
open({folder!r} + "/" + str(life), "w").close()

def say(number, **said):
    line.sendall(json.dumps(dict(id=number, **said)).encode() + b"\\n")

def ask(order):
    body = dict(model=order["model"], messages=[dict(role="user", content="go")])
    headers = dict(authorization="Bearer " + order["api_key"])
    urllib.request.urlopen(urllib.request.Request(
        order["base_url"] + "/chat/completions", json.dumps(body).encode(), headers)).read()

for raw in line.makefile("rb"):
    order = json.loads(raw)
    if order["do"] == "load":
        say(order["id"], answer=dict(version="fake"))
    elif order["do"] == "rows":
        say(order["id"], answer=["no row"])
    elif order["do"] == "cancel":
        {cancel}
    else:
        ask(order)
        {play}
"""
GOOD = 'say(order["id"], answer=dict(reward=0.5, marks=dict(fine=1)))'


@pytest.fixture
def faked(tmp_path):
    """Makes a program that stands in for a Python with the library."""

    def make(play=GOOD, cancel="pass"):
        lives = tmp_path / "lives"
        lives.mkdir()
        program = tmp_path / "python"
        program.write_text(FAKE.format(python=sys.executable, folder=str(lives), play=play, cancel=cancel))
        program.chmod(0o755)
        return str(program)

    return make


def attempt_by(program, **bounds):
    return attempted(lambda prompt: "hello", python=program, **bounds)


def test_an_answer_is_paid(faked):
    made = run(attempt_by(faked()))
    assert (made.status, made.outcome, dict(made.marks)) == (Status.finished, 0.5, {"fine": 1.0})


@pytest.mark.parametrize(
    "answer",
    [
        "dict(reward='1.0', marks={})",
        "dict(reward=True, marks={})",
        "dict(reward=float('nan'), marks={})",
        "dict(reward=10**400, marks={})",
        "dict(reward=None, marks={})",
        "dict(marks={})",
        "dict(reward=1.0)",
        "dict(reward=1.0, marks=[1.0])",
        "dict(reward=1.0, marks=dict(a=dict(b=1)))",
        "dict(reward=1.0, marks=dict(a=float('inf')))",
        "[1.0]",
        "'1.0'",
        "None",
    ],
)
def test_an_answer_that_is_no_pay_fails_its_attempt_and_no_other(faked, answer):
    program = faked(f'say(order["id"], answer={answer}) if order["row"]["secret"] == 7 else {GOOD}')
    own = player(python=program)
    process = own.living()
    assert run(attempt_by(program)).status is Status.failed
    assert run(attempt_by(program, task=row(secret=8))).outcome == 0.5
    assert own.living() is process


@pytest.mark.parametrize(
    "nonsense",
    [
        'line.sendall(b"\\xff\\xfe\\n")',
        'line.sendall(b"[]\\n")',
        'line.sendall(b"{\\"id\\": true}\\n")',
        'line.sendall(b"{\\"id\\": " + b"[" * 200000 + b"\\n")',
        'line.sendall(b"{\\"id\\": 1")',
        "sys.exit(3)",
        "line.close()",
    ],
)
def test_a_process_that_says_nonsense_is_another_one_for_the_next_attempt(faked, nonsense, monkeypatch):
    monkeypatch.setattr(verifiers_process, "GRACE", 1.0)
    program = faked(f"if life: {GOOD}\n        else: {nonsense}; time.sleep(0.2); sys.exit(3)")
    own = player(python=program)
    process = own.living()
    assert run(attempt_by(program)).status is Status.failed
    assert process.process.wait(10) is not None
    assert run(attempt_by(program)).outcome == 0.5


def test_an_answer_without_an_order_is_ignored(faked):
    program = faked(f"say(10**9, answer=1); say(-1, failure='x'); {GOOD}; {GOOD}")
    assert run(attempt_by(program)).outcome == 0.5
    assert run(attempt_by(program)).outcome == 0.5


def test_rows_that_are_none_are_refused(faked):
    recipe = parse_recipe({"env": [{"name": LAB, "settings": {"python": faked()}}]}, "here")
    with pytest.raises(ValueError, match="gives tasks that are not JSON objects"):
        tasks_of(recipe, "train")


def test_an_attempt_that_is_given_up_is_given_up_there_too(faked):
    program = faked("pass", cancel='say(order["id"], failure="it was cancelled")')
    own = player(python=program)
    process = own.living()
    assert run(attempt_by(program, attempt_seconds=1.0)).status is Status.timed_out
    run(until(lambda: not process.waiting))
    assert own.living() is process


def test_a_process_that_does_not_let_go_is_ended(faked, monkeypatch):
    monkeypatch.setattr(verifiers_process, "GRACE", 0.3)
    program = faked("pass", cancel="time.sleep(600)")
    own = player(python=program)
    process = own.living()
    assert run(attempt_by(program, attempt_seconds=1.0)).status is Status.timed_out
    run(until(lambda: process.process.poll() is not None))
    assert own.living() is not process


def test_it_plays_itself_and_takes_no_other_agent(faked):
    entry = {"name": LAB, "settings": {"python": faked()}}
    recipe = parse_recipe(
        {"env": [{**entry, "concurrency": {"max_concurrent_agents": 3}}], "endpoint": {"port": 0}}, "here"
    )
    plays: Mapping[str, Any] = environments_of(recipe, Endpoint()).plays
    assert list(plays) == ["lab"]
    assert isinstance(plays["lab"].agent, partial)
    with pytest.raises(ValueError, match="would be ignored: verifiers:lab plays itself"):
        environments_of(parse_recipe({"env": [{**entry, "agent": "python x.py"}]}, "here"), Endpoint())
    assert list(environment_makers(parse_recipe({"env": [entry]}, "here"))) == ["lab"]

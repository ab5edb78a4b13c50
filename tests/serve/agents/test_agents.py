"""Agents as a recipe names them: functions and commands, how their attempts end, and that none is left behind."""

import asyncio
import shlex
import sys
import threading
import time
from typing import Any

import pytest

from serve.serving import agent_of, chat_body, driven, hermes, judged, post
from support.acting import TASK, Puppet, hang, limits, run, says, until, user
from turnwise.engines.base import Sampling
from turnwise.envs.base import Reply
from turnwise.rollout.attempt import run_attempt
from turnwise.rollout.scene import Attempt, Scene
from turnwise.serve.agents.agent import command_agent, find_agent, function_agent
from turnwise.serve.agents.drive import Driver
from turnwise.serve.endpoint import Endpoint
from turnwise.serve.registry import Address
from turnwise.types import Break, Status, Task


def ask_once(base_url, api_key, text="go", path="/v1/chat/completions"):
    """What the model says; a refusal raises, as in any client."""
    status, said, _ = post(Address(base_url, api_key, "policy"), path, chat_body(text))
    if status != 200:
        raise RuntimeError(f"{status} {said['error']['code']}")
    return said["choices"][0]["message"]["content"]


# ---------------------------------------------------------------- functions


def test_a_plain_function_gets_its_task_and_its_return_value_is_judged():
    seen = {}

    def agent(task, messages, base_url, api_key, model):
        seen.update(task=task.data, messages=messages, model=model)
        return ask_once(base_url, api_key).upper()

    environment = judged(outcome=0.5, marks={"words": 1.0})
    made = run(driven(agent, environment))
    assert seen == {"task": {"start": "amber"}, "messages": [{"role": "user", "content": "go"}], "model": "policy"}
    assert environment.heard == ["HELLO"]
    assert (made.status, made.outcome, dict(made.marks)) == (Status.finished, 0.5, {"words": 1.0})
    assert [turn.said.content for turn in made.turns] == ["hello"]
    assert made.opening[0].role == "user"
    assert environment.closed == 1


@pytest.mark.parametrize(
    ("value", "told"), [(None, ""), ({"answer": [1, "é"]}, '{"answer": [1, "é"]}'), (True, "true"), ("x", "x")]
)
def test_answers_that_are_not_text_become_json(value, told):
    def agent(base_url, api_key):
        ask_once(base_url, api_key)
        return value

    environment = judged()
    assert run(driven(agent, environment)).status is Status.finished
    assert environment.heard == [told]


def test_a_coroutine_function_may_block_without_holding_up_what_it_waits_for():
    async def agent(base_url, api_key):
        return ask_once(base_url, api_key)  # blocks the loop that it runs in

    made = run(driven(agent))
    assert made.status is Status.finished


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_acting_in_the_environment(kind):
    replies = [Reply(user("amber: cedar"), reward=0.25), Reply(finished=True, reward=0.5, outcome=1.0)]

    def plain(base_url, api_key, act):
        ask_once(base_url, api_key, "one")
        heard = act("get amber")
        ask_once(base_url, api_key, heard)
        act("answer cedar")
        return "not judged any more"

    async def of_loop(base_url, api_key, act):
        await asyncio.to_thread(ask_once, base_url, api_key, "one")
        heard = await act("get amber")
        await asyncio.to_thread(ask_once, base_url, api_key, heard)
        await act("answer cedar")

    environment = Puppet(*replies)
    made = run(driven(plain if kind == "plain" else of_loop, environment))
    assert environment.heard == ["get amber", "answer cedar"]
    assert (made.status, made.outcome) == (Status.finished, 1.0)
    assert [turn.reward for turn in made.turns] == [0.25, 0.5]
    assert "amber: cedar" in hermes().decode(made.turns[1].prompt.tolist())


def test_an_environment_that_has_finished_ends_the_session():
    said = []

    def agent(base_url, api_key, act):
        ask_once(base_url, api_key)
        act("answer")
        try:
            ask_once(base_url, api_key)
        except RuntimeError as error:
            said.append(str(error))
            raise

    made = run(driven(agent, judged()))
    assert said == ["410 session_over"]
    assert (made.status, made.outcome, len(made.turns)) == (Status.finished, 1.0, 1)


def test_an_agent_that_raises_has_failed_and_its_turns_are_kept():
    def agent(base_url, api_key):
        ask_once(base_url, api_key)
        raise KeyError("answer")

    environment = judged()
    made = run(driven(agent, environment))
    assert (made.status, len(made.turns)) == (Status.failed, 1)
    assert environment.heard == []
    assert environment.closed == 1


def test_an_agent_that_runs_out_of_turns_ended_so():
    def raises(base_url, api_key):
        while True:
            ask_once(base_url, api_key)

    def gives_up(base_url, api_key):
        try:
            raises(base_url, api_key)
        except RuntimeError:
            return "half an answer"

    cut, answered = judged(), judged()
    made = run(driven(raises, cut, max_turns=2))
    assert (made.status, len(made.turns), cut.heard) == (Status.too_many_turns, 2, [])
    made = run(driven(gives_up, answered, max_turns=2))
    assert (made.status, made.outcome, answered.heard) == (Status.too_many_turns, 1.0, ["half an answer"])


def test_prompts_that_do_not_fit():
    def agent(base_url, api_key):
        return ask_once(base_url, api_key, "x" * 500)

    def later(base_url, api_key):
        ask_once(base_url, api_key)
        return ask_once(base_url, api_key, "x" * 500)

    assert run(driven(agent, max_prompt_tokens=100)).status is Status.prompt_too_long
    assert run(driven(later, max_prompt_tokens=100)).status is Status.too_long


def test_an_agent_that_never_asks_has_failed(caplog):
    made = run(driven(lambda base_url: "42"))
    assert made.status is Status.failed
    assert "made no model call" in caplog.text


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_an_agent_that_hangs_is_timed_out(kind):
    released = threading.Event()

    def plain(base_url, api_key):
        ask_once(base_url, api_key)
        released.wait()

    async def of_loop(base_url, api_key):
        ask_once(base_url, api_key)
        await asyncio.Event().wait()

    try:
        made = run(driven(plain if kind == "plain" else of_loop, attempt_seconds=3.0))
    finally:
        released.set()
    assert (made.status, len(made.turns)) == (Status.timed_out, 1)


def test_an_engine_that_takes_too_long_times_the_attempt_out():
    def agent(base_url, api_key):
        ask_once(base_url, api_key)

    engine = says(lambda *call: hang(), render=hermes())
    made = run(driven(agent, judged(), engine, call_seconds=0.2))
    assert made.status is Status.timed_out


def test_an_engine_that_fails_fails_the_attempt_whatever_the_agent_makes_of_it():
    def agent(base_url, api_key):
        try:
            return ask_once(base_url, api_key)
        except RuntimeError:
            return "I made this up"

    environment = judged()
    made = run(driven(agent, environment, says(lambda *call: 1 / 0, render=hermes())))
    assert (made.status, environment.heard) == (Status.failed, [])


def test_an_environment_that_fails_fails_the_attempt():
    def agent(base_url, api_key, act):
        ask_once(base_url, api_key)
        try:
            act("get amber")
        except Exception:
            return "never mind"

    made = run(driven(agent, Puppet(ValueError("gone"))))
    assert (made.status, len(made.turns)) == (Status.failed, 1)


def test_an_agent_that_outlives_its_attempt_cannot_act():
    said = []

    def agent(base_url, api_key, act):
        ask_once(base_url, api_key)
        time.sleep(0.6)
        try:
            act("late")
        except RuntimeError as error:
            said.append(str(error))

    async def work():
        environment = judged()
        made = await driven(agent, environment, attempt_seconds=0.3)
        await until(lambda: said)
        return made.status, environment.heard

    assert run(work()) == (Status.timed_out, [])
    assert said == ["the attempt is over"]


def test_agents_wait_for_their_place_without_their_clock_running():
    running = []

    def agent(base_url, api_key):
        running.append(+1)
        most.append(sum(running))
        time.sleep(0.15)
        ask_once(base_url, api_key)
        running.append(-1)

    most: list[int] = []

    async def work():
        endpoint = Endpoint()
        driver = Driver(agent_of(agent), endpoint, asyncio.Semaphore(2))
        scene = Scene(says(), hermes(), Sampling(99), limits(attempt_seconds=3.0))
        tries = (run_attempt(Attempt(0, "train", TASK, number=n), judged, scene, driver) for n in range(6))
        try:
            return await asyncio.gather(*tries)
        finally:
            endpoint.close()

    assert {made.status for made in run(work())} == {Status.finished}
    assert max(most) == 2


# ---------------------------------------------------------------- commands

CLIENT = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
def ask(content):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": content}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def command(code):
    return command_agent(shlex.join([sys.executable, "-c", CLIENT + code]))


def test_a_command_answers_with_its_last_line():
    code = "print('thinking...'); print(task['data']['start'], ask(task['messages'][0]['content'])); print()"
    environment = judged()
    made = run(driven(command(code), environment))
    assert (made.status, environment.heard) == (Status.finished, ["amber hello"])
    assert len(made.turns) == 1


def test_a_command_that_fails_says_why(caplog):
    made = run(driven(command("ask('go'); sys.exit('no idea')")))
    assert (made.status, len(made.turns)) == (Status.failed, 1)
    assert "exited with 1: no idea" in caplog.text


def test_a_command_ends_with_its_attempt_and_so_does_what_it_started(tmp_path):
    code = (
        "import subprocess, time; ask('go')\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); time.sleep(60)"
    )
    made = run(driven(command(code), attempt_seconds=4.0))
    assert made.status is Status.timed_out
    pid = int((tmp_path / "pid").read_text())
    run(until(lambda: not alive(pid)))


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_command_that_floods_its_output_is_read_to_the_end():
    code = "ask('go'); print('x' * 3_000_000); sys.stderr.write('y' * 3_000_000); print('short')"
    environment = judged()
    assert run(driven(command(code), environment)).status is Status.finished
    assert environment.heard == ["short"]


def test_a_command_need_not_read_its_task():
    code = CLIENT.replace("task = json.loads(sys.stdin.readline())", "") + "print(ask('go'))"
    large = Attempt(0, "train", Task("t-1", "hops", {"text": "x" * 1_000_000}))
    environment = judged()
    agent = command_agent(shlex.join([sys.executable, "-c", code]))
    made = run(driven(agent, environment, which=large))
    assert (made.status, environment.heard) == (Status.finished, ["hello"])


# ---------------------------------------------------------------- names


async def takes_everything(**given):
    return None


def wants_more(task, budget):
    return None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module_at_all:agent", "PYTHONPATH"),
        ("turnwise.types:nobody", "has no nobody"),
        ("turnwise.types:np", "is not a function"),
        ("serve.agents.test_agents:wants_more", "has a parameter budget"),
        ("no-such-command --please", "no such command"),
        ("python 'unclosed", "No closing quotation"),
        ("", "no such command"),
    ],
)
def test_mistakes_in_a_name_are_one_line(name, words):
    with pytest.raises(ValueError, match=words) as error:
        find_agent(name)
    assert "\n" not in str(error.value)


def test_a_function_may_take_all_there_is():
    agent: Any = function_agent("serve.agents.test_agents:takes_everything")
    assert agent.args[1] == (
        "task",
        "messages",
        "base_url",
        "api_key",
        "model",
        "act",
    )


def test_turns_of_an_agent_are_turns_like_any_other():
    def agent(messages, base_url, api_key, model):
        ask_once(base_url, api_key, "one")
        return ask_once(base_url, api_key, "two")

    made = run(driven(agent))
    assert [turn.broke for turn in made.turns] == [Break.none, Break.history]

import asyncio
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.acting import run
from support.adapting import begun, check_independence, played, tasks_for, texts, total
from turnwise.assemble.environments import environment_class
from turnwise.messages import Message, ToolCall

SERVER = Path(__file__).parent / "openenv_server.py"


@contextmanager
def serving(*kinds):
    """Names of environments on servers of the library, one for each (sessions, kind)."""
    servers = [
        subprocess.Popen([sys.executable, str(SERVER), str(sessions), kind], stdout=subprocess.PIPE, text=True)
        for sessions, kind in kinds
    ]
    try:
        ports = [server.stdout.readline().strip() for server in servers]
        assert all(ports), "a server did not start"
        yield [f"openenv:http://127.0.0.1:{port}" for port in ports]
    finally:
        for server in servers:
            server.kill()
            server.communicate()


@pytest.fixture(scope="module")
def servers():
    with serving((64, "secret"), (1, "secret"), (4, "board"), (4, "echo")) as names:
        yield names


def letters(after, before="{"):
    return [letter for letter in "abcdefghijklmnopqrstuvwxyz" if after < letter < before]


def test_a_whole_attempt_is_paid_inside_observations(servers):
    name = servers[0]
    for split in ("train", "heldout"):
        for task in tasks_for(name, split, 2):
            replies = run(played(name, task, letters("`")))
            assert texts(replies)[0] == "Which letter?"
            assert replies[-1].finished
            wrong = len(replies) - 2
            assert total(replies) == pytest.approx(1.0 - 0.1 * wrong)
            assert [reply.reward for reply in replies[1:-1]] == pytest.approx([-0.1] * wrong)


def test_the_seed_of_the_task_is_the_servers(servers):
    ends = {len(run(played(servers[0], task, letters("`")))) for task in tasks_for(servers[0], count=6)}
    assert len(ends) > 1


def test_attempts_of_a_group_are_independent(servers):
    (task,) = tasks_for(servers[0])
    run(check_independence(servers[0], task, (["a", "b", "c"], ["z", "a", "z", "z"])))


def test_a_server_that_is_full_is_asked_again(servers):
    async def play():
        (task,) = tasks_for(servers[1])
        first, _ = await begun(servers[1], task)
        second = asyncio.create_task(begun(servers[1], task))
        await asyncio.sleep(0.5)
        assert not second.done()
        await first.close()
        environment, reply = await second
        await environment.close()
        return reply

    assert texts([run(play())]) == ["Which letter?"]


def test_an_action_with_several_fields_is_written_as_json(servers):
    name = servers[2]
    (task,) = tasks_for(name)
    script = ["hello", "[1]", '{"row": 1}', '{"row": "x", "column": 2}', '{"row": 1, "column": 2}']
    replies = run(played(name, task, script))
    heard = texts(replies)
    hint = (
        "Write your action as a JSON object with these fields:\n- row: integer, required\n- column: integer, required"
    )
    assert heard[0] == f"Which letter?\n\n{hint}"
    assert heard[1] == heard[2] == hint
    assert heard[3] == "That is no action: the field column is missing."
    assert heard[4] == 'That is no action: row needs to be integer, got "x".'
    assert heard[5] == "1 2"
    assert (replies[-1].reward, replies[-1].finished) == (0.5, True)


def test_the_field_may_be_named(servers):
    (task,) = tasks_for(servers[0])
    assert len(run(played(servers[0], task, letters("`"), field="text"))) > 1


def test_an_environment_that_fails_fails_the_attempt(servers):
    async def play():
        (task,) = tasks_for(servers[0])
        environment, _ = await begun(servers[0], task)
        try:
            await environment.step(Message("assistant", "crash"))
        finally:
            await environment.close()

    with pytest.raises(RuntimeError, match="it crashed"):
        run(play())


def test_an_address_without_a_server_fails_the_attempt():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and nobody listens
        name = f"openenv:http://127.0.0.1:{closed.getsockname()[1]}"
        (task,) = tasks_for(name)
        with pytest.raises(OSError):
            run(played(name, task, ["a"]))


def test_an_address_that_is_none():
    with pytest.raises(ValueError, match='write for instance "openenv:http://127.0.0.1:8000"'):
        environment_class("openenv:nowhere").check_settings()


def test_optional_fields_are_shown_and_can_be_reached(servers):
    name = servers[3]
    (task,) = tasks_for(name)
    script = ["hello", '{"text": "hi", "times": 2}', '{"text": "hi", "tone": "loud"}', '{"other": 1}']
    heard = texts(run(played(name, task, script)))
    assert "Your message is the field text. Or write a JSON object with these fields:" in heard[0]
    assert "- text: string, required" in heard[0]
    assert "- times: integer, optional, default 1" in heard[0]
    assert '- tone: one of "soft", "loud", optional, default "soft"' in heard[0]
    assert heard[1:] == ["soft hello", "soft hisoft hi", "loud hi", 'soft {"other": 1}']


def test_types_of_optional_fields_are_checked(servers):
    name = servers[3]
    (task,) = tasks_for(name)
    script = ['{"text": "hi", "times": "two"}', '{"text": "hi", "times": true}', '{"text": "hi", "tone": "shrill"}']
    assert texts(run(played(name, task, script)))[1:] == [
        'That is no action: times needs to be integer, got "two".',
        "That is no action: times needs to be integer, got true.",
        'That is no action: tone needs to be one of "soft", "loud", got "shrill".',
    ]


def test_the_action_may_be_a_tool(servers):
    async def play():
        (task,) = tasks_for(servers[3])
        environment, opening = await begun(servers[3], task, calls="tools")
        said = [
            Message("assistant", "no call"),
            Message("assistant", "", calls=(ToolCall("act", {"times": 2}),)),
            Message("assistant", "", calls=(ToolCall("act", {"text": "hi", "times": 2}),)),
        ]
        heard = [await environment.step(message) for message in said]
        await environment.close()
        return opening, heard

    opening, heard = run(play())
    (tool,) = opening.tools
    assert (tool.name, list(tool.parameters["properties"])) == ("act", ["text", "times", "tone"])
    assert tool.parameters["required"] == ["text"]
    assert texts(heard) == [
        "Call the tool act once.",
        "That is no action: the field text is missing.",
        "soft hisoft hi",
    ]


def test_a_field_that_is_not_there_is_named(servers):
    (task,) = tasks_for(servers[0])
    with pytest.raises(ValueError, match="actions have no field txt; did you mean text?"):
        run(played(servers[0], task, ["a"], field="txt"))

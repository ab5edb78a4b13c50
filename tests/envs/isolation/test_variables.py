"""What processes with other people's code see of the variables of whoever started the run."""

import os
import shlex
import sys

import pytest

from serve.serving import driven, judged
from support.acting import run
from support.odd import TASK, Odd
from turnwise.assemble.environments import environment_makers
from turnwise.envs.adapters.verifiers_process import PlayerProcess
from turnwise.envs.isolation.isolated import fork_server_of, isolate
from turnwise.envs.isolation.variables import check_variables, passed_on
from turnwise.messages import Message
from turnwise.recipe.parse import parse_recipe
from turnwise.serve.agents.agent import command_agent

SECRETS = (
    "AWS_SECRET_ACCESS_KEY",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "GITHUB_TOKEN",
    "MY_API_KEY",
    "DATABASE_URL",
    "SSH_AUTH_SOCK",
    "KUBECONFIG",
)


@pytest.fixture(autouse=True)
def secrets(monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "canary-1")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:canary-2@proxy:3128")
    monkeypatch.setenv("NAMED", "named-3")


def of_command(variables):
    """What an agent's command sees."""
    told = f"{CLIENT}print('|'.join(f'{{n}}={{v}}' for n, v in os.environ.items() if chr(10) not in v))"
    environment = judged()
    run(driven(command_agent(shlex.join([sys.executable, "-c", told]), variables), environment))
    [heard] = environment.heard
    return heard


CLIENT = """
import json, os, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "go"}]}
head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
opener.open(urllib.request.Request(address, json.dumps(body).encode(), head)).read()
"""


def of_library(variables):
    """What an environment of a library sees."""
    kind = isolate(type("Odd", (Odd,), {"variables": variables}), "support.odd:Odd")

    async def play():
        environment = kind()
        await environment.open(TASK)
        reply = await environment.step(Message("assistant", "variables"))
        await environment.close()
        return reply.messages[0].content

    try:
        return run(play(), 60)
    finally:
        fork_server_of("support.odd:Odd", variables).end()


def of_player(variables, tmp_path):
    """What the process of verifiers sees."""
    python, told = tmp_path / "python", tmp_path / "told"
    python.write_text(f"#!/bin/sh\nenv > {shlex.quote(str(told))}\n")
    python.chmod(0o755)
    PlayerProcess(str(python), "lab", {}, variables).process.wait(60)
    return told.read_text()


@pytest.mark.parametrize("who", ["command", "library", "player"])
def test_secrets_stay_here_unless_they_are_named(who, tmp_path):
    ask = {"command": of_command, "library": of_library, "player": lambda names: of_player(names, tmp_path)}[who]
    seen = ask(())
    assert "PATH=" in seen
    assert "HOME=" in seen or "HOME" not in os.environ
    assert "canary" not in seen
    assert "named-3" not in seen
    seen = ask(("NAMED",))
    assert "NAMED=named-3" in seen
    assert "canary" not in seen


def test_a_command_still_finds_the_endpoint_and_not_a_key_of_ours(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "canary-4")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "canary-5")
    seen = of_command(("OPENAI_API_KEY",))
    assert "OPENAI_BASE_URL=http://127.0.0.1:" in seen
    assert "canary" not in seen


def test_what_a_program_needs_to_run_is_passed_on(monkeypatch):
    wanted = {"LC_ALL": "C", "PYTHONPATH": "/x", "SSL_CERT_FILE": "/y", "TZ": "UTC", "HTTP_PROXY": "http://proxy:1"}
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    assert wanted.items() <= passed_on().items()
    assert passed_on().keys() <= os.environ.keys()


def recipe(**entry):
    return parse_recipe({"env": [{"name": "hops", "isolation": {"variables": ["NAMED"]}, **entry}]}, "test")


def test_names_that_would_be_ignored_are_refused(monkeypatch):
    with pytest.raises(
        ValueError, match="env.isolation.variables would be ignored: hops runs in the run's own process"
    ):
        environment_makers(recipe())
    with pytest.raises(ValueError, match="env.isolation.variables would be ignored"):
        environment_makers(recipe(agent="json:dumps"))
    environment_makers(recipe(agent="python3 agent.py"))
    monkeypatch.delenv("NAMED")
    with pytest.raises(ValueError, match="env.isolation.variables names NAMED, which is not set") as refused:
        environment_makers(recipe(agent="python3 agent.py"))
    assert "\n" not in str(refused.value)
    check_variables(())

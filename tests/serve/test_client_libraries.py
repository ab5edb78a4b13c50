"""Client libraries, unmodified, each in a multi-turn tool episode through the endpoint: make test-clients.

Each runs as a script of tests/serve/clients/ in an environment that has the library, against a scripted engine in this
process. The table of docs/reference/clients.md is what this test found.
"""

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from serve.serving import hermes, served
from support.acting import says
from support.paths import ROOT
from turnwise.types import Break, StopReason

HERE = Path(__file__).parent / "clients"
PYTHONS = {
    name: os.path.abspath(os.environ.get(variable) or ROOT / folder / "bin" / "python")
    for name, variable, folder in (
        ("clients", "CLIENTS_PYTHON", ".venv-clients"),
        ("clients-more", "CLIENTS_MORE_PYTHON", ".venv-clients-more"),
    )
}
TABLE = ROOT / "docs" / "reference" / "clients.md"


def call(tool="follow", /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def react(tool, /, **arguments):
    """What dspy.ReAct reads: its calls are fields of a text."""
    fields = {"next_thought": "On.", "next_tool_name": tool, "next_tool_args": json.dumps(arguments)}
    return "\n\n".join([*(f"[[ ## {name} ## ]]\n{text}" for name, text in fields.items()), "[[ ## completed ## ]]"])


FOLLOWED = [f"Let me see.\n{call(name='amber')}", call(name="cedar")]
EPISODE = [*FOLLOWED, "It leads to jade."]
SMOL = [*FOLLOWED, call("final_answer", answer="It leads to jade.")]
INSTRUCTED = [*FOLLOWED, call("answer", text="It leads to jade.")]
DSPY_END = "[[ ## reasoning ## ]]\nTwo links.\n\n[[ ## answer ## ]]\nIt leads to jade.\n\n[[ ## completed ## ]]"
REACT = [react("follow", name="amber"), react("follow", name="cedar"), react("finish"), DSPY_END]


@dataclass(frozen=True)
class Case:
    script: str
    mode: str
    environment: str = "clients"
    says: tuple = tuple(EPISODE)
    extends: bool = True
    """Whether every prompt begins with the turn before."""


OPENAI = ["chat", "chat streamed", "chat parsed", "responses with ids", "responses with ids streamed"]
OPENAI += ["responses without ids", "responses without ids streamed"]
LANGCHAIN = ["langchain", "langchain streamed", "langchain, responses", "langchain, responses with ids"]
LANGCHAIN += ["langchain, anthropic", "langgraph"]
MORE = "clients-more"
CASES = [
    *(Case("use_openai", mode) for mode in OPENAI),
    *(Case("use_anthropic", mode) for mode in ("messages", "messages streamed", "tool runner")),
    *(Case("use_langchain", mode) for mode in LANGCHAIN),
    *(Case("use_pydantic_ai", mode) for mode in ("chat", "responses", "anthropic")),
    *(Case("use_openai_agents", mode) for mode in ("chat", "responses", "responses streamed", "responses with ids")),
    Case("use_smolagents", "tool calls", says=tuple(SMOL), extends=False),
    Case("use_autogen", "chat"),
    *(Case("use_litellm", mode, MORE) for mode in ("chat", "streamed")),
    Case("use_llama_index", "function agent", MORE),
    Case("use_instructor", "tools", MORE, tuple(INSTRUCTED), extends=False),
    Case("use_dspy", "ReAct", MORE, tuple(REACT), extends=False),
    Case("use_strands", "chat", MORE),
    Case("use_google_adk", "litellm", MORE),
]


@pytest.fixture(scope="module")
def rows():
    """What the cases find, which becomes the table if all of them ran."""
    found = {}
    yield found
    if len(found) == len(CASES):
        TABLE.write_text(page([found[case.script, case.mode] for case in CASES]))


def page(found):
    lines = [
        "# Clients that were run",
        "",
        "`make test-clients` runs each of these libraries, unmodified, in an episode of several turns with tool calls",
        "through the endpoint, checks the recorded tokens and calls, and writes this table. A prompt that extends",
        "begins with the exact tokens of the turn before. Ignored: fields that the endpoint does not know",
        "(`x-turnwise-ignored`). Overridden: settings that the recipe decides (`x-turnwise-overridden`).",
        "",
        "| client | version | mode | turns | prompts that extend | ignored | overridden |",
        "|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(map(str, row))} |" for row in found),
        "",
    ]
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.script}-{case.mode}".replace(" ", "_"))
def test_a_client_plays_an_episode(case, rows, tmp_path):
    python = PYTHONS[case.environment]
    if not Path(python).exists():
        pytest.skip("the clients are not installed: make test-clients")
    left = list(case.says)
    engine = says(lambda prompt, session, seed: left.pop(0), render=hermes())

    async def client(address, session, endpoint):
        given = {"CLIENT_BASE_URL": address.base_url, "CLIENT_KEY": address.key, "CLIENT_MODEL": address.model}
        env = {"PATH": os.environ.get("PATH", ""), "HOME": str(tmp_path), "PYTHONPATH": str(HERE), **OFFLINE, **given}
        child = await asyncio.create_subprocess_exec(
            python, str(HERE / f"{case.script}.py"), case.mode, env=env, cwd=tmp_path, stdout=-1, stderr=-1
        )
        out, err = await child.communicate()
        assert child.returncode == 0, err.decode()[-3000:]
        return json.loads(out.decode().splitlines()[-1])

    bounds = {"max_prompt_tokens": 40_000, "max_action_tokens": 2000, "max_trajectory_tokens": 42_000}
    said, session = served(client, engine, seconds=500, **bounds, attempt_seconds=500.0, call_seconds=60.0)
    assert (said["called"], "jade" in said["answer"]) == (["amber", "cedar"], True)
    turns = session.turns()
    assert len(turns) == len(case.says)
    for turn, prompt, text in zip(turns, engine.prompts, case.says, strict=True):
        np.testing.assert_array_equal(turn.prompt, prompt)
        np.testing.assert_array_equal(turn.action[:-1], hermes().encode(text))
        assert (turn.action[-1], turn.stop) == (hermes().end_token, StopReason.end_token)
        assert [made.name for made in turn.said.calls] == [json.loads(part)["name"] for part in calls_in(text)]
    extends = sum(turn.broke is Break.none for turn in turns[1:])
    assert not case.extends or extends == len(turns) - 1
    ignored = sorted({name for made in session.recorded for name in made.ask.ignored})
    overridden = sorted({name for made in session.recorded for name in made.overridden})
    row = [said["package"], said["version"], case.mode, len(turns), f"{extends} of {len(turns) - 1}"]
    rows[case.script, case.mode] = [*row, ", ".join(ignored) or "-", ", ".join(overridden) or "-"]


OFFLINE = {
    "OTEL_SDK_DISABLED": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "HF_HUB_OFFLINE": "1",
    "ANONYMIZED_TELEMETRY": "false",
}


def calls_in(text):
    return [part.partition("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]

"""Whole runs in which agents drive the attempts: trained by the one loop, on what the endpoint recorded."""

import json
import re
import runpy
import sys
from random import Random

import httpx2
import pytest

from support.paths import ROOT
from support.running import micro_recipe, micro_toml, train
from turnwise.assemble.checks import check
from turnwise.cli.commands import main
from turnwise.envs.hops import Hops
from turnwise.messages import Message, ToolCall
from turnwise.recipe.parse import load_recipe
from turnwise.runs import archive
from turnwise.runs.folder import RunFolder
from turnwise.runs.tracker import read_metrics

CLIENT = []
"""Of all attempts: one would cost more than an attempt."""
LINKS = [
    "env.0.name=serve.agents.test_agent_run:Links",
    "env.0.dataset=links",
    "env.0.agent=serve.agents.test_agent_run:look_up",
    "rollout.tools=hermes",
    "rollout.max_prompt_tokens=600",
    "rollout.max_trajectory_tokens=660",
]
"""An agent that plays `Links` through the endpoint."""
DRIVEN = [
    *LINKS,
    "rollout.max_action_tokens=60",
    "env.0.tasks.count=16",
    "steps=3",
    "groups_per_step=2",
    "evaluation.every=0",
    "evaluation.final_tasks=4",
    "sft.noise=0.1",
    "sft.updates=2",
    "sft.batch=4",
]
"""As little as shows that it trains."""
TOOL = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


class Links(Hops):
    """hops, with an expert that calls a tool."""

    def demonstrate(self, noise, random: Random):
        verb, _, name = super().demonstrate(noise, random).partition(" ")
        if verb == "answer":
            return Message("assistant", name)
        return Message("assistant", "", calls=(ToolCall("get", {"name": name}),))


async def look_up(messages, base_url, api_key, model, act):
    """A loop with a tool, by hand."""
    if not CLIENT:
        CLIENT.append(httpx2.AsyncClient(timeout=600))
    said = [{"role": "user", "content": messages[-1]["content"]}]
    tools = [{"type": "function", "function": {"name": "get", "description": "Look up.", "parameters": TOOL}}]
    while True:
        response = await CLIENT[0].post(
            f"{base_url}/chat/completions",
            json={"model": model, "messages": said, "tools": tools},
            headers={"authorization": f"Bearer {api_key}"},
        )
        response.raise_for_status()
        answer = response.json()["choices"][0]["message"]
        if not answer.get("tool_calls"):
            return f"answer {answer['content']}"
        said.append(answer)
        for call in answer["tool_calls"]:
            name = json.loads(call["function"]["arguments"]).get("name")
            said.append({"role": "tool", "tool_call_id": call["id"], "content": await act(f"get {name}")})


def test_a_run_with_an_agent_trains_on_what_was_sampled(tmp_path, capsys):
    summary = train(micro_recipe(tmp_path, *DRIVEN))
    assert summary is not None
    assert summary["updates"] == 3
    folder = RunFolder.open(tmp_path / "run")
    lines = read_metrics(folder.metrics)
    gaps = [line["gap/mean"] for line in lines if "gap/mean" in line]
    assert len(gaps) == 3
    assert max(gaps) <= 1e-6
    steps = archive.archived_steps(folder.archive)
    groups = [r.group for s in steps for r in archive.read_step(folder.archive / f"step-{s:06d}.parquet")]
    assert sum(len(group.failed) for group in groups) == 0
    turns = [turn for group in groups for made in group.trajectories for turn in made.turns]
    assert len(turns) >= 3 * 2 * 4
    assert {version for turn in turns for version in turn.versions.tolist()} == {0, 1, 2}
    assert main(["eval", str(tmp_path / "run"), "--tasks", "4"]) == 0  # by the same agent
    assert "failed" in capsys.readouterr().out


def test_a_run_with_an_agent_goes_on_while_it_learns(tmp_path):
    summary = train(micro_recipe(tmp_path, *DRIVEN, "max_lag=1"))
    assert summary is not None
    lines = read_metrics(RunFolder.open(tmp_path / "run").metrics)
    assert max(line["gap/mean"] for line in lines if "gap/mean" in line) <= 1e-6


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env.0.agent=nowhere_at_all:agent"], "PYTHONPATH"),
        (["env.0.agent=no-such-command"], "no such command"),
        (["env.0.concurrency.max_concurrent_agents=3"], "max_concurrent_agents is ignored without an agent"),
        (["endpoint.port=8000"], "endpoint.port is ignored without an env.agent"),
        (
            ["env.0.agent=serve.agents.test_agent_run:look_up", "env.0.concurrency.actors=2"],
            "remove concurrency.actors",
        ),
    ],
)
def test_mistakes_in_a_recipe_are_refused_at_the_start(tmp_path, overrides, words):
    with pytest.raises(ValueError, match=words):
        check(load_recipe(micro_toml(tmp_path), overrides))


@pytest.mark.parametrize("agent", ["framework", *(pytest.param(a, marks=pytest.mark.slow) for a in ("sdk", "stream"))])
def test_agents_run_unmodified(agent, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    less = ["steps=1", "env.0.tasks.count=12", "evaluation.final_tasks=4", "sft.updates=1", "sft.batch=4"]
    where = ["--agent", agent, "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["endpoint.py", "--quick", *where, *less])
    runpy.run_path(str(ROOT / "benchmarks" / "endpoint.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "8 attempts of the agent recorded, 0 of them failed" in said
    assert float(said.rpartition("mean ")[2].split(",")[0]) <= 1e-6
    sys.modules.pop("endpoint", None)


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["framework", "sdk", "stream"])
def test_agents_learn(agent, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["endpoint.py", "--agent", agent, "--out", str(tmp_path / "run")])
    runpy.run_path(str(ROOT / "benchmarks" / "endpoint.py"), run_name="__main__")
    said = capsys.readouterr().out
    before, _, after = said.rpartition("success, sampled: ")[2].partition(";")[0].partition(" -> ")
    assert float(after) > float(before) + 0.2
    sys.modules.pop("endpoint", None)


def test_the_agent_of_the_docs_trains(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "guides" / "endpoint.md").read_text()
    for language, name in (("python", "guessing.py"), ("toml", "guessing.toml")):
        [code] = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    small = [
        "steps=1",
        "groups_per_step=2",
        "rollout.group_size=2",
        "model.hidden=32",
        "model.layers=1",
        "sft.updates=1",
    ]
    small += ["sft.batch=2", "evaluation.final_tasks=2", "env.0.tasks.count=6", "model.threads=1"]
    assert main(["train", "guessing.toml", *small]) == 0
    [line] = [line for line in read_metrics(tmp_path / "runs" / "guessing-0" / "metrics.jsonl") if line["step"] == 1]
    assert line["gap/mean"] <= 1e-6
    sys.modules.pop("guessing", None)

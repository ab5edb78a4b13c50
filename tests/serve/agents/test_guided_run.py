"""Whole runs whose agent asks for a form: trained exactly on what was sampled under it."""

import httpx2
import numpy as np
import pytest

from support.running import micro_recipe, train
from turnwise.cli.commands import main
from turnwise.envs.base import Reply
from turnwise.envs.hops import Hops
from turnwise.runs import archive
from turnwise.runs.folder import RunFolder
from turnwise.runs.tracker import read_metrics

CLIENT = []
"""Of all attempts: one would cost more than an attempt."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{2,6}$"}, "sure": {"type": "boolean"}},
    "required": ["name", "sure"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GUIDED = [
    "env.0.name=serve.agents.test_guided_run:Sure",
    "env.0.dataset=sure",
    "env.0.agent=serve.agents.test_guided_run:name_it",
    "rollout.max_prompt_tokens=600",
    "rollout.max_trajectory_tokens=660",
    "rollout.max_action_tokens=60",
    "env.0.tasks.count=16",
    "steps=2",
    "groups_per_step=2",
    "evaluation.every=0",
    "evaluation.final_tasks=2",
    "sft.updates=2",
    "sft.batch=4",
]


class Sure(Hops):
    """hops, which pays for being sure: a random model is now and then."""

    async def step(self, message):
        return Reply(finished=True, outcome=float('"sure":true' in message.content))


async def name_it(messages, base_url, api_key, model, act):
    """Two turns: one under a schema, one without."""
    if not CLIENT:
        CLIENT.append(httpx2.AsyncClient(timeout=600))
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    said = [{"role": "user", "content": messages[-1]["content"]}]
    for body in ({"response_format": form}, {}):
        response = await CLIENT[0].post(
            f"{base_url}/chat/completions",
            json={"model": model, "messages": said, **body},
            headers={"authorization": f"Bearer {api_key}"},
        )
        response.raise_for_status()
        answer = response.json()["choices"][0]["message"]["content"]
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and now?"}]
    return f"answer {said[1]['content']}"


def checked_turns(folder):
    """The turns of a run, after a look at its metrics: where the weights that sampled are trained, engine and learner
    agree and the ratio is 1."""
    lines = [line for line in read_metrics(folder.metrics) if "gap/max" in line]
    assert lines
    assert max(line["gap/max"] for line in lines) <= 2e-5
    assert [line["ratio"] for line in lines] == [pytest.approx(1.0, abs=1e-6)] * len(lines)
    paths = [archive.step_path(folder.archive, step) for step in archive.archived_steps(folder.archive)]
    records = [record for path in paths for record in archive.read_step(path)]
    assert not any(record.group.failed for record in records)
    return [turn for record in records for attempt in record.group.trajectories for turn in attempt.turns]


@pytest.mark.slow
def test_a_run_under_a_schema_trains_exactly_and_verifies(tmp_path, capsys):
    train(micro_recipe(tmp_path, *GUIDED))
    turns = checked_turns(RunFolder.open(tmp_path / "run"))
    guided = [turn for turn in turns if turn.allowed is not None]
    assert len(guided) == len(turns) / 2
    for turn in guided:
        assert turn.allowed.allows(turn.action).all()
        assert turn.logprobs.max() == 0.0, "a token that nothing else could have been is certain"
        assert not np.allclose(turn.logprobs, 0.0)
    capsys.readouterr()
    code = main(["verify", str(tmp_path / "run"), "--groups", "2"])
    found = capsys.readouterr()
    assert code == 0, found
    assert "the measure" in found.out


@pytest.mark.slow
@pytest.mark.parametrize("how", [["max_lag=1"], ["engine.processes=2"], ["lora.rank=4"], ["layout=packed"]])
def test_so_does_a_run_with_other_engines_and_learners(tmp_path, how):
    train(micro_recipe(tmp_path, *GUIDED, *how))
    assert any(turn.allowed is not None for turn in checked_turns(RunFolder.open(tmp_path / "run")))

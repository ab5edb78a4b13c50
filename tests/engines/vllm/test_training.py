"""Whole runs with vLLM sampling: every load is the learner's weights, at lag 0 and with lag."""

from __future__ import annotations

import pytest

from engines.vllm.serving import server
from support.running import micro_recipe, resume, train, untimed
from turnwise.learn.learner import save_policy

VLLM = ("engine.name=vllm", "engine.memory.kv_cache=256", "rollout.limits.call_seconds=60")


def gaps_of(folder):
    """The gap of every step between vLLM's logprobs and the learner's, on tokens of the trained version."""
    lines = [line for line in untimed(folder / "run" / "metrics.jsonl") if line["step"]]
    return {line["step"]: (line["gap/mean"], line["gap/max"]) for line in lines if "gap/mean" in line}


def check(folder, steps):
    gaps = gaps_of(folder)
    assert set(gaps) == set(steps), "no token to compare"
    assert max(mean for mean, _ in gaps.values()) < 1e-5, gaps
    assert max(largest for _, largest in gaps.values()) < 1e-4, gaps
    failed = [line.get("eval/sampled/status/failed", 0) for line in untimed(folder / "run" / "metrics.jsonl")]
    assert not any(failed)


def test_a_run_at_lag_0(tmp_path):
    summary = train(micro_recipe(tmp_path, *VLLM, "steps=6"))
    assert summary["updates"] == 6
    check(tmp_path, range(1, 7))


def test_a_run_with_lag(tmp_path):
    summary = train(micro_recipe(tmp_path, *VLLM, "steps=6", "max_lag=1"))
    assert summary["lag_max"] <= 1
    gaps = gaps_of(tmp_path)
    assert gaps
    assert max(mean for mean, _ in gaps.values()) < 1e-5, gaps


def test_a_run_with_overlapping_evaluation_and_a_resume(tmp_path):
    recipe = micro_recipe(tmp_path, *VLLM, "steps=4", "schedule.overlap_evaluations=true")
    assert train(recipe)["updates"] == 4
    check(tmp_path, range(1, 5))
    folder = tmp_path / "run"
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"steps": 4', '"steps": 6'))
    (folder / "SHA256SUMS").unlink()  # as one does who changes it on purpose
    assert resume(folder)["updates"] == 6
    check(tmp_path, range(1, 7))


def test_a_run_against_a_server(tmp_path):
    """Its model is another when the run begins: the first load replaces it."""
    import asyncio

    from support.assembling import environments_for
    from turnwise.assemble.model import model_and_tokenizer

    recipe = micro_recipe(tmp_path, *VLLM[:1], "seed=1", "rollout.limits.call_seconds=60", "steps=3")
    other = micro_recipe(tmp_path, "seed=1")
    model, tokenizer = asyncio.run(model_and_tokenizer(other, environments_for(other)))
    folder = tmp_path / "served"
    folder.mkdir()
    save_policy(model, tokenizer, folder)
    with server(folder, context=recipe.rollout.max_trajectory_tokens) as url:
        summary = train(micro_recipe(tmp_path, *VLLM[:1], "seed=1", "steps=3", f"engine.vllm.servers={url}"))
    assert summary["updates"] == 3
    check(tmp_path, range(1, 4))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"logprobs": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"context": 100}, "--max-model-len 160"),
    ],
)
def test_a_server_that_would_not_do_is_refused(tmp_path, how, text):
    import asyncio

    from engines.conformance import stock, tokenizer_of_letters
    from engines.vllm.serving import remote
    from turnwise.engines.base import EngineFailure

    save_policy(stock(0), tokenizer_of_letters(), tmp_path)
    with server(tmp_path, **{"context": 160, **how}) as url:
        engine = remote(url, stock(0), slots=8, context=160, end_tokens=[0])
        with pytest.raises(EngineFailure, match=text):
            asyncio.run(engine.load(stock(0).state_dict(), 1))

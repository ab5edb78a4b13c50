"""Loads that leave something behind are seen, at the start and afterwards; those that do not are left in peace."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from engines.slots.test_fused_llama import model_of
from support.acting import run, tiny_model
from training.checking import check_of, lazy_engine, learner_of, pair
from turnwise.engines.base import EngineFailure
from turnwise.learn.objective import Objective
from turnwise.learn.perturbation import Change, Disturbance
from turnwise.messages import Message
from turnwise.plan.pack import pack
from turnwise.training import weight_check
from turnwise.training.check_budget import CheckBudget
from turnwise.types import StopReason, Turn

NAMES = sorted(tiny_model(tied=True).state_dict())


def weights_of(learner):
    return {name: tensor.clone() for name, tensor in learner.publish().items()}


def step(learner, learning_rate=None):
    """One update of all weights, at a rate of 1e-6 unless another is given."""
    if learning_rate is not None:
        learner.stepper.settings = replace(learner.stepper.settings, learning_rate=learning_rate)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 61, (2, 12))
    turns = [
        Turn(row[:6], row[6:], np.zeros(6), np.zeros(6), StopReason.length, 0.0, Message("assistant", ""))
        for row in tokens
    ]
    ones = [np.ones(6, np.float32)] * 2
    loss: Any = lambda logprobs, old, advantages: (-logprobs, {})
    learner.update(pack(turns, 100), ones, ones, {}, Objective(loss))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_load_that_works_is_found_to(dtype):
    learner, engine, check = pair(dtype=dtype)
    before = weights_of(learner)

    async def scene():
        start = await check.begin(3)
        step(learner)
        await engine.load(learner.publish(), 4)
        return start, await check.arrived(4)

    start, loaded = run(scene())
    assert start.problem == loaded.problem == ""
    assert start.metrics["weight_check/start/moved"] >= 4 * check.limit
    assert dtype == "bfloat16" or start.metrics["weight_check/start/moved"] > 0.5  # in float32 it need not be gentle
    assert loaded.metrics["weight_check/gap"] <= check.limit
    assert check.limit == (1e-5 if dtype == "float32" else pytest.approx(4 * start.metrics["weight_check/start/gap"]))
    assert loaded.metrics["weight_check/tokens"] == 32
    after = learner.publish()
    assert max(float((after[name] - before[name]).abs().max()) for name in before) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        ("float32", NAMES),
        ("bfloat16", [name for name in NAMES if "layers" not in name or ("layers.1" in name and "_proj" not in name)]),
        pytest.param("bfloat16", NAMES, marks=pytest.mark.slow),
    ],
)
def test_any_tensor_that_loads_leave_behind_is_caught_at_the_start(dtype, names):
    missed = []
    for name in names:
        _, _, check = pair(name, dtype=dtype)
        found = run(check.begin(0))
        if "loads leave a part of its weights" not in found.problem:
            missed.append((name, found))
    assert missed == []


def test_a_stale_tied_head_hides_from_one_small_step_in_bfloat16_and_not_from_the_start():
    """Which is why there is a test at the start."""
    learner, engine, check = pair("lm_head.weight", dtype="bfloat16")

    async def scene():
        start = await check.begin(0)
        _, _, again = pair(dtype="bfloat16")
        again.engine, again.learner, again.limit = engine, learner, check.limit
        await engine.load(learner.publish(), 1)
        step(learner)
        await engine.load(learner.publish(), 2)
        return start, await again.arrived(2)

    start, hidden = run(scene())
    assert "loads leave a part of its weights as they were" in start.problem
    assert hidden.problem == ""


def test_a_tensor_that_a_later_load_leaves_behind_is_caught_in_float32():
    learner, engine, check = pair()
    check.every = 1

    async def scene():
        found = [await check.begin(0)]
        engine.model.stale = ("model.layers.0.mlp.up_proj.weight",)
        for version in (1, 2):
            step(learner, 1e-3)
            await engine.load(learner.publish(), version)
            found.append(await check.arrived(version))
        return found

    start, first, _ = run(scene())
    assert start.problem == ""
    assert "after the load of version 1" in first.problem
    assert first.metrics["weight_check/moved"] > first.metrics["weight_check/gap"] > 1e-5


def test_the_check_reports_how_far_a_load_moved():
    learner, engine, check = pair()
    check.every = 1

    async def scene():
        await check.begin(0)
        moved = []
        for version, rate in ((1, 0.0), (2, 1e-4), (3, 1e-2)):
            step(learner, rate)
            await engine.load(learner.publish(), version)
            moved.append((await check.arrived(version)).metrics["weight_check/moved"])
        return moved

    still, little, much = run(scene())
    assert still < 1e-5 < little < much


def test_an_engine_of_another_model_is_caught_at_the_start():
    learner = learner_of(tiny_model(tied=True))
    check = check_of(lazy_engine(tiny_model(seed=1, tied=True), dtype="bfloat16"), learner, "bfloat16")
    assert "before anything was trained" in run(check.begin(0)).problem


def test_an_engine_that_did_not_load_at_all_says_an_old_version():
    _, _, check = pair()

    async def scene():
        await check.begin(0)
        return await check.arrived(1)

    assert run(scene()).problem == "after the load of version 1 the engine samples with [0]"


def test_prefixes_of_older_weights_do_not_disturb_the_check():
    learner, engine, check = pair(keep_cache=True)
    check.every = 1

    async def scene():
        found = [await check.begin(0)]
        for version in (1, 2):
            step(learner, 1e-2)
            await engine.load(learner.publish(), version)
            found.append(await check.arrived(version))
        return found

    assert [found.problem for found in run(scene())] == ["", "", ""]


def test_the_temperature_is_that_of_the_learner():
    model = tiny_model(tied=True)
    learner = learner_of(model, temperature=0.7)
    engine = lazy_engine(model)
    assert run(check_of(engine, learner, temperature=0.7).begin(0)).problem == ""
    assert run(check_of(lazy_engine(model), learner, temperature=1.0).begin(0)).problem != ""


def checked_versions(check, learner, versions, at=lambda version: None):
    """The versions whose loads are checked."""

    async def scene():
        await check.begin(0)
        found = []
        for version in versions:
            at(version)
            await check.engine.load(learner.publish(), version)
            if (await check.arrived(version)).metrics:
                found.append(version)
        return found

    return run(scene())


def test_some_loads_are_checked_the_first_always_and_shared_weights_never():
    learner, engine, check = pair()
    check.every = 3
    assert checked_versions(check, learner, range(1, 8)) == [1, 3, 6]
    engine.shares_weights = True
    assert run(check.arrived(9)).metrics == run(check.begin(9)).metrics == {}


class Clock:
    """Seconds that a test lets pass; a check takes one."""

    def __init__(self, check, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(weight_check, "CheckBudget", partial(CheckBudget, clock=lambda: self.now))
        compare = check.compare

        async def slow(version):
            self.now += 1.0
            return await compare(version)

        check.compare = slow

    def step(self, version):
        self.now += 10.0


def test_checks_take_two_percent_of_the_time_and_no_more(monkeypatch):
    """A check of 1 s and steps of 10 s: one load in five."""
    learner, _, check = pair()
    clock = Clock(check, monkeypatch)
    assert checked_versions(check, learner, range(1, 31), clock.step) == [1, 10, 15, 20, 25, 30]
    assert check.budget.spent <= 0.02 * clock.now


def test_a_load_after_an_engine_was_started_again_is_checked(monkeypatch):
    learner, engine, check = pair()
    clock = Clock(check, monkeypatch)

    def at(version):
        clock.step(version)
        engine.num_starts = 1 if version < 4 else 2

    assert checked_versions(check, learner, range(1, 8), at) == [1, 4]


def test_a_late_check_that_fails_names_all_versions_since_the_last(monkeypatch):
    learner, engine, check = pair()
    clock = Clock(check, monkeypatch)

    async def scene():
        await check.begin(0)
        problems = []
        for version in range(1, 11):
            clock.step(version)
            step(learner, 1e-3)
            if version == 7:
                engine.model.stale = ("model.layers.0.mlp.up_proj.weight",)
            await engine.load(learner.publish(), version)
            problems.append((await check.arrived(version)).problem)
        return problems

    *before, last = run(scene())
    assert before == [""] * 9
    assert "after the load of version 10, the first that was checked since version 1: versions 2 to 10 may" in last


def test_a_busy_engine_is_not_waited_for_and_gets_longer_the_next_time():
    _, engine, check = pair()

    async def scene():
        await check.begin(0)
        check.probe_timeout = 0.05
        await engine.pause()
        nothing = await check.arrived(0)
        timeout = check.probe_timeout
        await engine.resume()
        check.probe_timeout = 60.0
        return nothing, timeout, await check.arrived(0)

    nothing, timeout, compared = run(scene())
    assert nothing.metrics == {"weight_check/tokens": 0.0}
    assert nothing.problem == ""
    assert timeout == 0.1
    assert compared.metrics["weight_check/gap"] <= 1e-5


def test_an_engine_that_fails_probes_stops_the_start_and_not_the_run(monkeypatch):
    _, engine, check = pair()

    async def fail(*_, **__):
        await asyncio.sleep(0)
        raise EngineFailure("no")

    monkeypatch.setattr(engine, "generate", fail)
    with pytest.raises(EngineFailure):
        run(check.begin(0))
    assert run(check.arrived(1)).problem == ""


def test_an_engine_that_differs_far_into_the_context_only_is_caught_at_the_start():
    _, engine, check = pair()
    plainly = engine.model.compute

    def compute(tokens, positions, attend, recorded):
        return plainly(tokens, positions + (positions >= 48), attend, recorded)  # one place skipped

    engine.model.compute = compute
    found = run(check.begin(0))
    assert "after prompts of up to 88 tokens" in found.problem
    assert found.metrics["weight_check/start/gap"] < 1e-5 < 1e-4 < found.metrics["weight_check/start/gap_far"]


def test_a_limit_that_hides_every_load_is_reported():
    """Of a load that does nothing at all, too."""
    model = tiny_model(tied=True)
    learner = learner_of(model, "bfloat16")
    engine = lazy_engine(model, *NAMES, dtype="bfloat16")
    found = run(check_of(engine, learner, "bfloat16", limit=100.0).begin(0))
    assert "so that nobody can tell whether a load arrives; lower weight_check.limit" in found.problem
    assert found.metrics["weight_check/start/moved"] < 4 * 100.0


@pytest.mark.parametrize(("share", "problem"), [(0.99, ""), (1.01, "nobody can tell whether a load arrives")])
def test_a_load_is_visible_only_if_it_moves_logprobs_four_times_the_limit(share, problem):
    """The engine loads everything: all that is unclear is whether anybody would notice if it did not."""
    _, _, check = pair()
    moved = run(check.begin(0)).metrics["weight_check/start/moved"]
    learner = learner_of(model := tiny_model(tied=True))
    result = run(check_of(lazy_engine(model), learner, limit=share * moved / 4).begin(0))
    assert result.metrics["weight_check/start/moved"] == pytest.approx(moved)
    assert max(result.metrics[f"weight_check/start/gap{part}"] for part in ("", "_far", "_disturbed")) < 1e-4
    assert bool(result.problem) == bool(problem)
    assert problem in result.problem


@pytest.mark.parametrize(("kind", "mirrors"), [("qwen3", 2), ("llama", 2), ("qwen2", 2), ("gpt2", 0), ("gemma", 3)])
def test_mirrors_that_a_model_does_not_notice_are_used_and_no_others(kind, mirrors):
    quiet = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "n_embd": 32, "n_head": 4, "n_layer": 2}
    model = model_of(kind, **(quiet if kind == "gpt2" else {}))
    learner = learner_of(model, "bfloat16")
    check = check_of(lazy_engine(model, dtype="bfloat16"), learner, "bfloat16")

    async def scene():
        check.limit = 4 * (await check.difference(plain := await check.sample(0, "plain", 8))).size
        return await check.changes(plain.turns), await check.begin(0)

    (changes, _), found = run(scene())
    assert found.problem == ""
    assert [bool(change.mirror) for change in changes[: mirrors + 1]] == [*[True] * mirrors, False]
    assert changes[-1] == replace(changes[-1], mirror="", kind="")
    # Of what no mirror has, each kind that is noticed is changed by itself: more where there are fewer mirrors.
    kinds = [change.kind for change in changes[mirrors:-1]]
    assert all(kinds)
    assert (len(kinds) > 2) == (mirrors == 0)


@pytest.mark.parametrize("change", [Change(), Change(stride=50), Change("stream"), Change("layers", ("stream",))])
@pytest.mark.parametrize("tied", [True, False])
def test_a_disturbance_is_taken_back_bit_for_bit(tied, change):
    model = tiny_model("qwen2", tied=tied)  # which has biases
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.bias.zero_()
        model.model.layers[1].self_attn.q_proj.bias[:5] = -0.0
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    disturbance = Disturbance(model, change)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert change.mirror or changed == set(before)
    disturbance.undo()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.int32), before[name].view(torch.int32)), name


def test_changes_have_every_tensor_between_them():
    model = model_of("qwen2")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.bias.zero_()  # whose sign nobody sees
    found = set()
    for change in (Change("stream"), Change("layers"), Change(spared=("stream", "layers"))):
        disturbance = Disturbance(model, change)
        found |= disturbance.names
        if not change.mirror:
            assert disturbance.names == {"model.norm.weight", "model.layers.0.self_attn.q_proj.bias"}
        disturbance.undo()
    assert found == {name for name, _ in model.named_parameters()}

"""Played servers in processes of their own, killed and stopped in the middle, and a training run on two servers."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.vllm.play import server_of
from support.acting import CONTEXT, byte_tokenizer, full_logprobs, tiny_model, until
from support.running import SilentScreen, micro_recipe, train
from turnwise.assemble import checks
from turnwise.assemble import engines as building
from turnwise.assemble import run as running
from turnwise.engines.base import Sampling, vocabulary_of
from turnwise.engines.remote.connection import Connection
from turnwise.engines.remote.router import Router
from turnwise.engines.vllm.engine import VllmEngine
from turnwise.engines.vllm.server import VllmServer
from turnwise.learn.learner import save_policy
from turnwise.runs.archive import archived_steps, read_step
from turnwise.testing.played_server import in_thread
from turnwise.weights.served_files import ServedFiles
from turnwise.weights.vllm_file import FileTransfer

pytestmark = pytest.mark.slow
PROMPT = np.arange(1, 12, dtype=np.int32)


class Process:
    """A played server in a process, which can be started again on its port."""

    def __init__(self, folder):
        self.folder, self.port = folder, 0
        self.start()

    def start(self):
        command = [sys.executable, Path(__file__).with_name("play.py"), self.folder, str(CONTEXT), str(self.port)]
        self.process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def send(self, number):
        os.kill(self.process.pid, number)

    def close(self):
        self.process.kill()
        self.process.wait()


def test_servers_that_are_killed_and_stopped_cost_no_call(tmp_path):
    model = tiny_model(tied=True)
    model.config.eos_token_id = 2
    save_policy(model, byte_tokenizer(), tmp_path / "model")
    torch.manual_seed(0)
    weights = tiny_model(seed=1, tied=True).state_dict()
    store = ServedFiles(torch.float32, tmp_path)
    store.publish(model.state_dict(), 0)

    def start(number):
        service = VllmServer(Connection(f"http://127.0.0.1:{servers[number].port}"))
        settings = {"slots": 4, "context": CONTEXT, "vocabulary": vocabulary_of(model), "end_tokens": [2]}
        return VllmEngine(
            service,
            FileTransfer(torch.float32),
            tensors=weights,
            version=store.newest.version,
            first_weights=store.newest,
            name=service.url,
            **settings,
        )

    async def scene():
        router = Router(start, 2, store, check_seconds=0.1, answer_seconds=3.0, starts=None)
        await router.open()
        ask = lambda number: router.generate(PROMPT, Sampling(40), session=f"s{number}", seed=number)
        first = await asyncio.gather(*(ask(number) for number in range(4)))
        calls = [asyncio.create_task(ask(number)) for number in range(4)]
        await until(lambda: router.slots[0].num_calls == 2)
        servers[0].send(signal.SIGKILL)
        killed = await asyncio.gather(*calls)
        await asyncio.to_thread(servers[0].start)
        await until(lambda: all(slot.ready.is_set() for slot in router.slots), 120)
        servers[1].send(signal.SIGSTOP)
        stopped = await asyncio.gather(*(ask(number) for number in range(4)))
        await router.load(weights, 1)
        servers[1].send(signal.SIGCONT)
        await until(lambda: all(slot.ready.is_set() for slot in router.slots), 120)
        last = await asyncio.gather(*(ask(number) for number in range(8)))
        served = [slot.num_served for slot in router.slots]
        await router.close()
        return first, killed, stopped, last, served

    async def bounded():
        async with asyncio.timeout(280):
            return await scene()

    with ExitStack() as stack:
        servers = [Process(tmp_path / "model") for _ in range(2)]
        for server in servers:
            stack.callback(server.close)
        first, killed, stopped, last, served = asyncio.run(bounded())
    tokens = [completion.tokens.tolist() for completion in first]
    assert [completion.tokens.tolist() for completion in killed] == tokens
    assert [completion.tokens.tolist() for completion in stopped] == tokens
    for completion in last:
        assert set(completion.versions.tolist()) == {1}
        expected = full_logprobs(tiny_model(seed=1, tied=True), PROMPT, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)
    assert min(served) > 4


def test_a_run_on_two_servers_of_which_one_goes_away_loses_no_attempt(tmp_path, monkeypatch):
    """Its weights are checked on each server after every load."""
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path / "cache"))
    settings = ["steps=4", "max_lag=1", "sft.updates=0", "evaluation.every=0", "evaluation.final_tasks=4"]
    settings += ["rollout.failures.retries=0", "rollout.limits.call_seconds=90"]
    beginning = micro_recipe(tmp_path, *settings, f"out={tmp_path / 'beginning'}")
    save_start(beginning, tmp_path / "model")
    context = building.context_of(beginning)
    routers = []
    open_servers = building.vllm_servers

    def watched(*arguments):
        router = open_servers(*arguments)
        router.check_seconds = 0.1
        load = router.load

        async def load_and_lose(weights, version):
            await load(weights, version)
            if version == 2:
                await asyncio.to_thread(theirs, servers[0].vanish())
            if version == 3:
                await asyncio.to_thread(theirs, servers[0].listen())
                await until(lambda: all(slot.ready.is_set() for slot in router.slots), 120)

        router.load = load_and_lose
        routers.append(router)
        return router

    monkeypatch.setattr(building, "vllm_servers", watched)
    with ExitStack() as stack:
        servers = [server_of(tmp_path / "model", context) for _ in range(2)]
        theirs, _ = [stack.enter_context(in_thread(server)) for server in servers]
        urls = ",".join(server.url for server in servers)
        own_model = [f"model.path={tmp_path / 'model'}", "model.hidden=", "model.layers="]
        served = ["engine.name=vllm", f"engine.vllm.servers={urls}"]
        recipe = micro_recipe(tmp_path, *settings, *own_model, *served)
        summary = train(recipe)
    assert summary["updates"] == 4
    steps = archived_steps(tmp_path / "run" / "archive")
    groups = [record.group for step in steps for record in read_step(tmp_path / f"run/archive/step-{step:06d}.parquet")]
    assert len(groups) == 4 * recipe.groups_per_step
    assert all(not group.failed for group in groups)
    assert routers[0].slots[0].num_starts > 1
    assert all(slot.num_served > 0 for slot in routers[0].slots)


def save_start(recipe, folder):
    """The model that a recipe starts from, as a folder that servers read."""

    async def work():
        async with running.training(recipe, SilentScreen(), asyncio.Event()) as run:
            learner: Any = run.parts.loop.learner
            save_policy(learner.policy.model, run.parts.tokenizer, folder)

    asyncio.run(work())


def test_a_run_whose_server_sleeps_between_its_steps(tmp_path, monkeypatch):
    """Its weights are gone at level 2, so that a step without a whole load would be found by the check."""
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checks, "check_gpus", lambda recipe: None)
    settings = ["steps=3", "max_lag=0", "sft.updates=0", "evaluation.every=0", "evaluation.final_tasks=4"]
    beginning = micro_recipe(tmp_path, *settings, f"out={tmp_path / 'beginning'}")
    save_start(beginning, tmp_path / "model")
    server = server_of(tmp_path / "model", building.context_of(beginning))
    server.model_config["enable_sleep_mode"] = True
    with in_thread(server):
        own_model = [f"model.path={tmp_path / 'model'}", "model.hidden=", "model.layers="]
        served = ["engine.name=vllm", f"engine.vllm.servers={server.url}", "engine.vllm.sleep=true"]
        summary = train(micro_recipe(tmp_path, *settings, *own_model, *served))
    assert summary["updates"] == 3
    assert server.slept == [2, 2, 2]
    assert server.asleep == set()

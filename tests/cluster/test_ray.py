"""A Ray cluster of two nodes on this machine: learner ranks on one, engine replicas on the other."""

import asyncio
import copy
import math
import os
import re
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import acting
from support.acting import until
from support.assembling import environments_for, warm_model
from support.interrupting import SMALL, Injected, break_at, go
from support.making import distance, gradients
from support.ray_nodes import two_nodes
from support.running import SilentScreen, micro_recipe
from turnwise.assemble import run
from turnwise.assemble.learner import room_of
from turnwise.assemble.models import ModelSource, reachable
from turnwise.assemble.run import run_parts
from turnwise.cluster.placement import Site, nodes_of
from turnwise.cluster.remote_envs import RemoteEnvironments
from turnwise.cluster.replica import RayReplica
from turnwise.cluster.worker_host import ActorHost
from turnwise.engines.base import EngineFailure
from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.rollout.batching.microbatch import Lane
from turnwise.runs.folder import RunFolder
from turnwise.schedule.stopping import LearnerLost
from turnwise.training.loop import Progress, train
from turnwise.types import Status

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

SPREAD = ["cluster.placement=separate_nodes", "cluster.fsdp=2", "cluster.replicas=2", "cluster.cpus=1"]
MORE = [
    "steps=5",
    "rollout.limits.call_seconds=120",
    "sft.updates=20",
    "entropy=0.01",
    "evaluation.final_tasks=4",
    "evaluation.every=0",
]


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of two CPUs each."""
    with two_nodes(num_cpus=2, object_store_memory=100 << 20) as made:
        yield made


def trained(recipe, model, tokenizer, look):
    """(the first step's records, what `look` sees of the learner after it, metrics of all steps, where it was). On a
    cluster a replica dies after the second step."""
    first, seen, lines, sites = [], [], [], []

    class WatchedSite(Site):
        def __init__(self, cluster, room):
            super().__init__(cluster, room)
            sites.append(self)

    async def work():
        environments, evaluations = environments_for(recipe), Path(recipe.out) / "evaluations"
        here = ModelSource(copy.deepcopy(model), tokenizer)
        with reachable(recipe, here, Path(recipe.out)) as source:
            return await steps(environments, source, evaluations)

    async def steps(environments, source, evaluations):
        async with run_parts(recipe, environments, source, evaluations) as parts:
            loop = parts.loop
            engine: Any = loop.engine

            async def after(progress, metrics, records, waiting):
                lines.append(metrics)
                if progress.step == 1:
                    first.extend(records)
                    seen.append(look(loop.learner))
                if progress.step == 2 and recipe.cluster.on_ray:
                    ray.kill(engine.slots[0].replica.actor)

            await train(loop, Progress(), after, asyncio.Event())
            where = nodes(sites)
            assert 0 < loop.engine.seconds < math.inf
            if recipe.cluster.on_ray:
                slot = engine.slots[0]
                await until(lambda: slot.num_starts == 2 and slot.ready.is_set(), 300.0)
        return where

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("turnwise.assemble.learner.Site", WatchedSite)
        where = asyncio.run(work())
    return first, seen[0], lines, where


def nodes(sites):
    """(nodes of the ranks, nodes of the replicas)."""
    if not sites:
        return None
    [site] = sites
    return set(nodes_of(site.of_ranks)), set(nodes_of(site.of_replicas))


def actions(records):
    turns = [turn for record in records for trajectory in record.group.trajectories for turn in trajectory.turns]
    return [turn.action.tolist() for turn in turns]


def test_five_updates_begin_with_the_gradient_of_one_process(cluster, tmp_path):
    alone, spread = micro_recipe(tmp_path, *MORE), micro_recipe(tmp_path, *MORE, *SPREAD)
    model, tokenizer = asyncio.run(warm_model(alone))
    wanted_groups, wanted, wanted_lines, _ = trained(alone, model, tokenizer, lambda own: gradients(own.policy.model))
    groups, found, lines, (of_ranks, of_replicas) = trained(spread, model, tokenizer, lambda own: own.gradients())
    assert actions(groups) == actions(wanted_groups)
    assert found.keys() == wanted.keys()
    together = lambda values: np.concatenate([np.asarray(values[name], np.float64).ravel() for name in sorted(values)])
    assert np.linalg.norm(together(wanted)) > 1e-3
    assert distance(together(found), together(wanted)) <= 1e-5
    assert max(distance(found[name], wanted[name]) for name in wanted) <= 1e-4
    assert len(lines) == 5
    assert all(line["gap/mean"] < 1e-5 for line in lines)
    assert lines[0]["loss"] == pytest.approx(wanted_lines[0]["loss"], rel=1e-5, abs=1e-6)
    assert len(of_ranks) == 1
    assert len(of_replicas) == 1
    assert of_ranks.isdisjoint(of_replicas)


def placements():
    """Placement groups that hold something of the cluster."""
    return {name for name, group in ray.util.placement_group_table().items() if group["state"] != "REMOVED"}


@pytest.mark.parametrize("moment", ["engines open", "first evaluation", "training", "closing"])
@pytest.mark.parametrize("how", ["error", "Ctrl-C"])
def test_an_error_or_an_interruption_gives_the_placements_back(cluster, tmp_path, monkeypatch, moment, how):
    before, free, calls = placements(), ray.cluster_resources()["CPU"], []
    break_at(monkeypatch, moment, how, placements, calls)
    with pytest.raises(Injected if how == "error" else asyncio.CancelledError):
        asyncio.run(go(micro_recipe(tmp_path, *SMALL, *SPREAD)))
    assert calls[0] > before
    assert placements() == before
    asyncio.run(until(lambda: ray.available_resources().get("CPU") == free, seconds=60.0))


def test_a_cluster_without_room_says_so(cluster, tmp_path):
    recipe = micro_recipe(tmp_path, "cluster.placement=separate_nodes", "cluster.fsdp=3", "cluster.placement_seconds=3")
    has = r"the cluster has 2 x \(2 CPUs\)"
    with pytest.raises(ValueError, match=rf"no room for 3 x 1 CPU and 1 x 1 CPU on other nodes; {has}; add nodes"):
        asyncio.run(run.start(recipe, SilentScreen(), asyncio.Event()))
    assert not Path(recipe.out).exists()
    with pytest.raises(ValueError, match=f"after 3 s there is no room for .*; {has}, which others may use"):
        Site(recipe.cluster, room_of(recipe))


def test_a_rank_that_fails_ends_the_learner_with_its_reason(cluster, tmp_path):
    from turnwise.cluster.actors import ActorRanks

    recipe = micro_recipe(tmp_path, *SPREAD)
    site = Site(recipe.cluster, room_of(recipe))
    try:
        with pytest.raises(RuntimeError, match="rank . of the learner failed"):
            ActorRanks(site, len, device="cpu", threads=1)
    finally:
        site.close()


def test_a_rank_whose_process_ends_says_so_in_one_line(cluster, tmp_path, caplog):
    from turnwise.cluster.actors import ActorRanks

    def exits(spread):
        os._exit(1)  # as where the system ends it because memory is short

    recipe = micro_recipe(tmp_path, *SPREAD)
    with closing(Site(recipe.cluster, room_of(recipe))) as site, pytest.raises(LearnerLost) as lost:
        ActorRanks(site, exits, device="cpu", threads=1)
    assert re.fullmatch("rank . of the learner failed: its process has ended", str(lost.value))
    assert "OOM" not in caplog.text


def test_a_replica_whose_process_ends_says_so_in_one_line(cluster, tmp_path):
    async def scene(site):
        replica = RayReplica(site, 0, ray.put(lambda: None), context=8)
        os.kill(await replica.actor.__ray_call__.remote(lambda self: os.getpid()), signal.SIGKILL)
        with pytest.raises(
            EngineFailure, match="^engine replica 0 is gone: its process (has ended|cannot be reached)$"
        ):
            await replica.check()
        await replica.close()

    recipe = micro_recipe(tmp_path, *SPREAD)
    with closing(Site(recipe.cluster, room_of(recipe))) as site:
        asyncio.run(scene(site))


def test_a_whole_run_with_environments_in_actors_resumes_on_the_cluster_only(cluster, tmp_path):
    """Colocated this time: two places of two CPUs, one on each node, leave none for environments but half of one."""
    few = ["steps=1", "sft.updates=1", "cluster.placement=colocated", "cluster.cpus=0.5", "env.0.concurrency.actors=1"]
    recipe = micro_recipe(tmp_path, *MORE, *few, "checkpoints.every=1")
    assert asyncio.run(run.start(recipe, SilentScreen(), asyncio.Event())) is not None
    folder = RunFolder.open(recipe.out)
    here = ["cluster.placement=local", "cluster.cpus=1"]
    (folder.checkpoints / "latest").write_text("step-000000\n")
    with pytest.raises(ValueError, match=r"env\.concurrency\.actors needs a Ray cluster"):
        asyncio.run(run.resume(folder.path, SilentScreen(), asyncio.Event(), overrides=here))
    assert asyncio.run(run.resume(folder.path, SilentScreen(), asyncio.Event())) is not None


def test_an_error_in_an_actor_keeps_its_traceback(cluster, tmp_path, caplog):
    class Breaks:
        """An environment that raises in its actor."""

        async def open(self, task):
            return Reply((Message("user", "go"),))

        def step(self, message):
            return {}["gone"]  # here it breaks

        async def close(self):
            return None

    own = RemoteEnvironments(Breaks, actors=1, cluster=micro_recipe(tmp_path, *MORE).cluster)
    try:
        made = acting.run(acting.attempted(own.wrap(Breaks, Lane())), seconds=120)
    finally:
        own.close()
    assert made.status is Status.failed
    assert made.reason.startswith("KeyError at ")
    assert "test_ray.py:" in made.reason
    assert 'return {}["gone"]  # here it breaks' in caplog.text


def state_of(pid):
    """The letter of a process's state; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0].replace("Z", "")
    except OSError:
        return ""


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    return until(lambda: state_of(pid) == "T", 60.0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ray_ends_an_actor_that_is_stopped(cluster, asynchronous):
    """Its calls fail at once, and its process is killed a few seconds later: what the faults of a run rely on."""

    class Plain:
        def pid(self):
            return os.getpid()

    class Asynchronous:
        async def pid(self):
            return os.getpid()

    actor = ray.remote(Asynchronous if asynchronous else Plain).options(num_cpus=1).remote()
    pid = ray.get(actor.pid.remote())
    asyncio.run(stop(pid))
    call = actor.pid.remote()
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(call, timeout=60.0)
    asyncio.run(until(lambda: not state_of(pid), 60.0))


def rollout_workers():
    found = Path("/proc").glob("[0-9]*/comm")
    return {int(path.parent.name) for path in found if path.read_text().startswith("rollout worker")}


def test_a_stopped_rollout_worker_ends_with_its_actor(cluster, tmp_path):
    """The worker is a process beside the actor, and cannot notice that the actor has ended."""

    async def scene():
        before = rollout_workers()
        host = ActorHost(0, micro_recipe(tmp_path, *SPREAD).cluster)
        line = await host.connect()
        [pid] = rollout_workers() - before
        await stop(pid)
        host.kill()
        await until(lambda: not state_of(pid), 60.0)
        line.close()
        await host.ended(0.0)

    asyncio.run(scene())

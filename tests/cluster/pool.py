"""Processes that have met through gloo, kept for many tests: starting them takes seconds."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools
import multiprocessing
import tempfile
import time
import traceback
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from threading import Lock
from unittest import mock

import torch
import torch.distributed as dist

from support.exact import make_exact
from turnwise.cluster import rank as ranks
from turnwise.cluster import spread
from turnwise.cluster.mesh import Mesh, MeshShape
from turnwise.cluster.processes import free_port
from turnwise.cluster.rank import Rank, RankAddress, join
from turnwise.cluster.ranked import RankedLearner
from turnwise.cluster.spread import Placed
from turnwise.learn.critic import Critic, ValueModel
from turnwise.learn.learner import Learner
from turnwise.learn.lora import Adapters, WithoutAdapters
from turnwise.learn.policy import Policy
from turnwise.learn.stepper import OptimizerSettings
from turnwise.plan.balance import Cost
from turnwise.weights.object_store import tensors_of_arrays

COST = Cost(token=1.0, pair=0.01)
OPEN = {}
"""In a process of the pool: its ranks by number."""
PATIENCE = 1400.0
"""Seconds that processes wait for each other: on a busy machine one may be minutes behind the others."""
GRACE = 30.0
"""Seconds that the others have to fail too, once one has."""


class Pool:
    """Runs a function in every process; each gets its own entry of every argument."""

    def __init__(self, size):
        self.size, self.made = size, 0
        self.lines, self.processes = [], []
        self.calling = Lock()  # weights are read in a thread, beside the checkpoint

    def start(self):
        context = multiprocessing.get_context("spawn")
        meeting = f"tcp://127.0.0.1:{free_port()}"
        for rank in range(self.size):
            here, there = context.Pipe()
            place = RankAddress(rank, self.size, meeting, patience=PATIENCE)
            self.processes.append(context.Process(target=work, args=(there, place), daemon=True))
            self.processes[-1].start()
            self.lines.append(here)

    def run(self, function, *arguments):
        with self.calling:
            return self.run_alone(function, *arguments)

    def run_alone(self, function, *arguments):
        if not self.lines:
            self.start()
        for rank, line in enumerate(self.lines):
            line.send((function, [argument[rank] for argument in arguments]))
        waiting, found, end = dict(enumerate(self.lines)), {}, None
        while waiting and (end is None or time.monotonic() < end):
            answered = wait(list(waiting.values()), None if end is None else end - time.monotonic())
            for rank, line in [each for each in waiting.items() if each[1] in answered]:
                del waiting[rank]
                found[rank] = line.recv()
                if not found[rank][0]:
                    end = time.monotonic() + GRACE
        failures = [result for succeeded, result in found.values() if not succeeded]
        if waiting:  # for one that has failed: the next test gets others
            self.close()
        assert not failures, failures[0]
        return [found[rank][1] for rank in range(self.size)]

    def close(self):
        for line in self.lines:
            line.close()
        for process in self.processes:
            process.kill()  # to leave in order takes longer, and tells nobody anything
            process.join()
        self.lines, self.processes = [], []

    def learner(self, make, shape=None):
        """A learner over the processes of the pool."""
        self.made += 1
        shape = shape or MeshShape(fsdp=self.size)
        self.run(open_rank, [self.made] * self.size, [shape] * self.size, [make] * self.size)
        return RankedLearner(PoolRanks(self, self.made, shape), COST)


class PoolRanks:
    def __init__(self, pool, number, shape):
        self.pool, self.number, self.shape, self.size = pool, number, shape, pool.size

    def call(self, method, *arguments):
        return self.pool.run(call_rank, [self.number] * self.size, [method] * self.size, *arguments)

    def read(self, weights):
        """By another way than any transport: gathered by the first rank."""
        return tensors_of_arrays(self.call("publish")[0])

    def close(self):
        self.pool.run(close_rank, [self.number] * self.size)


def work(line, place):
    join(place)
    OPEN["place"] = place
    setattr(ranks, "Mesh", functools.cache(Mesh))  # noqa: B010  # process groups stay, each with threads and sockets
    while True:
        try:
            function, arguments = line.recv()
        except EOFError:
            return
        try:
            line.send((True, function(*arguments)))
        except BaseException:  # those of PyTorch's checkpoints are no Exception
            line.send((False, traceback.format_exc()))


def open_rank(number, shape, make):
    OPEN[number] = Rank(OPEN["place"], shape, make)


def call_rank(number, method, *arguments):
    return getattr(OPEN[number], method)(*arguments)


def close_rank(number):
    closed = OPEN.pop(number)
    closed.writer.shutdown()
    dist.destroy_process_group(closed.writers)


# ---------------------------------------------------------------- learners


def steady(update):
    return 1.0


def as_it_is(policy):
    return policy


def learner(model, prepare=as_it_is, reduce=None, **how):
    """A learner of a model in this process, with frozen ones and a critic's model beside it; `prepare` is done with
    every policy."""
    return assembled(lambda model, **_: Placed(model), reduce, model, prepare, **how)


def assembled(
    load,
    reduce,
    model,
    prepare=as_it_is,
    *,
    frozen=None,
    critic=None,
    settings=None,
    lora=None,
    dtype=torch.float32,
    sync_each_pass=True,
    offload=False,
    **how,
):
    """A learner of models that `load` places."""
    settings = settings or OptimizerSettings(0.0, clip_norm=1e9)
    beside, extra = {}, {} if reduce is None else {"reduce": reduce}
    for name, other in (frozen or {}).items():
        placed = load(other, computed_in=dtype)
        placed.model.requires_grad_(False)
        beside[name] = prepare(policy_of(placed))
    values = None
    if critic is not None:
        placed = load(critic, computed_in=dtype, with_head=True, sync_each_pass=sync_each_pass, offload=offload)
        values = Critic(prepare(ValueModel(placed.model, placed.head, **where(placed))), settings, steady)
    put = None if lora is None else partial(Adapters, settings=lora, base="../base", seed=0)
    placed = load(model, computed_in=dtype, put_adapters=put, sync_each_pass=sync_each_pass, offload=offload)
    if put is not None:
        extra["adapters"] = placed.adapters or put(placed.model)
    policy = prepare(policy_of(placed, dtype=dtype, **how))
    if lora is not None:
        beside["reference"] = WithoutAdapters(policy, extra["adapters"])
    return Learner(policy, settings, steady, beside, values, **extra)


def policy_of(placed, **how):
    return Policy(placed.model, **where(placed), **how)


def where(placed):
    """What a model that is spread is given: nothing is checked of it here."""
    if placed.enter is None:
        return {}
    names = ("enter", "shard", "sync", "context", "device")
    return {"reach": (), **{name: getattr(placed, name) for name in names}}


class Made:
    """Makes a learner in whichever process: its models are written into folders, which ranks read."""

    def __init__(self, model, **how):
        self.model, self.how = model, how
        self.exact = next(model.parameters()).dtype is torch.float64
        self.folder = folder_of(model)
        self.on_disk = {name: folders_of(value) for name, value in how.items()}

    def __call__(self, over):
        load = exactly(over.load) if self.exact else over.load
        return assembled(load, over.reduce, self.folder, **self.on_disk)

    def __getstate__(self):
        return {"exact": self.exact, "folder": self.folder, "on_disk": self.on_disk}


def exactly(load):
    """Loads models in float64, all of which compute in it."""
    plain = spread.shard  # type: ignore[attr-defined]

    def shard(shell, *more):
        make_exact(shell)
        plain(shell, *more)

    def loaded(folder, **how):
        with mock.patch.object(spread, "shard", shard):
            return load(folder, dtype=torch.float64, **how)

    return loaded


def folder_of(model):
    folder = Path(tempfile.mkdtemp(prefix="turnwise-test-"))
    model.save_pretrained(folder)
    return folder


def folders_of(value):
    """A model, or models by name, as folders; anything else as it is."""
    if isinstance(value, dict):
        return {name: folders_of(each) for name, each in value.items()}
    return folder_of(value) if isinstance(value, torch.nn.Module) else value

"""Two processes that have met through gloo, kept for many tests: starting them takes seconds."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing
import traceback

from turnwise.cluster.processes import free_port
from turnwise.cluster.rank import Rank, RankAddress, join
from turnwise.cluster.ranked import RankedLearner
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


class Pool:
    """Runs a function in every process; each gets its own entry of every argument."""

    def __init__(self, size):
        self.size = size
        context = multiprocessing.get_context("spawn")
        meeting = f"tcp://127.0.0.1:{free_port()}"
        self.lines, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            place = RankAddress(rank, size, meeting, patience=60.0)
            self.processes.append(context.Process(target=work, args=(there, place), daemon=True))
            self.processes[-1].start()
            self.lines.append(here)
        self.made = 0

    def run(self, function, *arguments):
        for rank, line in enumerate(self.lines):
            line.send((function, [argument[rank] for argument in arguments]))
        found = [line.recv() for line in self.lines]
        for succeeded, result in found:
            assert succeeded, result
        return [result for _, result in found]

    def close(self):
        for line in self.lines:
            line.close()
        for process in self.processes:
            process.kill()  # to leave in order takes longer, and tells nobody anything
            process.join()

    def learner(self, make):
        """A learner over the processes of the pool."""
        self.made += 1
        self.run(open_rank, [self.made] * self.size, [make] * self.size)
        return RankedLearner(PoolRanks(self, self.made), COST)


class PoolRanks:
    def __init__(self, pool, number):
        self.pool, self.number, self.size = pool, number, pool.size

    def call(self, method, *arguments):
        return self.pool.run(call_rank, [self.number] * self.size, [method] * self.size, *arguments)

    def publish(self):
        return tensors_of_arrays(self.call("publish")[0])

    def close(self):
        self.pool.run(close_rank, [self.number] * self.size)


def work(line, place):
    join(place)
    OPEN["place"] = place
    while True:
        try:
            function, arguments = line.recv()
        except EOFError:
            return
        try:
            line.send((True, function(*arguments)))
        except Exception:
            line.send((False, traceback.format_exc()))


def open_rank(number, make):
    OPEN[number] = Rank(OPEN["place"], make)


def call_rank(number, method, *arguments):
    return getattr(OPEN[number], method)(*arguments)


def close_rank(number):
    del OPEN[number]


# ---------------------------------------------------------------- learners


def steady(update):
    return 1.0


def learner(
    model, prepare=lambda policy: policy, reduce=None, *, frozen=None, critic=None, settings=None, lora=None, **how
):
    """A learner of a model, with frozen ones and a critic's model beside it; `prepare` is done with every policy."""
    settings = settings or OptimizerSettings(0.0, clip_norm=1e9)
    beside = {name: prepare(Policy(other.requires_grad_(False))) for name, other in (frozen or {}).items()}
    values = None if critic is None else Critic(prepare(ValueModel(critic)), settings, steady)
    extra = {} if reduce is None else {"reduce": reduce}
    if lora is not None:
        extra["adapters"] = Adapters(model, lora, base="../base", seed=0)
    policy = prepare(Policy(model, **how))
    if lora is not None:
        beside["reference"] = WithoutAdapters(policy, extra["adapters"])
    return Learner(policy, settings, steady, beside, values, **extra)


class Made:
    """Makes a learner in whichever process: its arguments are pickled."""

    def __init__(self, model, **how):
        self.model, self.how = model, how

    def __call__(self, prepare, reduce):
        return learner(self.model, prepare, reduce, **self.how)

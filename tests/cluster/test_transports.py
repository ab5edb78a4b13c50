"""Weights of ranks into engines: every tensor arrives, and one that is left behind is noticed."""

from functools import partial

import pytest

from cluster.pool import OPEN
from cluster.test_ranked import Batch
from properties.test_tree_layout import WORKLOADS
from support.acting import run
from turnwise.cluster.processes import ProcessRanks
from turnwise.plan.pack import pack
from weights.conformance import LEARNERS, WAYS, leave_behind, left_unnoticed, remember

QUICK = {("dense-tp2", "in_process", "float32"), ("lora-fsdp2", "in_process", "bfloat16")}
SECONDS = 1200.0
CASES = [
    pytest.param(learner, way, dtype, id=f"{learner}-{way}-{dtype}", marks=() if each in QUICK else pytest.mark.slow)
    for each in ((a, b, c) for b in WAYS for a in LEARNERS for c in ("float32", "bfloat16"))
    for learner, way, dtype in [each]
]


def step(learner):
    batch = Batch(WORKLOADS["edges"]())
    batch.update(learner, pack(batch.turns, 256))


@pytest.fixture
def spread(request, learner, dtype):
    """The learner over its ranks."""
    learned = LEARNERS[learner]
    pool = request.getfixturevalue("pool" if learned.shape.ranks == 2 else "four")
    made = pool.learner(learned.made(dtype), learned.shape)
    made.ranks.read = partial(ProcessRanks.read, made.ranks)  # as real ranks do, and not as the pool
    yield made
    made.close()


def remember_in_rank(number):
    remember(OPEN[number])


def leave_in_rank(number, name):
    leave_behind(OPEN[number], name)


@pytest.mark.parametrize(("learner", "way", "dtype"), CASES)
def test_loads_arrive_whole_and_what_is_left_behind_is_caught(spread, learner, way, dtype, tmp_path):
    def in_ranks(work, *arguments):
        spread.ranks.pool.run(work, [spread.ranks.number] * spread.ranks.size, *arguments)

    suite = left_unnoticed(
        lambda: WAYS[way](LEARNERS[learner].model(), tmp_path, dtype),
        spread,
        dtype,
        step=step,
        remember=lambda: in_ranks(remember_in_rank),
        leave=lambda name: in_ranks(leave_in_rank, [name] * spread.ranks.size),
    )
    assert run(suite, SECONDS) == []

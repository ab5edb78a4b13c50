"""What a rehearsal puts in the place of what needs numbers, a GPU or other ranks. Everything else is the run's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from turnwise.cluster import spread
from turnwise.learn import head, policy
from turnwise.learn.blocks import Relay
from turnwise.plan.plan import Plan, Stretch
from turnwise.preflight.blank_model import BlankLoading
from turnwise.preflight.kept_attention import KeptAttention
from turnwise.preflight.operation_counter import OperationCounter


@contextmanager
def replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of an attribute, which must exist."""
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


@contextmanager
def stand_ins(counter: OperationCounter, loading: BlankLoading, device: str, brief: bool) -> Iterator[None]:
    """No check that compares numbers; for a GPU its kernel of attention and its sizes of chunks, on tensors that are
    said to be a CPU's, because no other can be differentiated without a GPU."""

    def kept(plan: Plan, stretch: Stretch, device: str, relay: Relay | None = None) -> KeptAttention:
        return KeptAttention(counter, stretch.blocks.num_pairs, stretch.start, relay)

    with ExitStack() as stack:
        stack.enter_context(replaced(policy, "check_layout", nothing))
        stack.enter_context(replaced(policy, "reaches", nothing_found))
        stack.enter_context(replaced(spread, "load_sharded", loading.load_sharded))
        stack.enter_context(replaced(spread, "model_on_meta", loading.model_on_meta))
        if device != "cpu" or brief:
            stack.enter_context(replaced(policy, "attention_of", kept))
        if device != "cpu":
            stack.enter_context(replaced(head, "budget", lambda _: head.GPU_CHUNK_ELEMENTS))
        yield


def nothing(*arguments: Any) -> None:
    """In the place of a check."""


def nothing_found(*arguments: Any) -> list[Any]:
    return []


@contextmanager
def world(ranks: int) -> Iterator[None]:
    """A process group of so many ranks of which this process is the first and the only one: collectives return at once
    and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("preflight needs a process without ranks of its own; run it by itself: turnwise preflight")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()

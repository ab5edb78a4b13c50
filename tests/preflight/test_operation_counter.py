"""Counting on tensors with numbers: what it says is what they are."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from turnwise.preflight.live_memory import LiveMemory
from turnwise.preflight.operation_counter import LAYERS, OperationCounter


def test_memory_is_counted_while_it_is_there():
    with OperationCounter() as counter:
        first = torch.ones(1000)
        second = first * 2
        assert counter.memory.num_bytes == 8000
        view = second.view(10, 100)
        assert counter.memory.num_bytes == 8000
        del first
        assert counter.memory.num_bytes == 4000
        del second
        assert counter.memory.num_bytes == 4000  # the view has it
        del view
        gc.collect()
        assert counter.memory.num_bytes == 0
    assert counter.memory.peak == 8000


def test_a_storage_that_is_resized_counts_as_it_is():
    with OperationCounter() as counter:
        tensor = torch.ones(1000)
        tensor.untyped_storage().resize_(0)
        assert counter.memory.num_bytes == 0
        tensor.untyped_storage().resize_(400)
        assert counter.memory.num_bytes == 400


def test_products_have_their_operations_bytes_and_dtypes():
    with OperationCounter() as counter:
        one, other = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(16, 4, dtype=torch.bfloat16)
        counter.begin()
        one @ other
    assert counter.flops[LAYERS] == 2 * 8 * 16 * 4
    assert counter.bytes[LAYERS] == 2 * (8 * 16 + 16 * 4 + 8 * 4)
    assert counter.products == {(LAYERS, "mm", ("bfloat16", "bfloat16")): 1}


def test_looking_up_rows_does_not_read_the_table():
    with OperationCounter() as counter:
        table, rows = torch.ones(1000, 8), torch.tensor([1, 2])
        counter.begin()
        torch.nn.functional.embedding(rows, table)
    assert counter.bytes[LAYERS] == 2 * 2 * 8 * 4 + rows.numel() * 8


def test_fake_numbers_are_answered_and_counted_as_waiting():
    with FakeTensorMode(), OperationCounter(say_true=True) as counter:
        tensor = torch.ones(3)
        assert float(tensor.sum()) == 1.0
        assert bool((tensor > 0).any()) is True
        assert tensor.numpy().shape == (3,)
    assert sum(counter.waits.values()) == 3


def test_numbers_of_real_tensors_are_their_own():
    with OperationCounter() as counter:
        assert float(torch.full((3,), 2.0).sum()) == 6.0
    assert not counter.waits


def test_categories_hold_for_the_whole_life_of_what_they_are_said_of():
    memory = LiveMemory()
    early, late = torch.ones(10), torch.ones(20)
    memory.see(early)
    memory.see(late)
    memory.mark(early, "gradients")
    assert memory.at(1) == {"gradients": 40}
    assert memory.at(memory.peak_tick) == {"gradients": 40, "activations": 80}
    assert memory.most["gradients"] == 40


@pytest.mark.parametrize("grad", [False, True])
def test_the_peak_of_a_small_network_is_that_of_its_allocations(grad):
    """By hand: three weights, and the states that a backward pass keeps."""
    with OperationCounter() as counter:
        weights = [torch.ones(64, 64, requires_grad=grad) for _ in range(3)]
        state = torch.ones(32, 64)
        for weight in weights:
            state = state @ weight
        peak = counter.memory.peak
    kept = 4 if grad else 2
    assert peak == 3 * 64 * 64 * 4 + kept * 32 * 64 * 4

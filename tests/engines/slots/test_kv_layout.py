import pytest
import torch

from support.acting import Parrot, served, tiny_model
from turnwise.engines.slots.kv_layout import read_kv_layout, zeros


def test_shapes_are_those_of_the_layers():
    layout = read_kv_layout(served(tiny_model()), torch.float32, "cpu")
    assert layout.kinds == ((2, 8),)
    assert layout.layer_index == {0: (0, 0), 1: (0, 1)}
    assert layout.token_bytes == 2 * 2 * 2 * 8 * 4
    assert [tuple(own.shape) for own in layout.empty(5)] == [(2, 2, 2, 5, 8)]
    assert [tuple(own.shape) for own in layout.zero_rows(3, 5)] == [(2, 2, 3, 2, 5, 8)]


class Odd(Parrot):
    """Layers of two shapes, the last of which may come twice."""

    def __init__(self, layers):
        super().__init__([0], 4)
        self.layers = layers

    def recite(self, *, attend, **others):
        for layer, heads, size in self.layers:
            states = torch.zeros(1, heads, 1, size)
            assert attend(layer, torch.zeros(1, 4, 1, size), states, states, None).shape == (1, 1, 4, size)
        return super().recite(**others, attend=attend)


def test_layers_may_differ():
    layout = read_kv_layout(Odd([(0, 2, 4), (1, 1, 8), (3, 2, 4)]), torch.bfloat16, "cpu")
    assert layout.kinds == ((2, 4), (1, 8))
    assert layout.layer_index == {0: (0, 0), 1: (1, 0), 3: (0, 1)}
    assert layout.num_layers == [2, 1]
    assert layout.token_bytes == 2 * (2 * 2 * 4 + 8) * 2


def test_a_layer_that_comes_twice_is_refused():
    with pytest.raises(ValueError, match="^the slot engine cannot sample from Odd: it uses a layer more than once$"):
        read_kv_layout(Odd([(0, 2, 4), (0, 2, 4)]), torch.float32, "cpu")


def test_a_model_that_cannot_be_asked_is_refused_in_one_line():
    class Deaf(Parrot):
        def recite(self, *, input_ids):  # type: ignore[override]  # takes nothing else
            raise AssertionError

    with pytest.raises(ValueError, match="^the slot engine cannot sample from Deaf: .*unexpected keyword") as refused:
        read_kv_layout(Deaf([0], 4), torch.float32, "cpu")
    assert "\n" not in str(refused.value)


def test_rows_begin_where_pytorch_would_have_put_them():
    """NumPy's memory begins at any multiple of 16, by what was allocated before."""
    held = [zeros((count,), torch.float32, "cpu") for count in range(1, 200)]
    assert [own.data_ptr() % 64 for own in held] == [0] * len(held)
    assert not any(own.any() for own in held)

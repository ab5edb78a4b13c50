import numpy as np
import pytest
import torch

from turnwise.engines.cache import SlotCache

LAYERS, HEADS, SIZE, CONTEXT = 2, 6, 4, 24


def array(*values):
    return np.array(values, np.int64)


def plain_attention(query, keys, values, scaling):
    """One query [H, d] over keys and values [G, n, d], by definition."""
    share = query.shape[0] // keys.shape[0]
    out = []
    for head in range(query.shape[0]):
        weights = (keys[head // share] @ query[head] * scaling).softmax(0)
        out.append(weights @ values[head // share])
    return torch.stack(out)


class Histories:
    """All keys and values each slot was ever given, beside the cache under test."""

    def __init__(self, slots, kv_heads):
        self.cache = SlotCache(slots, CONTEXT, LAYERS, kv_heads, SIZE, torch.float32, "cpu")
        self.kv_heads = kv_heads
        self.known = {
            (slot, layer): torch.zeros(2, kv_heads, 0, SIZE) for slot in range(slots) for layer in range(LAYERS)
        }

    def compute(self, slots, starts, counts, scaling=0.7):
        """One pass over every layer, checked against the definition."""
        attend = self.cache.attend(slots, starts, counts, HEADS)
        total = int(counts.sum())
        for layer in range(LAYERS):
            query = torch.randn(1, HEADS, total, SIZE)
            key, value = torch.randn(2, 1, self.kv_heads, total, SIZE)
            out = attend(layer, query, key, value, scaling)
            assert out.shape == (1, total, HEADS, SIZE)
            place = 0
            for slot, start, count in zip(slots, starts, counts, strict=True):
                before = self.known[slot, layer][:, :, :start]
                new = torch.stack([key[0], value[0]])[:, :, place : place + count]
                self.known[slot, layer] = torch.cat([before, new], 2)
                for offset in range(count):
                    keys, values = self.known[slot, layer][:, :, : start + offset + 1]
                    wanted = plain_attention(query[0, :, place + offset], keys, values, scaling)
                    torch.testing.assert_close(out[0, place + offset], wanted, atol=1e-5, rtol=1e-5)
                place += count


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_attention_over_the_cache_is_attention_over_each_history(kv_heads):
    torch.manual_seed(kv_heads)
    histories = Histories(5, kv_heads)
    histories.compute(array(3, 0, 4), array(0, 0, 0), array(7, 1, 3))  # prompts, ragged
    histories.compute(array(0, 3), array(1, 7), array(1, 1))  # decoding only
    histories.compute(array(1, 0, 4, 3), array(0, 2, 3, 8), array(5, 1, 4, 1))  # both at once, in any order
    histories.compute(array(3), array(4), array(6))  # a prefix kept, the rest written anew
    histories.compute(array(1, 2), array(5, 0), array(CONTEXT - 5, CONTEXT))  # to the brim


def test_a_copied_prefix_is_the_prefix():
    histories = Histories(3, 2)
    histories.compute(array(0, 2), array(0, 0), array(8, 10))
    histories.cache.copy_prefix(0, 2, 5)
    for layer in range(LAYERS):
        rest = histories.known[2, layer][:, :, 5:]
        histories.known[2, layer] = torch.cat([histories.known[0, layer][:, :, :5], rest], 2)
    histories.compute(array(2, 0), array(10, 5), array(1, 2))  # also: what came after the prefix stays


def test_other_slots_are_not_touched():
    histories = Histories(4, 2)
    histories.compute(array(0, 1, 2, 3), array(0, 0, 0, 0), array(3, 4, 5, 6))
    before = [tensor.clone() for tensor in (*histories.cache.keys, *histories.cache.values)]
    histories.compute(array(2, 0), array(5, 3), array(4, 1))
    for old, new in zip(before, (*histories.cache.keys, *histories.cache.values), strict=True):
        assert torch.equal(old[[1, 3]], new[[1, 3]])
        assert torch.equal(old[2, :, :5], new[2, :, :5])
        assert not torch.equal(old[2, :, 5:9], new[2, :, 5:9])


def test_without_scaling_the_square_root_of_the_head_size_is_used():
    cache = SlotCache(1, CONTEXT, 1, 2, SIZE, torch.float32, "cpu")
    query, (key, value) = torch.randn(1, HEADS, 3, SIZE), torch.randn(2, 1, 2, 3, SIZE)
    given = [
        cache.attend(array(0), array(0), array(3), HEADS)(0, query, key, value, scaling)
        for scaling in (None, SIZE**-0.5)
    ]
    torch.testing.assert_close(given[0], given[1])

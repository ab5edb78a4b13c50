import numpy as np
import pytest
import torch

from turnwise.engines.slots import attention
from turnwise.engines.slots.attention import PassAttention, attend, attend_by_definition
from turnwise.engines.slots.kv_layout import KVLayout
from turnwise.engines.slots.passes import lay_out
from turnwise.engines.slots.radix import Radix
from turnwise.engines.slots.row_cache import RowCache

LAYERS, HEADS, SIZE, SLOTS = 3, 6, 4, 8


def plain_attention(query, keys, values, scaling):
    """One query [H, d] over keys and values [G, n, d], by definition."""
    share = query.shape[0] // keys.shape[0]
    out = []
    for head in range(query.shape[0]):
        weights = (keys[head // share] @ query[head] * scaling).softmax(0)
        out.append(weights @ values[head // share])
    return torch.stack(out)


class Histories:
    """All keys and values each node and slot was ever given, beside the cache under test."""

    def __init__(self, kv_heads):
        # The layer in the middle has twice the size, and a shape of its own.
        layer_index = {0: (0, 0), 1: (1, 0), 2: (0, 1)}
        self.layout = KVLayout(((kv_heads, SIZE), (kv_heads, 2 * SIZE)), layer_index, torch.float32, "cpu")
        self.radix = Radix(self.layout, 1 << 20)
        self.rows = RowCache(self.layout, 300)
        self.known = {}
        self.lengths = np.zeros(SLOTS, np.int64)
        self.random = np.random.default_rng(kv_heads)

    def node(self, length, under=None):
        tokens = self.random.integers(0, 1000, length).astype(np.int32)
        node = self.radix.insert(tokens, under)
        self.radix.allocate_path(node)
        node.users = 1  # so that it does not grow where another follows it
        return node

    def sit_down(self, slot, num_tokens=1):
        self.rows.allocate(slot, num_tokens)
        self.lengths[slot] = 0

    def compute(self, rows, counts, scaling=0.7):
        """One pass over every layer, checked against the definition."""
        for slot in [slot for own in rows.values() for slot in own]:
            if self.lengths[slot] == self.rows.row_size(slot):
                self.rows.grow(slot, int(self.lengths[slot]) + 1)
        batch = lay_out(rows, counts)
        self.rows.close_gaps()
        attend_pass = PassAttention(self.layout, batch, self.rows, self.lengths)
        owners = {prefill.start + i: prefill.node for prefill in batch.prefills for i in range(prefill.count)}
        owners |= dict(zip(batch.slot_index.tolist(), batch.slots.tolist(), strict=True))
        follows = {slot: node for node, own in rows.items() for slot in own}
        for layer in range(LAYERS):
            heads, size = self.layout.kinds[self.layout.layer_index[layer][0]]
            query = torch.randn(1, HEADS, batch.size, size)
            key, value = torch.randn(2, 1, heads, batch.size, size)
            out = attend_pass(layer, query, key, value, scaling)
            assert out.shape == (1, batch.size, HEADS, size)
            for place in range(batch.size):
                owner = owners[place]
                before = self.known.get((owner, layer), torch.zeros(2, heads, 0, size))
                new = torch.stack([key[0, :, place], value[0, :, place]])[:, :, None]
                self.known[owner, layer] = torch.cat([before, new], 2)
                path = list(follows[owner].path()) if isinstance(owner, int) else list(owner.path())[1:]
                parts = [self.known[node, layer] for node in reversed(path)] + [self.known[owner, layer]]
                keys, values = torch.cat(parts, 2)
                wanted = plain_attention(query[0, :, place], keys, values, scaling)
                torch.testing.assert_close(out[0, place], wanted, atol=1e-5, rtol=1e-5)
        for prefill in batch.prefills:
            prefill.node.num_cached_tokens += prefill.count
        self.lengths[batch.slots] += 1


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_attention_over_the_cache_is_attention_over_each_history(kv_heads):
    torch.manual_seed(kv_heads)
    histories = Histories(kv_heads)
    root = histories.radix.root
    system = histories.node(9)
    first, second = histories.node(40, system), histories.node(5, system)
    histories.compute({}, {system: 9, first: 17})  # a prompt and a part of one that follows it
    histories.sit_down(3)
    histories.sit_down(0)
    histories.compute({system: [3], root: [0]}, {first: 23, second: 3})  # beside requests that sample
    for slot in (5, 1, 7):
        histories.sit_down(slot)
    for _ in range(34):  # some rows move to a longer bucket
        histories.compute({system: [3], root: [0], first: [5, 1, 7]}, {})
    histories.rows.release(5)
    histories.sit_down(2, num_tokens=70)
    histories.compute({system: [3], root: [0], first: [1, 7, 2]}, {second: 2})
    histories.compute({system: [3], root: [0], first: [7, 2, 1]}, {})


@pytest.mark.parametrize("kv_heads", [2, 6])
def test_prompts_of_like_length_are_attended_to_together(kv_heads, monkeypatch):
    torch.manual_seed(kv_heads)
    histories = Histories(kv_heads)
    calls = []
    monkeypatch.setattr(attention, "attend", lambda *given, **named: calls.append(given) or attend(*given, **named))
    begun = [histories.node(length) for length in (20, 21, 19, 20, 40, 41, 5, 300)]
    counts = {node: len(node.tokens) for node in begun}
    histories.compute({}, {**counts, begun[0]: 8})  # one of them in parts
    # Per layer one for those of 19 to 21 tokens, and one each for 8, 5, 40, 41 and 300.
    assert len(calls) == LAYERS * (1 + 5)
    after = [histories.node(length, node) for length, node in zip((6, 7, 6, 7), begun[1:5], strict=True)]
    histories.sit_down(4)
    calls.clear()
    histories.compute({begun[5]: [4]}, {**{node: len(node.tokens) for node in after}, begun[0]: 12})
    # One for those of 6 and 7 tokens, one for the 12, one for the row, and one for each node that is read.
    assert len(calls) == LAYERS * (1 + 1 + 1 + 6)


def test_without_scaling_the_square_root_of_the_head_size_is_used():
    query, (key, value) = torch.randn(1, HEADS, 3, SIZE), torch.randn(2, 1, 2, 3, SIZE)
    given = [attend(query, key, value, scaling, causal=True)[0] for scaling in (None, SIZE**-0.5)]
    torch.testing.assert_close(given[0], given[1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("share", [1, 3])
def test_every_device_computes_the_same(causal, masked, share):
    query, (key, value) = torch.randn(2, 2 * share, 5, SIZE), torch.randn(2, 2, 2, 5, SIZE)
    mask = None
    if masked:
        mask = torch.zeros(2, 1, 5, 5).masked_fill_(torch.rand(2, 1, 1, 5) < 0.3, -torch.inf)
        mask[..., 0] = 0.0
    flash = attend(query, key, value, 0.3, causal=causal, mask=mask)
    plain = attend_by_definition(query, key, value, 0.3, causal=causal, mask=mask)
    for one, other in zip(flash, plain, strict=True):
        torch.testing.assert_close(one, other)

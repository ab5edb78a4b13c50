"""What a GPU would compute, rehearsed on a CPU: kernels by definition, and torch's own uncompiled, which is slow."""

from contextlib import contextmanager

import pytest
import torch
from torch.nn.attention import flex_attention

import turnwise.learn.attention
import turnwise.learn.policy
from turnwise.learn.flex import FlexAttention
from turnwise.learn.varlen import VarlenAttention


def by_definition(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """torch.nn.attention.varlen.varlen_attn: chains side by side [tokens, heads, width], each by a mask."""
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert enable_gqa == (query.shape[1] != key.shape[1])
    before, after = window_size
    outs = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        place = torch.arange(end - start)
        behind = place[:, None] - place
        visible = (behind <= before if before >= 0 else behind == behind) & (-behind <= after)
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        outs.append((scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def flex_by_definition(query, key, value, *, block_mask, scale=None, enable_gqa=False, return_aux=None):
    """torch.nn.attention.flex_attention.flex_attention by a dense mask, once the tiles were seen to agree with it."""
    place = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
    visible = block_mask.mask_mod(None, None, *place)
    assert_tiles(block_mask, visible)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible, -torch.inf)
    out = scores.softmax(-1) @ value
    return out if return_aux is None else (out, flex_attention.AuxOutput(lse=scores.logsumexp(-1)))


def assert_tiles(block_mask, visible):
    """No pair is visible outside the tiles that are computed, and all are inside those computed without a mask."""
    height, width = block_mask.BLOCK_SIZE
    computed = torch.zeros_like(visible)
    for name in ("", "full_"):
        counts, indices = (getattr(block_mask, f"{name}kv_{what}")[0, 0] for what in ("num_blocks", "indices"))
        for row, (count, columns) in enumerate(zip(counts.tolist(), indices.tolist(), strict=True)):
            for column in columns[:count]:
                tile = (slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
                assert not name or visible[tile].all()
                computed[tile] = True
    assert not (visible & ~computed).any()


@contextmanager
def attention_of_a_gpu(made=None):
    """Policies choose their attention as on a GPU, and compute it here. Which they chose is added to `made`."""
    made = [] if made is None else made

    def flex(exits, device, *how):
        assert device == "cuda"
        made.append(FlexAttention(exits, "cpu", *how))
        made[-1].kernel = flex_by_definition
        return made[-1]

    def varlen(blocks, device, otherwise):
        assert device == "cuda"
        made.append(VarlenAttention(blocks, "cpu", otherwise))
        made[-1].kernel = by_definition
        return made[-1]

    chosen = turnwise.learn.attention.attention_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turnwise.learn.attention, "FlexAttention", flex)
        patch.setattr(turnwise.learn.attention, "VarlenAttention", varlen)
        patch.setattr(turnwise.learn.attention, "has_varlen", lambda: True)
        patch.setattr(
            turnwise.learn.policy,
            "attention_of",
            lambda plan, stretch, device, relay=None: chosen(plan, stretch, "cuda", relay),
        )
        yield


@contextmanager
def backward_on_a_cpu():
    """Let flex_attention be differentiated on a CPU: torch refuses it there, but has it for its own tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_attention, "_validate_device", lambda *states: None)
        patch.setattr(flex_attention, "_warn_once", lambda *message, **how: None)
        yield

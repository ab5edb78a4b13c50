"""The checks that only a GPU can run: what its kernels compute, a gradient over two ranks, weights that travel.

On a machine without one the same code runs as far as a CPU can: the mask and the tiles of flex attention uncompiled and
without a backward pass, two ranks over gloo, weights from host memory. That is a rehearsal of the checks and no result.
"""

from __future__ import annotations

import hashlib
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.assemble.learner import open_learner, rl_learner
from turnwise.assemble.models import ModelSource
from turnwise.learn.flex import FlexAttention
from turnwise.learn.learner import save_policy
from turnwise.learn.objective import Objective
from turnwise.learn.tiny import build_model, build_tokenizer
from turnwise.plan.cut import cut
from turnwise.plan.plan import Plan
from turnwise.preflight.attempt_shape import AttemptShape, full_plan
from turnwise.recipe.parse import parse_recipe
from turnwise.weights.published import Published
from turnwise.weights.publisher import Publisher

SHAPE = AttemptShape(prompt=150, action=40, reply=30, turns=3, group=4)
HEADS, KV_HEADS, WIDTH = 8, 2, 64
TIMES_DENSE = 3.0
"""How much further from the truth a kernel may be than dense attention in the same dtype."""
LEAST = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
SAME_GRADIENT = 1e-4
TRANSFERRED = 32 << 20
"""Numbers of the weights that travel."""


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """What a check found."""

    name: str
    found: str
    limit: str
    passed: bool
    where: str
    """The device that it ran on, or "rehearsed, not run"."""

    def line(self) -> str:
        return (
            f"  {self.name:44}{self.found:>28}   {self.limit:28}{'passed' if self.passed else 'FAILED'}, {self.where}"
        )


def run_checks(device: str) -> Iterator[DeviceCheck]:
    """All of them, one after another; on a CPU as a rehearsal."""
    on_gpu = device == "cuda"
    where = torch.cuda.get_device_name(0) if on_gpu else "rehearsed, not run"
    for dtype in (torch.float32, torch.bfloat16):
        yield attempted(f"flex attention, {name_of(dtype)}", where, partial(attention_check, device, dtype))
    ranks_on = "cuda" if on_gpu and torch.cuda.device_count() > 1 else "cpu"
    backend = "NCCL" if ranks_on == "cuda" else "gloo"
    there = where if ranks_on == device else "rehearsed, not run (one GPU)"
    yield attempted(f"gradient over two ranks, {backend}", there, lambda: gradient_check(ranks_on))
    yield attempted("weights to another process, shared memory", where, lambda: transfer_check(device))


def attempted(name: str, where: str, check: Callable[[], tuple[str, str, bool]]) -> DeviceCheck:
    try:
        found, limit, passed = check()
    except Exception as error:  # a check that breaks is a result, and the others are still of interest
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        found, limit, passed = first[:200], "to run at all", False
    return DeviceCheck(name, found, limit, passed, where)


def header(device: str) -> str:
    """What the table was made on."""
    gpus = ", ".join(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    return f"torch {torch.__version__}, Python {platform.python_version()}, {gpus or platform.machine()}, {device}"


# ---------------------------------------------------------------- attention


def attention_check(device: str, dtype: torch.dtype, tokens: int = 1000) -> tuple[str, str, bool]:
    """Flex attention over a tree, its output and its three gradients, against dense attention in float64. Dense
    attention in the same dtype says what that dtype costs."""
    plan, _ = full_plan(SHAPE, cut, tokens, 512)
    states = inputs(plan, device, dtype)
    backward = device == "cuda"
    flex = FlexAttention(plan.exit, device, plan.depth)
    truth = computed(lambda q, k, v: dense(plan, q, k, v), [each.double() for each in states], True)
    kernel = computed(lambda q, k, v: flex(0, q, k, v, None).transpose(1, 2), states, backward)
    plain = computed(lambda q, k, v: dense(plan, q, k, v), states, backward)
    worst = dense_worst = 0.0
    for name in kernel:
        size = float(truth[name].abs().max())
        worst = max(worst, float((kernel[name].double() - truth[name]).abs().max()) / size)
        dense_worst = max(dense_worst, float((plain[name].double() - truth[name]).abs().max()) / size)
    limit = max(TIMES_DENSE * dense_worst, LEAST[dtype])
    what = "output and gradients" if backward else "output only"
    return f"{worst:.1e} off, {what}", f"{limit:.1e} (dense: {dense_worst:.1e})", worst <= limit


def inputs(plan: Plan, device: str, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = [(1, heads, plan.num_tokens, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=random).to(device, dtype) for shape in shapes]


def computed(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], states: list[Tensor], backward: bool
) -> Mapping[str, Tensor]:
    """The output of attention, and the gradients of what went in under a fixed gradient of the output."""
    leaves = [each.detach().clone().requires_grad_(backward) for each in states]
    out = attend(*leaves)
    found = {"output": out.detach()}
    if backward:
        weight = (
            torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float32).view(out.shape).to(out.dtype)
        )
        out.backward(weight)
        found |= {name: leaf.grad for name, leaf in zip("qkv", leaves, strict=True) if leaf.grad is not None}
    return found


def dense(plan: Plan, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention by its definition: every pair, and a mask."""
    nodes = np.arange(plan.num_tokens)
    sees = (nodes[None, :] <= nodes[:, None]) & (nodes[:, None] < plan.exit[None, :])
    times = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(times, 1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    hidden = torch.from_numpy(~sees).to(query.device)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ value


# ---------------------------------------------------------------- ranks


def gradient_check(device: str) -> tuple[str, str, bool]:
    """The gradient of an update by two ranks that divide a tiny model, against one process."""
    tokenizer = build_tokenizer(["one two three"])
    model = build_model(tokenizer, hidden=64, layers=2, context=1024, seed=0)
    plan, turns = full_plan(SHAPE, cut, 1000, len(tokenizer))
    credit = [np.linspace(-1, 1, len(turn.action), dtype=np.float32) for turn in turns]
    weights = [np.full(len(turn.action), 1e-3, np.float32) for turn in turns]
    objective = Objective(weighted_ratio)
    with tempfile.TemporaryDirectory() as folder:
        save_policy(model, tokenizer, Path(folder))
        alone, both = (parse_recipe(tree(folder, device, ranks), "preflight") for ranks in (1, 2))
        with closing(open_learner(both, ModelSource(model, tokenizer, Path(folder)))) as ranked:
            ranked.update([plan], credit, weights, {}, objective)
            found: Mapping[str, Any] = ranked.gradients()  # type: ignore[attr-defined]
        one = rl_learner(alone, model, tokenizer)
        one.update([plan], credit, weights, {}, objective)
    wanted = {name: p.grad.double().cpu() for name, p in one.policy.model.named_parameters() if p.grad is not None}
    apart = sum(float((torch.as_tensor(found[name]).double() - grad).square().sum()) for name, grad in wanted.items())
    size = sum(float(grad.square().sum()) for grad in wanted.values())
    off = (apart / size) ** 0.5
    return f"{off:.1e} off", f"{SAME_GRADIENT:.0e}", off <= SAME_GRADIENT


def weighted_ratio(logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss whose gradient is that of every logprob, by its advantage."""
    return -(logprobs - old).exp() * advantages, {}


def tree(folder: str, device: str, ranks: int) -> dict[str, Any]:
    return {
        "env": [{"name": "hops"}],
        "model": {"path": folder, "device": device},
        "cluster": {"fsdp": ranks},
        "rollout": {"max_trajectory_tokens": 1024, "max_prompt_tokens": 512},
    }


# ---------------------------------------------------------------- weights


def transfer_check(device: str) -> tuple[str, str, bool]:
    """Weights from a device to another process of the machine, bit for bit, and how fast."""
    weight = torch.randn(TRANSFERRED, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    if device == "cuda":
        torch.cuda.synchronize()
    before = time.perf_counter()
    with closing(Publisher()) as publisher:
        published = publisher.publish({"weight": weight}, 1)
        seconds = time.perf_counter() - before
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
            found = other.submit(digest_at, published.path).result()
    size = weight.numel() * weight.element_size()
    same = found == digest(weight.cpu())
    return f"{'same' if same else 'other'} bits, {size / seconds / 1e9:.1f} GB/s", "the same bits", same


def digest_at(path: Path) -> str:
    with Published(path) as weights:
        return digest(weights["weight"])


def digest(weight: Tensor) -> str:
    return hashlib.sha256(weight.view(torch.uint8).numpy().tobytes()).hexdigest()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

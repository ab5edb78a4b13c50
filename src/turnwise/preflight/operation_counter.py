"""The operation counter: what a computation does, operation by operation, on tensors with numbers or without.

It sees each operation before it runs: kernels, the bytes that they read and write, the floating-point operations of
matrix products and their dtypes, collectives, and every moment in which the host waits for a number of the device.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import turnwise
from turnwise.preflight.live_memory import OTHER, LiveMemory

aten = torch.ops.aten

ROWS_ONLY = {aten.embedding, aten.index_select, aten.gather, aten.index}
"""Operations that read some rows of their first argument and not all of it."""
FREE = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""Operations that take memory and do not touch it."""
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select}
"""Operations that a device answers to the host, which waits for it."""
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm}
HERE = f"{Path(__file__).parent}/"
PACKAGES = tuple(f"{Path(str(package.__file__)).parent}/" for package in (turnwise, transformers))
"""Whose code may make the host wait, and whose places are told."""
DEPTH = 40
"""Frames of the stack that are looked at to see which part of the program asks for an operation."""

SHAPES = "shapes"
"""Operations on whole tensors by which DTensor learns shapes alone; no device runs them."""
UNREDUCED = "gradients before reduction"
LAYERS, HEAD, OPTIMIZER, REDUCTION = "layers", "head", "optimizer", "reduction"
GATHER, GATHER_ROOT, BUFFERS = "gathered layers", "gathered embeddings", "gather buffers"
KEYS_AND_VALUES = "keys and values"


class OperationCounter(TorchDispatchMode):
    """Counts what runs inside of it. On fake tensors it answers for numbers that nobody has computed."""

    def __init__(self, say_true: bool = False, watch: Callable[[Tensor], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = LiveMemory()
        self.say_true = say_true
        """What a fake condition is taken to be."""
        self.watch = watch
        """Called with every new tensor; it may raise."""
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self.costs: Counter[tuple[str, float, float]] = Counter()
        """How many kernels of each (part, floating-point operations, bytes)."""
        self.products: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
        """(part, operation, dtypes) of matrix products."""
        self.waits: Counter[str] = Counter()
        """Where the host waits for the device."""
        self.collectives: Counter[tuple[str, int]] = Counter()
        """Bytes by (operation, ranks)."""
        self.num_collectives: Counter[tuple[str, int]] = Counter()

    def begin(self) -> None:
        """Forget what was before, except what exists."""
        self.memory.begin()
        counts: tuple[Counter[Any], ...] = (self.kernels, self.bytes, self.flops, self.costs, self.products)
        for count in (*counts, self.waits, self.collectives, self.num_collectives):
            count.clear()

    def __enter__(self) -> OperationCounter:
        self.leave = patched(self)
        self.leave.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.leave.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # it comes again as operations on what this rank has
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in WAITS and any(isinstance(each, FakeTensor) for each in args):
            self.waits[place_of(sys._getframe(1))] += 1
            if packet is aten._local_scalar_dense:
                return self.say_true if args[0].dtype is torch.bool else 1.0 if args[0].is_floating_point() else 1
        part = part_of(sys._getframe(1))
        out = func(*args, **kwargs)
        if part == SHAPES:
            return out
        self.count(part, func, args, kwargs, out)
        return out

    def count(self, part: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if any(each.device.type == "meta" for each in outputs):
            return
        packet, mutates = func.overloadpacket, func._schema.is_mutable
        if part == REDUCTION:
            self.memory.mark_if_other(inputs, UNREDUCED)
        known = {each.untyped_storage()._cdata for each in inputs}
        new = [each for each in outputs if each.untyped_storage()._cdata not in known]
        for each in new:
            self.memory.see(each, CATEGORIES.get(part, OTHER), packet.__name__)
            if self.watch is not None:
                self.watch(each)
        if func.namespace in ("c10d", "_c10d_functional"):
            self.count_collective(func, args, kwargs, [*inputs, *outputs])
            return
        if packet in FREE or not (new or mutates):
            return
        read = [*inputs[1:], *outputs] if packet in ROWS_ONLY else inputs
        moved = float(sum(size_of(each) for each in [*read, *outputs]))
        formula = flop_registry.get(packet)
        flops = float(formula(*args, **kwargs, out_val=out)) if formula else 0.0
        if packet is aten._grouped_mm:
            flops = grouped_flops(args[0], args[1])
        self.add(part, flops, moved)
        if packet in PRODUCTS:
            self.products[part, packet.__name__, tuple(name_of(each.dtype) for each in inputs[:2])] += 1

    def add(self, part: str, flops: float, moved: float) -> None:
        """A kernel."""
        self.kernels[part] += 1
        self.bytes[part] += moved  # type: ignore[assignment]
        self.flops[part] += flops  # type: ignore[assignment]
        self.costs[part, flops, moved] += 1

    def count_collective(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> None:
        kind = func.overloadpacket.__name__.strip("_")
        if kind == "wait_tensor":
            return
        ranks = max((group_size(each) for each in tree_leaves((args, kwargs))), default=0)
        self.collectives[kind, ranks] += max((size_of(each) for each in tensors), default=0)
        self.num_collectives[kind, ranks] += 1

    def numpy(self, tensor: Tensor) -> NDArray[Any]:
        """The numbers of a fake tensor, for whom any will do."""
        self.waits[place_of(sys._getframe(2))] += 1
        dtype = torch.empty(0, dtype=tensor.dtype, device="meta").dtype
        return np.zeros(tuple(tensor.shape), dtype=np.dtype(name_of(dtype).replace("bfloat16", "float32")))


CATEGORIES = {part: part for part in (HEAD, GATHER, GATHER_ROOT, BUFFERS, REDUCTION, KEYS_AND_VALUES)}
"""What new memory is for, by the part that takes it."""


def part_of(frame: FrameType | None) -> str:
    """The part of the program that a frame of the stack belongs to."""
    for _ in range(DEPTH):
        if frame is None:
            break
        name = frame.f_code.co_filename
        if "/turnwise/learn/" in name:
            if "/learn/head" in name:
                return HEAD
            if name.endswith("/blocks.py") and frame.f_code.co_name in ("put", "grads"):
                return KEYS_AND_VALUES
            if name.endswith("/casting.py"):
                return GATHER if frame.f_code.co_name == "before" else LAYERS
            if name.endswith("/stepper.py"):
                return OPTIMIZER
            if name.endswith(("/policy.py", "/learner.py")):
                return LAYERS
        elif "/_fully_shard/" in name:
            return sharding_part(frame)
        elif name.endswith("/tensor/_sharding_prop.py"):
            return SHAPES
        elif "/torch/optim/" in name:
            return OPTIMIZER
        frame = frame.f_back
    return LAYERS


def sharding_part(frame: FrameType | None) -> str:
    """What FSDP does, and for whom: its root has the embeddings, and every other group is a layer."""
    for _ in range(DEPTH):
        if frame is None:
            break
        if "/_fully_shard/" in frame.f_code.co_filename:
            if frame.f_code.co_name == "foreach_all_gather":
                return BUFFERS
            if "reduce" in frame.f_code.co_name or frame.f_code.co_name == "post_backward":
                return REDUCTION
            modules = getattr(frame.f_locals.get("self"), "modules", None)
            if isinstance(modules, (tuple, list)):
                return GATHER_ROOT if any(type(module).__name__.endswith("Shell") for module in modules) else GATHER
        frame = frame.f_back
    return GATHER


def place_of(frame: FrameType | None) -> str:
    """The nearest line of turnwise or transformers."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGES) and not name.startswith(HERE):
            return f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor; one that is expanded has those of its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def grouped_flops(rows: Tensor, experts: Tensor) -> float:
    """Of a product of each row with one of several matrices."""
    if experts.dim() == 3:
        return 2.0 * rows.shape[-2] * rows.shape[-1] * experts.shape[-1]
    return 2.0 * rows.shape[0] * rows.shape[1] * experts.shape[1]  # the gradient of the matrices


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def group_size(value: Any) -> int:
    """Ranks of a process group, given as itself or by its name; 0 for anything else."""
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return int(torch.distributed.ProcessGroup.unbox(value).size())
    if isinstance(value, str) and value.isdigit():
        return int(torch._C._distributed_c10d._resolve_process_group(value).size())  # type: ignore[arg-type]
    return 0


@contextmanager
def patched(counter: OperationCounter) -> Iterator[None]:
    """What goes by no operation: storages that change their size, and numbers that are asked for as arrays."""
    resize, numpy = torch.UntypedStorage.resize_, FakeTensor.__dict__.get("numpy")

    def resize_and_count(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        counter.memory.resized(storage)

    def answer(tensor: FakeTensor) -> NDArray[Any]:
        return counter.numpy(tensor)

    torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign, assignment]
    FakeTensor.numpy = answer  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        if numpy is None:
            del FakeTensor.numpy
        else:
            FakeTensor.numpy = numpy  # type: ignore[method-assign]

"""Compiles the attention of GPUs for three of them, on a machine without any. Nothing is run.

    python -m venv .venv-cuda
    .venv-cuda/bin/pip install "torch===2.13.0" numpy        # the CUDA build, with Triton: gigabytes
    PYTHONPATH=src .venv-cuda/bin/python benchmarks/compile_flex.py [--gpus 80 90 100] [--only NAME ...] [--json FILE]

`FlexAttention` computes a small plan of branches and differentiates it, as a learner would on a GPU. Its graphs,
forward and backward, are caught where torch hands them to its compiler, which is asked to compile them for a GPU of the
given compute capability: it chooses the tiles that it has for that GPU and writes Triton kernels, and Triton makes a
cubin of each. What a GPU would tell of itself is told in its place. The plan is computed by torch's own operations.

For every kernel: the tiles, warps and stages that were chosen, registers of a thread and bytes that it spills to memory
(ptxas), bytes of shared memory of a block and whether a GPU of that kind has as many, and bytes of the cubin. Whether
the numbers are right and how fast they come only a GPU can tell.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._pytree import tree_map

GPUS = {
    80: ("A100", 108, 163 << 10),
    90: ("H100", 132, 227 << 10),
    100: ("B200", 148, 227 << 10),
}
"""By compute capability: name, multiprocessors, bytes of shared memory that a block may have."""


@dataclass(frozen=True, slots=True)
class Case:
    """Attention of one kind of layer.

    Example:
        Case("Qwen3-8B", heads=32, kv_heads=8, width=128)
    """

    name: str
    heads: int
    kv_heads: int
    width: int
    """Of a head's queries and keys."""
    value_width: int | None = None
    """Of its values; None where it is the same."""
    sinks: bool = False
    window: int | None = None
    dtype: str = "bfloat16"


CASES = (
    Case("Qwen3-8B", 32, 8, 128),
    Case("Qwen3-8B in float32", 32, 8, 128, dtype="float32"),
    Case("Llama-3.2-1B", 32, 8, 64),
    Case("Gemma-3-4B", 8, 4, 256),
    Case("Gemma-3-4B, window", 8, 4, 256, window=160),
    Case("gpt-oss-20b, sinks", 64, 8, 64, sinks=True),
    Case("gpt-oss-20b, sinks and window", 64, 8, 64, sinks=True, window=128),
    Case("DeepSeek-V3, MLA", 128, 128, 192, value_width=128),
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that was compiled, or what went wrong."""

    case: str
    gpu: int
    part: str
    name: str
    tiles: str = ""
    warps: int = 0
    stages: int = 0
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    cubin: int = 0
    error: str = ""

    @property
    def fits(self) -> bool:
        return self.shared <= GPUS[self.gpu][2]


# ---------------------------------------------------------------- what a GPU would tell of itself


class Driver:
    """Triton's driver of a GPU that is not here: it names the target and does nothing else."""

    def __init__(self, gpu: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", gpu, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@contextmanager
def pretended(gpu: int) -> Iterator[None]:
    """Meanwhile torch and Triton take this process for one with such a GPU. Once for a process: what torch was told it
    keeps."""
    import torch._subclasses.fake_tensor
    import torch.utils._triton
    import triton
    from torch._dynamo.device_interface import CudaInterface

    name, count, shared = GPUS[gpu]
    told = SimpleNamespace(
        name=name,
        major=gpu // 10,
        minor=gpu % 10,
        multi_processor_count=count,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 << 30,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared + 1024,
        L2_cache_size=40 << 20,
        gcnArchName="",
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (told.major, told.minor),
        "get_device_properties": told,
        "get_device_name": name,
        "is_bf16_supported": True,
        "is_tf32_supported": True,
        "get_rng_state": torch.get_rng_state(),
        "set_rng_state": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "synchronize": None,
    }
    for function in vars(torch.utils._triton).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    triton.runtime.driver.set_active(Driver(gpu))
    with ExitStack() as stack:
        for place, (function, answer) in itertools.product((torch.cuda, CudaInterface), answers.items()):
            if hasattr(place, function):
                stack.enter_context(patch.object(place, function, lambda *_, answer=answer, **__: answer))
        # It would put a number on the GPU, to make torch begin to use it.
        stack.enter_context(patch.object(torch._subclasses.fake_tensor, "init_gpu_context", lambda device: None))
        yield


# ---------------------------------------------------------------- from a CPU's graph to a GPU's kernels


class Compiler:
    """A backend of torch.compile that has kernels made of its graphs for a GPU, and computes them as they are."""

    def __init__(self, case: str, gpu: int) -> None:
        self.case = case
        self.gpu = gpu
        self.kernels: list[Kernel] = []

    def backend(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        return aot_autograd(
            fw_compiler=self.compile("forward"),
            bw_compiler=self.compile("backward"),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )(graph, inputs)

    def compile(self, part: str) -> Callable[..., Any]:
        def compiled(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            from torch._functorch._aot_autograd.utils import make_boxed_func

            try:
                self.make_kernels(part, copy.deepcopy(graph), inputs)
            except Exception as error:  # what does not compile is a line of the table
                if os.environ.get("COMPILE_FLEX_RAISE"):
                    raise
                self.kernels.append(Kernel(self.case, self.gpu, part, "", error=in_short(error)))
            return make_boxed_func(graph.forward)

        return compiled

    def make_kernels(self, part: str, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
        import torch._inductor.config
        from torch._guards import detect_fake_mode
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.virtualized import V

        mode = detect_fake_mode(inputs)
        there = on_gpu(graph, inputs, mode)
        anew = torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1)
        with pretended(self.gpu), self.catching(part), anew, V.set_fake_mode(mode):
            compile_fx_inner(graph, there, is_backward=part == "backward", cudagraphs=False)

    @contextmanager
    def catching(self, part: str) -> Iterator[None]:
        """Triton gets each kernel as torch has written it; nobody loads what comes of it."""
        from torch._inductor.async_compile import AsyncCompile

        seen: set[str] = set()  # torch asks while it writes a graph and again when that is read

        def compiled(_: Any, name: str, source: str, **how: Any) -> Any:
            if source not in seen:
                seen.add(source)
                self.kernels.append(kernel_of(self.case, self.gpu, part, name, source))
            return SimpleNamespace(run=None)

        with patch.object(AsyncCompile, "triton", compiled):
            yield


def on_gpu(graph: torch.fx.GraphModule, inputs: Sequence[Any], mode: Any) -> list[Any]:
    """Move a graph to a GPU, in place, with those in it that compute the mask; its inputs there, without numbers."""
    device = torch.device("cuda", 0)

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)

    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": device}
            for what in ("val", "example_value"):
                if what in node.meta:
                    node.meta[what] = tree_map(moved, node.meta[what])
            node.meta.pop("tensor_meta", None)
    graph.recompile()
    return [moved(value) for value in inputs]


def kernel_of(case: str, gpu: int, part: str, name: str, source: str) -> Kernel:
    """One kernel, compiled."""
    from torch._inductor.codecache import _load_triton_kernel_from_source
    from torch._inductor.runtime import triton_helpers

    found: list[Any] = []
    import triton

    compile_it = triton.compile

    def recorded(*given: Any, **how: Any) -> Any:
        found.append(compile_it(*given, **how))
        return found[-1]

    with ExitStack() as stack:
        stack.enter_context(patch.object(triton, "compile", recorded))
        stack.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        kernel = _load_triton_kernel_from_source(name, source)
        kernel._precompile_config(kernel.configs[0])  # a GPU would time the others, which small kernels have
    [binary] = found
    registers, spilled = resources(binary.asm["ptx"], gpu)
    sizes = dict(re.findall(r"(BLOCK_[MN]\d?)\s*:\s*tl\.constexpr\s*=\s*(\d+)", source))
    return Kernel(
        case,
        gpu,
        part,
        re.sub(r"^triton_(tem|red|per|poi)_fused_|_\d+$", "", name),
        " ".join(sizes.values()),
        binary.metadata.num_warps,
        binary.metadata.num_stages,
        registers,
        spilled,
        binary.metadata.shared,
        len(binary.asm["cubin"]),
    )


def resources(ptx: str, gpu: int) -> tuple[int, int]:
    """(registers of a thread, bytes that it stores to and loads from memory for want of more), by ptxas."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        tool = get_ptxas(gpu).path if get_ptxas.__code__.co_argcount else get_ptxas().path
        command = [
            tool,
            "-v",
            f"--gpu-name={sm_arch_from_capability(gpu)}",
            str(source),
            "-o",
            f"{folder}/kernel.cubin",
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(int(number) for number in re.findall(r"Used (\d+) registers", said))
    return registers, sum(int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", said))


def in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


# ---------------------------------------------------------------- what is compiled


def small_tree(prefix: int = 300, branches: int = 4, length: int = 170) -> tuple[Any, Any]:
    """(ends of subtrees, depths) of a prefix with branches."""
    size = prefix + branches * length
    exits, depth = np.full(size, size, np.int32), np.arange(size, dtype=np.int32)
    for start in range(prefix, size, length):
        exits[start : start + length] = start + length
        depth[start : start + length] = np.arange(prefix, prefix + length)
    return exits, depth


def compiled_for(case: Case, gpu: int) -> list[Kernel]:
    """The kernels of a case, forward and backward."""
    from torch.nn.attention import flex_attention

    from turnwise.learn.flex import FlexAttention, for_any_size

    compiler = Compiler(case.name, gpu)
    exits, depth = small_tree()
    attend = FlexAttention(exits, "cpu", depth)
    attend.kernel = for_any_size(torch.compile(flex_attention.flex_attention, dynamic=True, backend=compiler.backend))
    dtype = getattr(torch, case.dtype)
    widths = (case.width, case.width, case.value_width or case.width)
    states = [
        # Laid out as projections are: a token's heads side by side.
        torch.randn(1, len(exits), heads, width, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads, width in zip((case.heads, case.kv_heads, case.kv_heads), widths, strict=True)
    ]
    sinks = torch.zeros(case.heads) if case.sinks else None
    with ExitStack() as stack:
        # torch differentiates it on a CPU for its own tests only.
        stack.enter_context(patch.object(flex_attention, "_validate_device", lambda *states: None))
        stack.enter_context(patch.object(flex_attention, "_warn_once", lambda *message, **how: None))
        query, key, value = states
        out = attend(0, query, key, value, case.width**-0.5, sinks=sinks, window=case.window)
        out.float().sum().backward()
    torch._dynamo.reset()
    return compiler.kernels


def table(kernels: Sequence[Kernel]) -> str:
    numbers = "warps stages registers  spilled   shared  fits    cubin"
    head = f"{'layer':31} {'for':5} {'part':9} {'kernel':24} {'tiles':18} {numbers}"
    lines = []
    for each in kernels:
        start = f"{each.case:31} {GPUS[each.gpu][0]:5} {each.part:9} "
        if each.error:
            lines.append(f"{start}NOT COMPILED: {each.error}")
            continue
        lines.append(
            f"{start}{each.name[:24]:24} {each.tiles:18} {each.warps:5} {each.stages:6} {each.registers:9} "
            f"{each.spilled:8,} {each.shared:8,} {'yes' if each.fits else 'NO':>5} {each.cubin:8,}"
        )
    return "\n".join([head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", type=int, choices=GPUS, default=list(GPUS))
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if torch.version.cuda is None:
        sys.exit("this torch was built without CUDA; make an environment with the CUDA build, as the docstring says")
    cases = [case for case in CASES if not chosen.only or case.name in chosen.only]
    kernels: list[Kernel] = []
    for gpu, case in itertools.product(chosen.gpus, cases):
        kernels += compiled_for(case, gpu) if len(chosen.gpus) == 1 else elsewhere(gpu, case)
        if chosen.json:
            chosen.json.write_text(json.dumps([asdict(kernel) for kernel in kernels], indent=1))
    print(f"torch {torch.__version__}, nothing was run on a GPU")
    print(table(sorted(kernels, key=lambda each: [case.name for case in cases].index(each.case))))


def elsewhere(gpu: int, case: Case) -> list[Kernel]:
    """The kernels of a case for one kind of GPU, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.json"
        command = [sys.executable, __file__, "--gpus", str(gpu), "--json", str(file), "--only", case.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return [Kernel(**each) for each in json.loads(file.read_text())]


if __name__ == "__main__":
    main()

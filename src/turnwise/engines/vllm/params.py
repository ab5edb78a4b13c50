"""How a call is sampled, in the words of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.engines.base import Sampling
from turnwise.engines.vllm.guided import structured_outputs


def sampling_params(sampling: Sampling, end_tokens: Sequence[int], room: int, seed: int) -> dict[str, Any]:
    """vLLM's SamplingParams, where the context has room for so many tokens. Only our end tokens end an action,
    and text is decoded only to look for stop strings."""
    guided = {} if sampling.grammar is None else {"structured_outputs": structured_outputs(sampling.grammar)}
    routed = {} if sampling.routes is None else {"routed_experts_prompt_start": sampling.routes}
    return (
        guided
        | routed
        | {
            "max_tokens": min(sampling.max_tokens, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": signed(seed),
            "logprobs": 0,
            "stop": list(sampling.stop),
            "stop_token_ids": list(end_tokens),
            "ignore_eos": True,
            "detokenize": bool(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
    )


def signed(seed: int) -> int:
    """64 bits as vLLM takes them: signed, and -1 would mean none."""
    number = seed - (1 << 64) if seed >> 63 else seed
    return number if number != -1 else -2

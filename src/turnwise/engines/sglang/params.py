"""How a call is sampled, in the words of SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.engines.base import Sampling

ALL_TOKENS = -1
"""SGLang's top-k for no limit."""
SEED_BITS = 63
"""SGLang keeps a seed in a signed number of 64 bits."""


def is_cut(sampling: Sampling) -> bool:
    """Whether tokens are drawn from a part of the vocabulary: SGLang's own logprobs are from before that cut."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def sampling_params(
    sampling: Sampling, end_tokens: Sequence[int], max_tokens: int, seed: int | None, vocabulary: int
) -> dict[str, Any]:
    """SGLang's SamplingParams for so many tokens. It ends actions at the end tokens of the model too, which
    `ignore_eos` would turn off together with ours. A top-k of the whole vocabulary is a limit in name only: without one
    SGLang does not tell logprobs after the cut."""
    top_k = min(sampling.top_k or vocabulary, vocabulary) if is_cut(sampling) else ALL_TOKENS
    seeded = {} if seed is None else {"sampling_seed": seed % (1 << SEED_BITS)}
    return seeded | {
        "max_new_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p if is_cut(sampling) else 1.0,
        "top_k": top_k,
        "stop": list(sampling.stop),
        "stop_token_ids": list(end_tokens),
        "ignore_eos": False,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }

"""The hidden states of a plan of chains, each computed as a row of its own by the model as transformers ships it.

Rows are padded on the right. Nothing that a causal model computes for a token depends on what follows it, so padding
needs no mask and changes nothing; that is tried with every model before it is trained.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from turnwise.plan.plan import Plan
from turnwise.pretrained import CausalLM


def attend_in_rows(model: CausalLM) -> None:
    """Give a model the attention of transformers, the fastest that it has."""
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # not every model has it
        model.set_attn_implementation("eager")


def row_states(model: CausalLM, plan: Plan) -> Tensor:
    """[N, width] the last hidden states of a plan without shared prefixes."""
    depth = torch.from_numpy(plan.depth).long()
    row = torch.from_numpy(np.cumsum(plan.depth == 0) - 1)
    tokens = torch.zeros(int(row[-1]) + 1, int(depth.max()) + 1, dtype=torch.long)
    tokens[row, depth] = torch.from_numpy(plan.tokens).long()
    output = model.base_model(input_ids=tokens.to(model.device), use_cache=False)
    states: Tensor = output.last_hidden_state[row.to(model.device), depth.to(model.device)]
    return states

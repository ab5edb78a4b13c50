"""Writes docs/reference/models.md: which architectures of transformers are trained exactly, and why others are refused.

python docs/make_models.py
"""

from __future__ import annotations

import asyncio
import copy
import importlib.metadata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from turnwise.engines.base import Sampling
from turnwise.engines.slots.model import SlotModel
from turnwise.engines.slots.request import Request
from turnwise.learn.model_checks import Layout, windows
from turnwise.learn.policy import Policy
from turnwise.messages import Message
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.rows import in_rows
from turnwise.types import StopReason, Turn

VOCABULARY = 64
LONGEST = 48
"""Tokens that a turn may have here."""
HEAD = """# Models

Which causal language models of transformers {version} are trained exactly, and why the others are refused. This page is
made by `python docs/make_models.py`.

A run checks two things before it starts. First the configuration of the model: dropout, a router loss, or positions
that change with the length of a row are refused, and recurrent state unless `layout = "rows"`. Then its computation: a
few short turns with common prefixes, laid out by the recipe's `layout`, must give the same logits as transformers gives
for one row per turn, also with short attention windows if it has any. Architectures that are not on this page are
checked in the same way. A refusal is one line that says what to change, if anything can be changed.
"""
EXACT = """
## Trained

For each architecture, a small model with random parameters computed turns that share prefixes, branch and repeat.

* *tree*, *packed*: relative error of the gradient of all parameters against padded rows with transformers' attention,
  in float64. Operations that a model rounds to float32 (norms, routers, rotary embeddings) were kept in float64 on both
  sides, so that only the layout's error remains.
* *engine*: the largest difference between a logprob that the in-process engine recorded at sampling and that of a
  padded row, in float32. *fails* means that the learner is exact but the engine cannot sample.
* *window*: tokens that some layers see, by the default config. Gradients were compared with a window of 8 tokens, which
  the turns exceed. The in-process engine computes no windows and refuses turns that are longer; vLLM computes them.

| architecture | tree | packed | engine | window |
|---|---|---|---|---|
"""
IN_ROWS = """
## Trained in rows

These hand a state from token to token, or have other layers that a tree cannot share. With `layout = "rows"` they train
all the same: each attempt whose history only grew is a row, any other turn is one, and no prefix is shared. The
in-process engine cannot sample from them; vLLM can, where it has the model. *rows*: relative error of the gradient of
all parameters against padded rows with a mask, in float64.

| architecture | rows | why not in a tree |
|---|---|---|
"""
REFUSED = """
## Refused

Dropout and noise were set to 0 before this check.

| architecture | why |
|---|---|
"""
UNTRIED = """
## Not tried

No small model of these could be made from their default configs.

| architecture | why |
|---|---|
"""

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    # the same by other names
    "d_model": 32,
    "n_embd": 32,
    "ffn_dim": 48,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "n_head": 4,
    "n_heads": 4,
    "n_positions": 256,
    "word_embed_proj_dim": 32,
    "rotary_dim": 8,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_ffn_hidden_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # keys and values through a bottleneck, values narrower than keys as in what was trained
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # states
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OWN: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""What single architectures need beside, or instead of, the sizes."""
DROPOUTS = {
    "attention_dropout",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "hidden_dropout",
    "activation_dropout",
    "dropout",
    "residual_dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "router_jitter_noise",
}
"""Set to 0, as the refusal of dropout asks for."""
OTHERS = set(
    "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small blt camembert data2vec-text "
    "electra emu3 ernie fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant git "
    "got_ocr2 llama4 marian mbart megatron-bert mllama moshi musicgen musicgen_melody mvp pegasus phi4_multimodal "
    "plbart prophetnet qwen3_5 qwen3_5_moe qwen4_exp reformer rembert roberta roberta-prelayernorm roc_bert roformer "
    "trocr whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod".split()
)
"""Not asked: decoders of translation models, encoders with a mask, and models of more than text, whose text model is
asked under its own name."""


class Wide(TorchDispatchMode):
    """Keeps float64 where a model would go through float32, as norms, routers and rotary embeddings do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32 and args and isinstance(args[0], Tensor):
            kwargs["dtype"] = torch.promote_types(args[0].dtype, torch.float32)
        return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one architecture."""

    name: str
    refused: str = ""
    """Why, in the words of the refusal."""
    untried: str = ""
    """Why no small model of it could be made."""
    tree: float = 0.0
    """Relative error of the gradient against padded rows, in float64."""
    packed: float = 0.0
    rows: float | None = None
    """The same of a layout of rows, where the others are refused."""
    engine: float = 0.0
    """Largest difference of logprobs between the engine that sampled and padded rows, in float32; nan if it failed."""
    window: int = 0
    """Tokens that some layers see by default; 0 where all see everything."""


# ---------------------------------------------------------------- models


def architectures() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in OTHERS]


def small_model(name: str, **changes: Any) -> Any:
    """A small model of an architecture, every parameter of it random: norms and biases too."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = CONFIG_MAPPING[name]
    known = kind()
    settings: dict[str, Any] = {key: value for key, value in SIZES.items() if is_set(known, key)}
    settings |= {key: 0.0 for key in DROPOUTS if is_set(known, key)}
    if "kv_lora_rank" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(kind(**{**settings, **OWN.get(name, {}), **changes}))
        if (count := sum(parameter.numel() for parameter in model.parameters())) > 10_000_000:
            raise ValueError(f"it did not get smaller than {count} parameters")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def is_set(config: Any, key: str) -> bool:
    """Whether a config has a value for a key, and not one that it computes."""
    return key in vars(config) or key in getattr(config, "attribute_map", {})


# ---------------------------------------------------------------- what they compute


def some_turns() -> list[Turn]:
    """Two attempts that begin alike and part, one repeated turn, one with a window over its history, one alone."""
    random = np.random.default_rng(0)
    new: Callable[[int], Any] = lambda size: random.integers(3, VOCABULARY, size)
    task, said, heard, more = new(6), new(4), new(3), new(5)
    first = np.concatenate([task, said, heard])
    return [
        turn(task, said),
        turn(task, said),
        turn(task, np.concatenate([said[:2], new(3)])),
        turn(first, more),
        turn(first, np.concatenate([more[:1], new(2)])),
        turn(np.concatenate([first, more, new(4)]), new(6)),
        turn(np.concatenate([task[:4], heard]), new(3)),
        turn(new(9), new(2)),
    ]


def turn(prompt: Any, action: Any) -> Turn:
    size = len(action)
    return Turn(prompt, action, np.zeros(size), np.zeros(size), StopReason.length, 0.0, Message("assistant", ""))


def padded(model: Any, turns: Sequence[Turn]) -> list[Tensor]:
    """Logprobs of every turn's action as transformers computes them: a padded row per turn."""
    sequences = [np.concatenate([turn.prompt, turn.action]) for turn in turns]
    tokens = torch.zeros(len(turns), max(map(len, sequences)), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.from_numpy(sequence.astype(np.int64))
        mask[row, : len(sequence)] = 1
    table = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.log_softmax(-1)
    found = []
    for row, turn in enumerate(turns):
        part = table[row, len(turn.prompt) - 1 : len(turn.prompt) + len(turn.action) - 1]
        found.append(part.gather(1, torch.from_numpy(turn.action.astype(np.int64))[:, None])[:, 0])
    return found


def laid_out(policy: Policy, turns: Sequence[Turn], layout: Layout) -> list[Tensor]:
    [plan] = layout(turns, 10_000)
    [(_, logprobs, _)] = policy.passes(plan)
    found = [logprobs] * len(turns)
    for place, part in zip(plan.turns, logprobs.tensor_split(plan.offsets[1:-1].tolist()), strict=True):
        found[place] = part
    return found


def gradient(model: Any, logprobs: Sequence[Tensor]) -> Tensor:
    """The gradient of a weighted sum by all parameters, end to end."""
    factors = torch.randn(sum(map(len, logprobs)), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model.zero_grad()
    (torch.cat(list(logprobs)) @ factors).backward()
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()])


def gradient_errors(model: Any, layouts: Sequence[Layout] = (cut, pack)) -> list[float]:
    """Of layouts against padded rows, in float64; the model goes through no float32 on the way."""
    turns = some_turns()
    model = copy.deepcopy(model).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the only one in float64
    with Wide():
        model.set_attn_implementation("eager")
        wanted = gradient(model, padded(model, turns))
        errors = []
        for layout in layouts:
            policy = Policy(model, dtype=torch.float64, layout=layout, longest=LONGEST)
            found = gradient(model, laid_out(policy, turns, layout))
            errors.append(float((found - wanted).norm() / wanted.norm()))
    return errors


def engine_gap(model: Any) -> float:
    """The largest difference between the logprobs an engine recorded when it sampled and those of padded rows."""
    turns = some_turns()
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("eager")
    slots = SlotModel(model, slots=4, context=LONGEST, end_tokens=[], decode=str, dtype=torch.float32)
    loop = asyncio.new_event_loop()
    for place, turn in enumerate(turns):
        slots.submit(Request(turn.prompt, Sampling(6), str(place), place, loop.create_future()))
    done = []
    while slots.busy:
        done += slots.step()
    loop.close()
    sampled = [turn_of(request, completion) for request, completion in done]
    with torch.no_grad():
        wanted = torch.cat(padded(stock, sampled))
    return float((torch.cat([torch.from_numpy(turn.logprobs.copy()) for turn in sampled]) - wanted).abs().max())


def turn_of(request: Any, completion: Any) -> Turn:
    return Turn(
        request.prompt,
        completion.tokens,
        completion.logprobs,
        completion.versions,
        StopReason.length,
        0.0,
        Message("assistant", ""),
    )


def examine(name: str) -> Finding:
    """What comes of an architecture: the check that a run makes, and what it computes if it passes."""
    try:
        model = small_model(name)
    except Exception as error:
        return Finding(name, untried=f"{type(error).__name__}: {error}".splitlines()[0][:80])
    try:
        Policy(model, longest=LONGEST)
    except ValueError as error:
        return in_rows_only(name, model, str(error))
    config = model.config.get_text_config()
    window = min((tokens for tokens, _ in windows(config)), default=0)
    tree, packed = gradient_errors(small_model(name, sliding_window=8) if window else model)
    try:
        engine = engine_gap(model)
    except Exception:
        engine = np.nan
    return Finding(name, tree=tree, packed=packed, engine=engine, window=window)


def in_rows_only(name: str, model: Any, refusal: str) -> Finding:
    """What comes of an architecture that no tree computes."""
    if 'set layout = "rows"' not in refusal:
        return Finding(name, refused=refusal)
    reason = refusal.removeprefix("this model ").partition("; set layout")[0]
    try:
        Policy(model, longest=LONGEST, layout=in_rows)
        [error] = gradient_errors(model, [in_rows])
    except Exception as failure:  # transformers' own, of a model that it cannot train on a CPU
        return Finding(name, refused=f"{reason}; in rows: {failure}".splitlines()[0][:200])
    return Finding(name, refused=reason, rows=error)


def line(finding: Finding) -> str:
    """One row of a table."""
    if finding.rows is not None:
        return f"| {finding.name} | {finding.rows:.0e} | {finding.refused} |"
    if told := finding.refused or finding.untried:
        return f"| {finding.name} | {told} |"
    engine = "fails" if np.isnan(finding.engine) else f"{finding.engine:.0e}"
    return f"| {finding.name} | {finding.tree:.0e} | {finding.packed:.0e} | {engine} | {finding.window or ''} |"


def page(findings: Sequence[Finding]) -> str:
    tables = {EXACT: [f for f in findings if not f.refused and not f.untried]}
    tables |= {IN_ROWS: [f for f in findings if f.rows is not None]}
    tables |= {
        REFUSED: [f for f in findings if f.refused and f.rows is None],
        UNTRIED: [f for f in findings if f.untried],
    }
    parts = [HEAD.format(version=importlib.metadata.version("transformers"))]
    parts += [head + "\n".join(map(line, rows)) + "\n" for head, rows in tables.items() if rows]
    return "".join(parts)


if __name__ == "__main__":
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = []
    for name in architectures():
        found.append(examine(name))
        print(line(found[-1]), flush=True)
    (Path(__file__).parent / "reference" / "models.md").write_text(page(found))

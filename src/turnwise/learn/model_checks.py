"""What is computed exactly: a model that would be trained on something else is refused before, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.learn.attention import NAME, attention_of, register, states_of
from turnwise.learn.row_states import attend_in_rows, row_states
from turnwise.messages import Message
from turnwise.plan.pack import pack
from turnwise.plan.plan import Plan
from turnwise.plan.rows import in_rows
from turnwise.pretrained import CausalLM
from turnwise.tokens import Tokens
from turnwise.types import StopReason, Turn

Layout = Callable[[Sequence[Turn], int], list[Plan]]
"""(turns, tokens per pass) -> plans."""

WINDOWS = {"full_attention": "", "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of layers whose attention is full as long as a turn is within a window, and where a config has its size."""

ROWS = np.array([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7], [0, 1, 8, 9, 10, 11], [9, 8, 2, 3, 4, 5], [0, 1, 8, 3, 7, 2]])
"""Short turns that share prefixes of several lengths, and one that shares none."""

SHORT = 3
"""A window that is shorter than these turns."""

Reach = tuple[int, str]
"""(tokens, what ends there) of something that is exact for turns of so many tokens only."""

TOLERANCE = 1e-4
"""Of logits, relative to the largest. Rounding in float32 stays well below, another computation well above."""


# ---------------------------------------------------------------- by what a model says of itself


def check_model(model: CausalLM, layout: Layout = pack) -> None:
    """Refuse, with the reason, what is known not to be computed exactly."""
    config = model.config.get_text_config()
    if layout is not in_rows and (reason := why_unshared(model)):
        raise ValueError(f'this model {reason}; set layout = "rows", which shares nothing')
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):
            raise ValueError(f"this model rescales its logits ({name}), which is not supported")
    for name in noises(config, model):
        raise ValueError(f"this model has dropout or noise ({name}); set every such value in its config.json to 0")
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", None) != 0:
        raise ValueError(
            "this model adds a loss of its routers, which would change with the layout and is not computed; "
            "set output_router_logits to false in its config.json"
        )
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError("this model's output layer has a bias, which is not supported")


def why_unshared(model: CausalLM) -> str:
    """Why tokens of a model cannot be computed once for several turns, by what it says of itself; nothing if they
    can: a state that is handed from token to token belongs to one row."""
    if kinds := layer_kinds(model.config.get_text_config()) - WINDOWS.keys():
        return f"has {', '.join(sorted(kinds))} layers, and only full attention is computed in trees and packed turns"
    if getattr(model, "_is_stateful", False):
        return "hands a state from token to token, which is not computed exactly in trees and packed turns"
    return ""


def check_longest(reach: Sequence[Reach], longest: float) -> None:
    """Refuse turns of up to `longest` tokens where that is more than a model computes exactly."""
    for tokens, what in reach:
        if tokens < longest:
            raise ValueError(
                f"this model {what} {tokens} tokens, and neither layout computes longer turns exactly; "
                f"set rollout.max_trajectory_tokens to {tokens} or less"
            )


def check_plan(reach: Sequence[Reach], plan: Plan) -> None:
    """Refuse a plan with a turn longer than a model computes exactly: demonstrations have lengths of their own."""
    longest = int(plan.depth.max(initial=-1)) + 1
    for tokens, what in reach:
        if tokens < longest:
            raise ValueError(f"this model {what} {tokens} tokens, and there is a turn of {longest}; leave it out")


def layer_kinds(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ["full_attention"])


def noises(config: Any, model: CausalLM) -> Iterator[str]:
    """What makes a training pass random, by name; heads of classifiers are not in the way of a token's logits."""
    for name, value in config.to_dict().items():
        random = any(word in name for word in ("dropout", "pdrop", "layerdrop", "jitter_noise"))
        if random and not name.startswith(("classifier", "summary")) and isinstance(value, float) and value > 0:
            yield f"{name} = {value:g}"
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            yield f"{name} drops {module.p:g}"


def windows(config: Any) -> Iterator[Reach]:
    """The attention windows of a model."""
    slides = not getattr(config, "layer_types", None) and getattr(config, "use_sliding_window", True)
    for name in sorted({WINDOWS[kind] for kind in ({"sliding_attention"} if slides else layer_kinds(config))}):
        if name and getattr(config, name, None):
            yield getattr(config, name), f"attends through a window ({name}) of"


def changing_positions(config: Any) -> Iterator[Reach]:
    """The lengths beyond which a model computes other positions for all tokens of a row."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes] if "rope_type" in ropes else ropes.values():
        kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
        if kind in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") if kind == "longrope" else None
            yield original or config.max_position_embeddings, f"has positions ({kind}) that all change beyond"


# ---------------------------------------------------------------- by what it computes


@torch.no_grad()
def check_layout(model: CausalLM, layout: Layout) -> None:
    """Refuse an architecture that computes something else when turns are laid out together: a few short ones are
    computed both ways. So a model is tried that says nothing of itself, and one that nobody has heard of."""
    if layout is in_rows:
        return check_rows(model)
    if (off := difference(model, layout)) < TOLERANCE:
        return None
    packed = layout is not pack and difference(model, pack) < TOLERANCE
    raise ValueError(
        f"{type(model).__name__} computes something else when turns are laid out together (relative difference "
        f"{off:.1e})" + ('; set layout = "packed", with which it does not' if packed else ", so it cannot be trained")
    )


@torch.no_grad()
def check_rows(model: CausalLM) -> None:
    """Refuse an architecture of which a row changes when longer ones stand beside it: a few are computed both ways.
    The model is left with the attention that computes rows."""
    if model.base_model is model:
        raise ValueError(f"{type(model).__name__} does not name the part that computes hidden states")
    attend_in_rows(model)
    turns = short_turns(model.config.get_text_config().vocab_size)
    cut_short = [replace_action(turn, turn.action[: place + 1]) for place, turn in enumerate(turns)]
    [plan] = in_rows(cut_short, ROWS.size)
    off = 0.0
    with computing(model):
        together = row_states(model, plan) @ model.get_output_embeddings().weight.T
        for place in np.flatnonzero(plan.depth == 0):
            row = slice(int(place), int(plan.exit[place]))
            tokens = torch.from_numpy(plan.tokens[row]).long()[None].to(model.device)
            alone = model(input_ids=tokens, use_cache=False).logits[0]
            off = max(off, float((together[row] - alone).abs().max() / alone.abs().max()))
    if off >= TOLERANCE:
        raise ValueError(
            f"{type(model).__name__} computes something else for rows that are padded (relative difference {off:.1e}), "
            "so it cannot be trained"
        )


@contextmanager
def computing(model: CausalLM) -> Iterator[None]:
    """What the code of a model raises, for instance the key of a layer that its config does not name, as a refusal."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        said = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{type(model).__name__} fails in transformers' own code on a few short rows ({type(error).__name__}: "
            f"{said}); check its config.json, or train another model"
        ) from error


@torch.no_grad()
def reaches(model: CausalLM, layout: Layout) -> list[Reach]:
    """Everything that is exact for turns of so many tokens only. Windows are among it unless the layout computes them,
    which the same turns show, with a window that is shorter than they are; transformers computes those of rows."""
    config = model.config.get_text_config()
    found = list(changing_positions(config))
    if layout is not in_rows and (all_windows := list(windows(config))):
        with short_windows(model):
            exact = difference(model, layout) < TOLERANCE
        found = found if exact else [*all_windows, *found]
    return found


@contextmanager
def short_windows(model: CausalLM) -> Iterator[None]:
    """The model with windows of a few tokens, in the config, which masks are made by, and in the layers."""
    holders = [model.config.get_text_config(), *model.modules()]
    names = [name for name in WINDOWS.values() if name]
    before = [(holder, name, holder.__dict__.get(name)) for holder in holders for name in names]
    before = [(holder, name, size) for holder, name, size in before if type(size) is int]
    for holder, name, _ in before:
        setattr(holder, name, SHORT)
    try:
        yield
    finally:
        for holder, name, size in before:
            setattr(holder, name, size)


def short_turns(vocabulary: int) -> list[Turn]:
    rows = (ROWS % vocabulary).astype(np.int32)
    logprobs, versions = np.zeros(rows.shape[1] - 1, np.float32), np.zeros(rows.shape[1] - 1, np.int32)
    said = Message("assistant", "")
    return [Turn(row[:1], row[1:], logprobs, versions, StopReason.length, 0.0, said) for row in rows]


def replace_action(turn: Turn, action: Tokens) -> Turn:
    """The turn with the beginning of its action only."""
    size = len(action)
    return replace(turn, action=action, logprobs=turn.logprobs[:size], versions=turn.versions[:size])


def logits_apart(model: CausalLM, turns: Sequence[Turn]) -> Tensor:
    """[turns, actions, vocabulary] as transformers computes them, a row per turn, at the tokens of the actions."""
    model.set_attn_implementation("eager")
    rows = torch.from_numpy(np.stack([np.concatenate([turn.prompt, turn.action]) for turn in turns]))
    logits: Tensor = model(input_ids=rows.long().to(model.device), use_cache=False).logits
    return logits[:, 1:]


def difference(model: CausalLM, layout: Layout) -> float:
    """The largest difference of logits between a layout and rows, relative to the largest logit."""
    register()
    turns = short_turns(model.config.get_text_config().vocab_size)
    apart = logits_apart(model, turns)
    model.set_attn_implementation(NAME)
    [plan] = layout(turns, ROWS.size)
    states = watched_states(model, plan)
    nodes = torch.from_numpy(plan.action_nodes.reshape(len(turns), -1)).to(states.device)
    found = states[nodes] @ model.get_output_embeddings().weight.T
    wanted = apart[torch.from_numpy(plan.turns).to(apart.device)]
    return float((found - wanted).abs().max() / wanted.abs().max())


def watched_states(model: CausalLM, plan: Plan) -> Tensor:
    """The last hidden states of a plan, by a model that was seen to leave the attention of every layer to us."""
    name = type(model).__name__
    inner = attention_of(plan, plan.stretches[0], model.device.type)
    layers: list[int] = []

    def attend(layer: int, *states: Any, **more: Any) -> Tensor:
        layers.append(layer)
        return inner(layer, *states, **more)

    if model.base_model is model:
        raise ValueError(f"{name} does not name the part that computes hidden states, so it cannot be trained")
    try:
        states = states_of(model, plan, plan.stretches[0], attend)
    except TypeError as error:  # a signature without room for it, in one layer or another
        raise ValueError(
            f"{name} does not hand on what its attention needs ({error}), so it cannot be trained"
        ) from None
    if not layers:
        raise ValueError(f"{name} lets nobody else compute its attention, so it cannot be trained")
    if len(layers) > len(set(layers)):
        raise ValueError(f"{name} uses a layer more than once, which is not supported")
    return states

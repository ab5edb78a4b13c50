"""The cut: the first layers of a model, small enough to be tried in one process whatever the size of the model.

A model that is spread over ranks is whole nowhere. What is checked of it by computing is checked on its first layers:
as many as have a layer of every kind in it, and at least two. Their weights are random, because what a check looks at
is the architecture.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from turnwise.data.catalogue import model_folder
from turnwise.learn.contents import check_contents
from turnwise.learn.model_checks import Layout, Reach, check_layout, check_longest, check_model, reaches
from turnwise.pretrained import CausalLM, import_models

FEWEST = 2
"""Layers: a mistake in what one hands to the next needs two."""
WORDS = 64
"""Tokens of the cut: embeddings are most of a small model, and no check depends on how many there are."""
NOISE = 0.02
"""Added to all weights of the cut: many begin as zeros or ones, with which two computations may agree by chance."""


def model_on_meta(path: str | Path) -> CausalLM:
    """The model of a folder without weights: its config, its shapes, and the end tokens that its folder names."""
    import_models()
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    folder = model_folder(path)
    check_contents(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model: CausalLM = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.config.name_or_path = str(folder)
    return model


def check_by_config(model: CausalLM, layout: Layout, longest: float) -> Sequence[Reach]:
    """Refuse a model that would not compute turns of up to `longest` tokens exactly, as a policy does of one that is
    whole. Returns how long a turn may be, and why."""
    check_model(model, layout)
    cut = cut_of(model)
    check_layout(cut, layout)
    reach = reaches(cut, layout)
    check_longest(reach, longest)
    return reach


def cut_of(model: CausalLM) -> CausalLM:
    """The first layers of a model, with random weights, on the CPU."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    count = num_layers_with_all_kinds(model)
    text.num_hidden_layers = count
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:count]
    text.vocab_size = min(WORDS, text.vocab_size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            setattr(text, name, None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        cut: CausalLM = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        with torch.no_grad():
            for parameter in cut.parameters():
                parameter.add_(torch.randn_like(parameter) * NOISE)
    return cut


def num_layers_with_all_kinds(model: CausalLM) -> int:
    """How many of the first layers have one of every kind."""
    text = model.config.get_text_config()
    layers = next((found for found in stacks_of(model) if len(found) == text.num_hidden_layers), None)
    if layers is None:
        return int(text.num_hidden_layers)
    named = getattr(text, "layer_types", None) or [""] * len(layers)
    kinds = [(kind, tuple(shapes_of(layer))) for kind, layer in zip(named, layers, strict=True)]
    return max(min(FEWEST, len(kinds)), *(kinds.index(kind) + 1 for kind in set(kinds)))


def stacks_of(model: CausalLM) -> list[torch.nn.ModuleList]:
    return [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]


def shapes_of(layer: torch.nn.Module) -> list[Any]:
    """What tells one kind of layer from another: the classes of its modules and the shapes of their weights."""
    classes = [(name, type(module).__name__) for name, module in layer.named_modules()]
    return [*classes, *((name, tuple(tensor.shape)) for name, tensor in layer.named_parameters())]

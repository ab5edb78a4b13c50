"""The config of the model that a recipe names: of a folder, of the Hub, or as published. No weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.data.catalogue import model_folder
from turnwise.data.hub import HubName
from turnwise.learn.lora import base_of
from turnwise.learn.tiny import tiny_config
from turnwise.recipe.schema import Recipe

TINY_VOCABULARY = 512
"""The most tokens that the tokenizer of a tiny model learns."""

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-1.7B": {
        **QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-4B": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": {
        **QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-14B": {
        **QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-32B": {
        **QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B": {
        **QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}
"""Sizes of models as their config.json on the Hub has them, so that nobody has to be asked for those."""


@dataclass(frozen=True, slots=True)
class NamedConfig:
    """A config of transformers, and where it is from."""

    config: Any
    origin: str
    """For people."""


def config_of(recipe: Recipe) -> NamedConfig:
    """The config of a recipe's policy."""
    path = recipe.model.path
    if path == "tiny":
        size = (recipe.model.hidden, recipe.model.layers, recipe.rollout.max_trajectory_tokens)
        return NamedConfig(tiny_config(TINY_VOCABULARY, *size), "built by code")
    return config_at(path)


def config_at(path: str) -> NamedConfig:
    """The config of a folder, of a model of the catalogue or of a name of the Hub."""
    if (name := HubName.parse(path)) is not None:
        return of_the_hub(name)
    folder = model_folder(path)
    if not folder.is_dir():
        raise ValueError(f"no model folder at {path}; give a folder with a config.json, or ORG/NAME of the Hub")
    return in_folder(folder)


def in_folder(folder: Path) -> NamedConfig:
    from transformers import AutoConfig

    if (base := base_of(folder)) is not None:
        return config_at(str(base))
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; give the folder of a model")
    return NamedConfig(AutoConfig.from_pretrained(folder, trust_remote_code=False), f"{folder}/config.json")


def of_the_hub(name: HubName) -> NamedConfig:
    """From the cache, as published where its sizes are known here, or from the Hub."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from transformers import AutoConfig

    is_known = name.repo in PUBLISHED and name.revision == "main"
    try:
        found = hf_hub_download(
            name.repo, "config.json", revision=name.revision, etag_timeout=3, local_files_only=is_known
        )
    except Exception as error:
        if is_known and isinstance(error, LocalEntryNotFoundError):
            sizes = dict(PUBLISHED[name.repo])
            config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
            return NamedConfig(config, "as published; it is not in the Hub cache")
        raise ValueError(f"{name.explained(error)}; preflight needs its config.json alone") from None
    return NamedConfig(AutoConfig.from_pretrained(Path(found).parent, trust_remote_code=False), str(name))

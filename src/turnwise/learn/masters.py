"""Master weights: those that are trained, where the files that others read have them rounded."""

from __future__ import annotations

from pathlib import Path

from turnwise.learn.export import weights_of
from turnwise.learn.merged import plain_name
from turnwise.learn.snapshot import names_in, read_snapshot
from turnwise.pretrained import CausalLM

MASTERS = "master_weights"
"""Folder of a checkpoint."""


def read_masters(folder: Path, model: CausalLM) -> None:
    """Fill a model, whole or spread over ranks, with the master weights of a checkpoint, if it has some."""
    if not (folder / MASTERS).is_dir():
        return
    weights = {plain_name(name): tensor for name, tensor in weights_of(model).items() if ".lora_" not in name}
    if different := names_in(folder / MASTERS) ^ weights.keys():
        raise ValueError(f"{folder / MASTERS} is of another model: only one of them has {min(different)}")
    read_snapshot(folder / MASTERS, weights)

"""The catalogue: all that `turnwise data` can fetch."""

from __future__ import annotations

from pathlib import Path

from turnwise.data.entry import Entry
from turnwise.data.factbook import FACTBOOK
from turnwise.data.hub import HubName
from turnwise.data.minilm import MINILM
from turnwise.data.smollm2 import SMOLLM2

CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in (FACTBOOK, MINILM, SMOLLM2)}


def model_folder(path: str | Path) -> Path:
    """The folder of a model that a recipe names: one of the catalogue, one of the Hub that is in its cache, or the path
    itself."""
    entry = CATALOGUE.get(str(path))
    if entry is not None and entry.is_model:
        return entry.located()
    name = HubName.parse(path) if isinstance(path, str) else None
    return Path(path) if name is None else name.located()

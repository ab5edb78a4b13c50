"""The recipe of a run as a TOML file for others: what it sets, without what is of one's own machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from turnwise.data.hub import HubName
from turnwise.inspect.flat_recipe import ABSENT, changed_from_defaults

OWN = (
    "out",
    "trackers",
    "tracking",
    "endpoint",
    "engine",
    "cluster",
    "checkpoints",
    "archive",
    "screen",
    "weight_check",
)
"""Tables and keys that say where and how quickly a run was made, and what it recorded."""
OWN_KEYS = ("model.device", "model.threads", "sft.data", "sft.remake")
FOLDERS = ("model.path", "kl.reference", "teacher")
"""Keys that may name a folder of this machine, which nobody else has."""
BARE = re.compile(r"[A-Za-z0-9_-]+")


def public_recipe(tree: Mapping[str, Any]) -> str:
    """The keys of a recipe that are not at their defaults, as TOML that turnwise reads."""
    top: list[str] = []
    entries: dict[str, list[str]] = {}
    for key, (value, _) in changed_from_defaults(tree).items():
        if value is None or value is ABSENT or not is_public(key, value):
            continue
        if not key.startswith("env."):
            top.append(f"{dotted(key)} = {toml(value)}")
            continue
        _, number, name = key.split(".", 2)
        entries.setdefault(number, []).append(f"{dotted(name)} = {toml(value)}")
    lines = [*top, *(line for written in entries.values() for line in ("", "[[env]]", *written))]
    return "\n".join(lines) + "\n"


def is_public(key: str, value: Any) -> bool:
    if key.partition(".")[0] in OWN or key in OWN_KEYS:
        return False
    return key not in FOLDERS or value in ("start", "tiny") or HubName.parse(str(value)) is not None


def dotted(key: str) -> str:
    return ".".join(part if BARE.fullmatch(part) else json.dumps(part) for part in key.split("."))


def toml(value: Any) -> str:
    """A value as TOML; that of JSON but for tables."""
    if isinstance(value, Mapping):
        pairs = (f"{dotted_part(str(key))} = {toml(inner)}" for key, inner in value.items() if inner is not None)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def dotted_part(key: str) -> str:
    return key if BARE.fullmatch(key) else json.dumps(key)

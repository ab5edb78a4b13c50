"""Whose run folder it is. What its config.json names is run without a question only where the folder is one's own.

A recipe may name commands, modules and servers, and `turnwise eval RUN` has them run or asked. Who wrote the recipe
meant that; who was given the folder did not. So a new run that names any gets a stamp, an HMAC of its config.json under
a key that this user has and nobody else. It stays valid where the folder is moved or copied, and nowhere but here.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from turnwise.atomic import write_atomically
from turnwise.recipe.built_in import BUILT_IN
from turnwise.recipe.environment import EnvironmentConfig
from turnwise.recipe.parse import apply_override, parse_recipe
from turnwise.recipe.schema import Recipe
from turnwise.runs.folder import RunFolder

Trust = Literal["ask", "granted", "needless"]
"""Of a folder: refuse what is somebody else's, take it for one's own from now on, or run nothing that it names."""
KEY_BYTES = 32
LONGEST = 500
"""Characters of a value that are shown."""
TABLES = (".jsonl", ".json", ".ndjson", ".parquet")


# ---------------------------------------------------------------- what a recipe names


def named_in(recipe: Recipe) -> list[str]:
    """What a recipe would have run, fetched or asked that is not turnwise's own, as keys with their values."""
    cluster, vllm, sglang = recipe.cluster, recipe.engine.vllm, recipe.engine.sglang
    found = [line for entry in recipe.env for line in named_by(entry)]
    others = {
        "sft.data": recipe.sft.data if is_code_or_hub(recipe.sft.data) else "",
        "cluster.address": cluster.address,
        "engine.vllm.servers": list(vllm.servers),
        "engine.vllm.api_key_variable": vllm.api_key_variable,
        "engine.vllm.folder": vllm.folder,
        "engine.sglang.servers": list(sglang.servers),
        "engine.sglang.api_key_variable": sglang.api_key_variable,
        "engine.sglang.folder": sglang.folder,
        "teacher": recipe.teacher if recipe.teacher.startswith("hf:") else "",
        "kl.reference": recipe.kl.reference if recipe.kl.reference.startswith("hf:") else "",
        "endpoint.host": "" if recipe.endpoint.host in ("127.0.0.1", "localhost", "::1") else recipe.endpoint.host,
    }
    return found + [written(key, value) for key, value in others.items() if value]


def named_by(entry: EnvironmentConfig) -> Iterator[str]:
    ours = entry.name in BUILT_IN
    if not ours:
        yield written("env.name", entry.name)
    for key, value in entry.settings.items():
        names_code = key == "scorer" and ":" in str(value)
        # An environment of somebody else may do with its settings what it likes.
        if not ours or "://" in str(value) or names_code:
            yield written(f"env.settings.{key}", value)
    if entry.agent:
        yield written("env.agent", entry.agent)
    if names := entry.isolation.variables:
        yield written("env.isolation.variables", list(names))
    for key in ("data", "heldout"):
        if is_code_or_hub(getattr(entry, key)):
            yield written(f"env.{key}", getattr(entry, key))


def is_code_or_hub(source: str) -> bool:
    """Whether a table is what a function returns, or a data set of the Hub, and not a file."""
    return ":" in source and Path(source).suffix not in TABLES


def written(key: str, value: Any) -> str:
    """A key with its value, in which nothing can move the cursor of a terminal."""
    text = json.dumps(value)
    return f"{key} = {text if len(text) <= LONGEST else f'{text[:LONGEST]}... ({len(text) - LONGEST} characters more)'}"


# ---------------------------------------------------------------- stamps


def state_folder() -> Path:
    """Where the key is: TURNWISE_STATE, or else ~/.local/state/turnwise."""
    if named := os.environ.get("TURNWISE_STATE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "turnwise"


def own_key() -> bytes | None:
    """This user's key, made when it is first asked for; None where there is no place to keep one."""
    path = state_folder() / "key"
    with suppress(OSError):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            aside = path.with_name(f".key-{secrets.token_hex(8)}")
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            try:
                with suppress(FileExistsError):  # somebody else was first
                    os.link(aside, path)
            finally:
                aside.unlink()
        key = path.read_bytes()
        return key if len(key) == KEY_BYTES else None
    return None


def stamp_of(config: bytes) -> str | None:
    """What says that a config is this user's."""
    key = own_key()
    return None if key is None else hmac.new(key, config, sha256).hexdigest()


def stamp(folder: RunFolder, recipe: Recipe) -> None:
    """Say that a run is one's own, where that will ever be asked. Without a place for a key it is asked again later."""
    with suppress(OSError):
        if (text := stamp_where_asked(recipe, folder.config.read_bytes())) is not None:
            write_atomically(folder.stamp, text + "\n")


def stamp_where_asked(recipe: Recipe, config: bytes) -> str | None:
    """The stamp of a recipe that names anything, in whose folder there is this config."""
    return stamp_of(config) if named_in(recipe) else None


def is_own(folder: RunFolder, config: bytes) -> bool:
    """Whether this user has stamped the folder with this config."""
    try:
        found = folder.stamp.read_bytes().strip()
    except OSError:
        return False
    expected = stamp_of(config)
    return expected is not None and hmac.compare_digest(found, expected.encode())


# ---------------------------------------------------------------- recipes of folders


def recipe_of_run(folder: RunFolder, overrides: Sequence[str] = (), trust: Trust = "ask") -> Recipe:
    """The recipe of a run with overrides applied. ValueError where it names what must not run: where the folder is
    somebody else's, all but what the overrides name themselves."""
    tree, config = folder.read_config(), folder.config.read_bytes()
    theirs = parse_recipe(tree, str(folder.config), is_recorded=True)
    for override in overrides:
        apply_override(tree, override)
    recipe = parse_recipe(tree, str(folder.config), is_recorded=True)
    if trust == "granted":
        stamp(folder, theirs)
    if trust == "ask" and not is_own(folder, config):
        ours = set(named_in(recipe)) - set(named_in(theirs))
        if asked := [line for line in named_in(recipe) if line not in ours]:
            raise ValueError(refusal(folder.path, asked))
    return recipe


def refusal(path: Path, asked: Iterable[str]) -> str:
    return (
        f"{path} was not made by you on this machine, or its config.json has changed since, and it would have this run "
        f"or asked: {'; '.join(asked)}. If you want that, add --trust"
    )

"""Servers that a recipe names: their keys and certificates, and whether a run can use them."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from pathlib import Path

from turnwise.assemble.engines import SERVERS, ServedModel, connections_of, context_of
from turnwise.data.catalogue import model_folder
from turnwise.engines.remote.connection import ServerFailure
from turnwise.recipe.schema import Recipe


def check_access(recipe: Recipe) -> None:
    """Refuse a key or certificates that are not there."""
    table, servers = f"engine.{recipe.engine.name}", recipe.engine.remote
    if name := servers.api_key_variable:
        key = os.environ.get(name, "")
        if not key:
            raise ValueError(f"{table}.api_key_variable: the environment has no {name}; export it")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ValueError(f"{table}.api_key_variable: {name} has characters that no key has; export it again")
    if servers.ca_file:
        if not Path(servers.ca_file).is_file():
            raise ValueError(f"{table}.ca_file: no file at {servers.ca_file}")
        try:
            ssl.create_default_context(cafile=servers.ca_file)
        except (ssl.SSLError, OSError):
            raise ValueError(f"{table}.ca_file: {servers.ca_file} has no certificates in PEM form") from None


async def check_servers(recipe: Recipe) -> None:
    """Ask all servers, and refuse those that a run cannot use, or that have different models."""
    model, connections = served_model(recipe), connections_of(recipe.engine.remote)
    services = [SERVERS[recipe.engine.name](recipe, connection, model) for connection in connections]
    try:
        starts = (service.start(context_of(recipe)) for service in services)
        for error in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(error, ServerFailure):
                raise ValueError(str(error)) from None
            if error is not None:
                raise error
    finally:
        await asyncio.gather(*(service.close() for service in services))
    for service in services[1:]:
        first = services[0]
        for key in sorted(first.model.keys() | service.model.keys()):
            ours, theirs = first.model.get(key), service.model.get(key)
            if ours != theirs:
                raise ValueError(
                    f"{first.url} and {service.url} serve different models ({key} = {ours} and {theirs}); start both "
                    "with the model of the recipe"
                )


def served_model(recipe: Recipe) -> ServedModel:
    """What servers must have, by the config of a recipe's model; anything where there is no model yet."""
    try:
        config = json.loads((model_folder(recipe.model.path) / "config.json").read_text())
        return ServedModel(int(config.get("text_config", config)["vocab_size"]), str(config.get("model_type", "")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ServedModel()  # what is wrong with it is said where it is read

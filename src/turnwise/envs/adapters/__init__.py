"""Environments of other libraries. A recipe names one with `env.name = "textarena:GuessTheNumber-v0"`.

An adapter is one file with one class. It knows when a library pays rewards, which text the library repeats, how an
episode ends, and which global state the library changes.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

from turnwise.envs.isolation.isolated import isolate

ADAPTERS = {
    "bfcl": "turnwise.envs.adapters.bfcl:Bfcl",
    "gem": "turnwise.envs.adapters.gem:Gem",
    "gymnasium": "turnwise.envs.adapters.gymnasium:Gymnasium",
    "openenv": "turnwise.envs.adapters.openenv:OpenEnv",
    "reasoning_gym": "turnwise.envs.adapters.reasoning_gym:ReasoningGym",
    "skyrl_gym": "turnwise.envs.adapters.skyrl_gym:SkyRLGym",
    "textarena": "turnwise.envs.adapters.textarena:TextArena",
    "textworld": "turnwise.envs.adapters.textworld:TextWorld",
    "verifiers": "turnwise.envs.adapters.verifiers:Verifiers",
}


@cache
def adapted(library: str, name: str, variables: tuple[str, ...] = ()) -> Any:
    """The class of the library's environment of this name. Its process gets these variables besides the usual ones.
    ValueError if the library is not installed."""
    module, _, attribute = ADAPTERS[library].partition(":")
    kind = getattr(importlib.import_module(module), attribute)
    if not name:
        raise ValueError(f'env.name = "{library}:" names no environment; write for instance "{kind.example}"')
    if kind.library and importlib.util.find_spec(kind.library) is None:
        raise ValueError(f'env.name = "{library}:{name}" needs {kind.library}: {kind.install}')
    adapter = type(kind.__name__, (kind,), {"name": name, "variables": variables})
    return isolate(adapter, ADAPTERS[library]) if kind.isolated else adapter

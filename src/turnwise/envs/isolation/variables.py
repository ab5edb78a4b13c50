"""Environment variables for processes with other people's code: a short list without secrets.

An agent or an environment of a library does not need the keys of clouds and trackers in a user's shell. A recipe names
the other variables that it needs: `env.isolation.variables = ["OPENROUTER_API_KEY"]`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

NAMES = frozenset(
    "PATH HOME USER LOGNAME SHELL PWD TERM LANG LANGUAGE TZ TMPDIR TMP TEMP VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH "
    "DYLD_LIBRARY_PATH REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NODE_EXTRA_CA_CERTS NO_PROXY no_proxy XDG_CACHE_HOME "
    "XDG_CONFIG_HOME XDG_DATA_HOME XDG_RUNTIME_DIR TURNWISE_CACHE NLTK_DATA HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE "
    "HF_HUB_OFFLINE TOKENIZERS_PARALLELISM CUDA_VISIBLE_DEVICES OMP_NUM_THREADS OMP_WAIT_POLICY MKL_NUM_THREADS "
    "OPENBLAS_NUM_THREADS".split()
)
BEGINNINGS = ("LC_", "PYTHON", "SSL_CERT_")
PROXIES = frozenset("HTTP_PROXY HTTPS_PROXY ALL_PROXY http_proxy https_proxy all_proxy".split())
"""Passed on if they contain no password."""


def passed_on(named: Iterable[str] = ()) -> dict[str, str]:
    """The variables of this process that a child gets: those of the list and the named ones."""
    wanted = frozenset(named)
    return {name: value for name, value in os.environ.items() if name in wanted or is_harmless(name, value)}


def is_harmless(name: str, value: str) -> bool:
    return name in NAMES or name.startswith(BEGINNINGS) or (name in PROXIES and "@" not in value)


def check_variables(named: Iterable[str]) -> None:
    """ValueError if a recipe names a variable that is not set; without this check, code that needs it fails later."""
    for name in named:
        if name not in os.environ:
            raise ValueError(
                f"env.isolation.variables names {name}, which is not set; set it, or remove it from the recipe"
            )

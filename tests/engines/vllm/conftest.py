"""Tests that start vLLM need an environment with it: `make test-vllm`. Elsewhere they are not collected."""

from __future__ import annotations

import importlib.util

STARTS_VLLM = [
    "test_conformance.py",
    "test_ranks.py",
    "test_routes.py",
    "test_start.py",
    "test_training.py",
    "test_weights.py",
]

collect_ignore = [] if importlib.util.find_spec("vllm") else STARTS_VLLM

"""These tests need vLLM, in an environment of its own: `make test-vllm`. Elsewhere they are not collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*"]

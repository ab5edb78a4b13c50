"""Benchmark scripts as modules, for tests of their parts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from support.paths import BENCHMARKS


@contextmanager
def script_module(name: str) -> Iterator[ModuleType]:
    """The script `name` of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with scripts_by_name():
        spec.loader.exec_module(module)
        yield module
    del sys.modules[spec.name]


@contextmanager
def scripts_by_name() -> Iterator[None]:
    """Scripts of benchmarks/ find each other by name, as they do where one is run."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))

"""A cache of results, limited by bytes."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
SMALLEST_SHARE = 8
"""A result that is larger than the limit divided by this number is not kept."""


class Remembered(Generic[Arguments, Result]):
    """A pure function with a cache of its last results. Unlike functools.lru_cache, it limits their size and not their
    number, because an argument may be a message of a megabyte.

    Example:
        whole = Remembered(render_whole, max_bytes=32 << 20)
    """

    def __init__(self, function: Callable[Arguments, Result], max_bytes: int) -> None:
        self.function = function
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.results: OrderedDict[Any, tuple[Result, int]] = OrderedDict()
        self.lock = threading.Lock()

    def __call__(self, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        key = (arguments, tuple(sorted(named.items()))) if named else arguments
        with self.lock:
            known = self.results.get(key)
            if known is not None:
                self.results.move_to_end(key)
                return known[0]
        result = self.function(*arguments, **named)
        size = size_of(key) + size_of(result)
        with self.lock:
            if key not in self.results and size * SMALLEST_SHARE <= self.max_bytes:
                self.results[key] = result, size
                self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                _, (_, size) = self.results.popitem(last=False)
                self.num_bytes -= size
        return result


def size_of(value: Any) -> int:
    """Approximate size of a value in bytes; shared parts are counted twice."""
    if isinstance(value, str):
        return sys.getsizeof(value)
    if isinstance(value, np.ndarray):
        return int(value.nbytes) + 128
    if isinstance(value, (tuple, list)):
        return sys.getsizeof(value) + sum(map(size_of, value))
    if (names := getattr(type(value), "__dataclass_fields__", None)) is not None:
        return 64 + sum(size_of(getattr(value, name)) for name in names)
    return sys.getsizeof(value)

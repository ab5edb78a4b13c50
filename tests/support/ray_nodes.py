"""A Ray cluster of two nodes on this machine, for a module's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.paths import TESTS


@contextmanager
def two_nodes(**size: int) -> Iterator[Any]:
    """The cluster; `size` is what each node has, as `num_cpus` and `object_store_memory`."""
    import ray
    from ray.cluster_utils import Cluster

    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])  # actors import the test's module
    os.environ.update(RAY_worker_niceness="0", PYTHONPATH=path)  # else workers give way to whatever else a machine does
    made = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    made.add_node(**size)
    ray.init(address=made.address, log_to_driver=False, logging_level="error")
    yield made
    ray.shutdown()
    made.shutdown()

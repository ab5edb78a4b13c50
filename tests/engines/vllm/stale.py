"""A worker extension that loads as vLLM by itself would, for a test: imported by vLLM's process."""

from __future__ import annotations

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from turnwise.engines.vllm.worker import FileEngine

STALE = "stale"


class StaleEngine(FileEngine):
    """Leaves packed copies as they are."""

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)


class Extension:
    """Nothing by itself."""


WeightTransferEngineFactory.register_engine(STALE, StaleEngine)

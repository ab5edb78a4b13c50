"""MLflow, by default with a SQLite file in the folder of the run."""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.runs.trackers.attempts import COLUMNS, SampledAttempt, cells
from turnwise.runs.trackers.library import CannotOpen, TrackedRun

URI = "MLFLOW_TRACKING_URI"
TABLES = "mlflow.loggedArtifacts"
"""The tag that tells MLflow's pages which artifacts are tables."""
MAX_TABLES, MAX_PARAMS, MAX_METRICS, LONGEST_NAME, LONGEST_PARAM = 20, 100, 1000, 250, 6000


class MLflow:
    """A run of MLflow: metrics by step, the recipe as parameters and as recipe.json, tables and the curve as artifacts.

    MLflow keeps every value that it ever got, so a resume does not send steps again that it has. Parameters cannot
    change: those of the first start stay, and recipe.json is that of the last resume.
    """

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing leaves this machine unless it is asked for
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._metric = Metric
        own = not os.environ.get(URI)
        run.folder.mkdir(parents=True, exist_ok=True)
        folder = run.folder.resolve()
        uri = f"sqlite:///{folder / 'mlflow.db'}" if own else os.environ[URI]
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        place = (folder / "artifacts").as_uri() if own else None
        found = self._client.get_run(run.id) if run.id else self._new_run(run, place)
        self.id = found.info.run_id
        self.where = f"mlflow ui --backend-store-uri {uri}" if own else f"run {self.id} in {URI}"
        if place is not None and not found.info.artifact_uri.startswith(place + "/"):
            raise CannotOpen(
                f"the MLflow run in {run.folder} keeps its files in {found.info.artifact_uri}; move the run folder "
                f"back, or remove {run.folder} and {run.folder}.json to begin a new one"
            )
        self._tables: list[dict[str, str]] = json.loads(found.data.tags.get(TABLES, "[]"))
        if run.id:
            self._client.update_run(self.id, status="RUNNING")
        else:
            params = [Param(name, value) for name, value in flattened(run.recipe)]
            for start in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self.id, params=params[start : start + MAX_PARAMS])
        self._client.log_dict(self.id, dict(run.recipe), "recipe.json")

    def _new_run(self, run: TrackedRun, place: str | None) -> Any:
        experiment = self._client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.project, place)
        return self._client.create_run(number, run_name=run.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        values = [self._metric(safe_name(name), float(value), now, step) for name, value in metrics.items()]
        for start in range(0, len(values), MAX_METRICS):
            self._client.log_batch(self.id, metrics=values[start : start + MAX_METRICS])

    def log_attempts(self, step: int, rows: Sequence[SampledAttempt]) -> None:
        path = f"attempts/step-{step:06d}.json"
        self._client.log_dict(self.id, {"columns": list(COLUMNS), "data": cells(rows)}, path)
        table = {"path": path, "type": "table"}
        self._tables = [*(other for other in self._tables if other != table), table][-MAX_TABLES:]
        self._client.set_tag(self.id, TABLES, json.dumps(self._tables))

    def log_curve(self, step: int, path: Path) -> None:
        self._client.log_artifact(self.id, str(path))

    def close(self) -> None:
        self._client.set_terminated(self.id, "FINISHED")


def flattened(tree: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of a nested value by dotted names, as text that MLflow takes."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    inside = [(f"{name}.{key}" if name else str(key), value) for key, value in items]
    if not inside:
        text = tree if isinstance(tree, str) else json.dumps(tree)
        yield safe_name(name), text[:LONGEST_PARAM]
    for key, value in inside:
        yield from flattened(value, key)


def safe_name(name: str) -> str:
    """The name as MLflow allows it: pass@4 becomes pass_at_4."""
    name = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)[:LONGEST_NAME]
    return name if posixpath.normpath(name) == name and name[0] not in "./" else re.sub(r"[./]", "_", name)

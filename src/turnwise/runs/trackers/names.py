"""The trackers that a recipe may name: what each needs, and how it is opened."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from turnwise.runs.folder import RunFolder
from turnwise.runs.tracker import read_metrics
from turnwise.runs.trackers.isolated import PATIENCE, IsolatedTracker, Patience
from turnwise.runs.trackers.library import LibraryTracker, TrackedRun
from turnwise.runs.trackers.record import TrackerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerLibrary:
    """A library that can be named."""

    packages: tuple[str, ...]
    """Modules that have to be there."""
    extra: str
    """Of turnwise, which installs them."""
    place: str
    """module:class of what opens it, imported late."""
    advice: str
    """What to do where it does not open."""
    replaces: bool = False
    """Whether steps that come again after a resume replace those from before."""


LIBRARIES: Mapping[str, TrackerLibrary] = {
    "tensorboard": TrackerLibrary(
        packages=("tensorboardX",),
        extra="trackers",
        place="turnwise.runs.trackers.tensorboard:TensorBoard",
        advice="make the run folder writable, or remove tensorboard from trackers",
        replaces=True,
    ),
    "wandb": TrackerLibrary(
        packages=("wandb",),
        extra="trackers",
        place="turnwise.runs.trackers.wandb:WeightsAndBiases",
        advice="check the network and the login, or set WANDB_MODE=offline",
    ),
    "mlflow": TrackerLibrary(
        packages=("mlflow", "sqlalchemy", "alembic"),
        extra="trackers",
        place="turnwise.runs.trackers.mlflow:MLflow",
        advice="check MLFLOW_TRACKING_URI, or unset it to use a file in the run folder",
    ),
    "trackio": TrackerLibrary(
        packages=("trackio",),
        extra="trackio",
        place="turnwise.runs.trackers.trackio:Trackio",
        advice="check TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL, and tracking.project",
    ),
}


def check_installed(names: Sequence[str]) -> None:
    """ValueError where a library that is named is not there."""
    for name in names:
        library = LIBRARIES[name]
        for package in library.packages:
            if importlib.util.find_spec(package) is None:
                raise ValueError(f'tracker {name} needs {package}: pip install "turnwise[{library.extra}]"')


def open_trackers(
    names: Sequence[str],
    recipe: Mapping[str, Any],
    project: str,
    folder: RunFolder,
    after: int = -1,
    patience: Patience = PATIENCE,
) -> list[IsolatedTracker]:
    """The named trackers, open; ValueError in a line where one is not. `after` is the last step that a resume keeps."""
    names = tuple(dict.fromkeys(names))
    check_installed(names)
    if not names:
        return []
    folder.trackers.mkdir(exist_ok=True)
    earlier = read_metrics(folder.metrics)
    with ExitStack() as stack:
        made = []
        for name in names:
            library, record = LIBRARIES[name], TrackerRecord(folder.trackers / f"{name}.json")
            if library.replaces:
                record.step = min(record.step, after)
            run = TrackedRun(
                recipe=recipe,
                project=project,
                name=folder.path.resolve().name,
                folder=folder.trackers / name,
                id=record.id,
                after=after,
            )
            opened = IsolatedTracker(
                name,
                partial(open_library, library, run),
                record,
                earlier=earlier,
                replaces=library.replaces,
                patience=patience,
            )
            stack.callback(opened.abandon)
            made.append(opened)
        for name, tracker in zip(names, made, strict=True):
            tracker.wait_until_open(LIBRARIES[name].advice)
        stack.pop_all()
    return made


def open_library(library: TrackerLibrary, run: TrackedRun) -> LibraryTracker:
    module, _, name = library.place.partition(":")
    opened: LibraryTracker = getattr(import_module(module), name)(run)
    return opened

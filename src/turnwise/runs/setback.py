"""A run is set back to a checkpoint: what it recorded after that gives way to what comes now.

After a kill that is what was recorded since the last checkpoint, and training makes it again at once: it is removed.
Where later checkpoints were written and are damaged, lost or passed over, it may be the work of days: it is moved into
a folder of the run, and nothing ever removes it.
"""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime
from pathlib import Path

from turnwise.atomic import sync_folder, write_atomically
from turnwise.runs import archive, evaluations, tracker
from turnwise.runs.checkpoint import Checkpoint, pointed_step, written_steps
from turnwise.runs.folder import RunFolder

log = logging.getLogger(__name__)


def cut_back(folder: RunFolder, checkpoint: Checkpoint | None, checkpoint_every: int) -> None:
    """Make the records of a run end where its checkpoint does, so that it can go on from there."""
    step, again = -1, None
    if checkpoint is not None:
        state = checkpoint.state
        step, again = checkpoint.step, state.get("evaluating", state.get("examined"))  # as earlier versions call it
    last = last_recorded(folder)
    if checkpoint is None and last > 0:
        raise ValueError(
            f"{folder.path} has records up to step {last} and no checkpoint; put one back from a copy into "
            f"{folder.checkpoints}, or train anew with another out=..."
        )
    if checkpoint is not None:
        tracker.check_seal(folder.metrics, checkpoint.state.get("metrics", {}))
        if checkpoint.step and not folder.metrics.exists():
            log.warning("%s is not there; the run goes on without what was in it", folder.metrics)
        if last > step and is_passed_over(folder, checkpoint, last, checkpoint_every):
            log.warning("what came after step %d is in %s now", step, move_aside(folder, step))
    tracker.cut_back(folder.metrics, step)
    archive.cut_back(folder.archive, step)
    evaluations.cut_back(folder.evaluations, step, again=again)


def last_recorded(folder: RunFolder) -> int:
    """The last step of which there is a record; -1 where there is none."""
    logged = [int(line["step"]) for line in tracker.read_metrics(folder.metrics)]
    evaluated = [version for version, _ in evaluations.evaluated(folder.evaluations)]
    return max([-1, *logged, *archive.archived_steps(folder.archive), *evaluated])


def is_passed_over(folder: RunFolder, checkpoint: Checkpoint, last: int, checkpoint_every: int) -> bool:
    """Whether a later checkpoint than this was written, so that more is lost than a kill costs: the pointer names
    another, one is there, or there are records of steps that come after one was due."""
    due = (checkpoint.step // checkpoint_every + 1) * checkpoint_every
    latest = max(written_steps(folder.checkpoints), default=checkpoint.step)
    return pointed_step(folder.checkpoints) != checkpoint.step or latest > checkpoint.step or last > due


def move_aside(folder: RunFolder, step: int) -> Path:
    """The new folder that has everything recorded after a step. The lines of metrics are copied: cutting them away
    comes after this, and a kill in between loses nothing."""
    aside = folder.set_back / f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S.%fZ}-to-step-{step:06d}"
    aside.mkdir(parents=True)
    if lines := tracker.lines_after(folder.metrics, step):
        write_atomically(aside / folder.metrics.name, lines)
    later = [
        *(archive.step_path(folder.archive, found) for found in archive.archived_steps(folder.archive) if found > step),
        *evaluations.paths_after(folder.evaluations, step),
        *(path for path in (folder.summary, folder.curve) if path.exists()),
    ]
    for path in later:
        place = aside / path.relative_to(folder.path)
        place.parent.mkdir(exist_ok=True)
        os.rename(path, place)
        sync_folder(place.parent)
    sync_folder(aside)
    sync_folder(folder.set_back)
    return aside

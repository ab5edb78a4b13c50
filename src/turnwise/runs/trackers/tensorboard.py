"""TensorBoard, by event files of tensorboardX in the folder of the run."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from turnwise.runs.trackers.attempts import COLUMNS, SampledAttempt, cells
from turnwise.runs.trackers.library import TrackedRun


class TensorBoard:
    """Scalars by step, the recipe and tables of attempts as text, the curve as an image.

    A resume writes further event files into the same folder. They begin with the step from which TensorBoard hides what
    earlier files have, so steps that are made again replace those from before.
    """

    id = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        logging.getLogger("tensorboardX").setLevel(logging.ERROR)  # NaN is a value like others here
        purge = run.after + 1 if run.id else None
        earlier = len(list(run.folder.glob("events.*")))  # names have seconds only, and are read in their order
        suffix = f".{earlier:06d}"
        self._writer = SummaryWriter(logdir=str(run.folder), purge_step=purge, filename_suffix=suffix)
        self.where = f"tensorboard --logdir {run.folder}"
        recipe = json.dumps(dict(run.recipe), indent=2, ensure_ascii=False)
        code = "\n".join(f"    {line}" for line in recipe.splitlines())
        self._writer.add_text("recipe", code, max(run.after, 0))
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name.replace("@", "_at_"), float(value), step)  # which it takes for "_"
        self._writer.flush()

    def log_attempts(self, step: int, rows: Sequence[SampledAttempt]) -> None:
        self._writer.add_text("attempts", markdown_table(rows), step)
        self._writer.flush()

    def log_curve(self, step: int, path: Path) -> None:
        from matplotlib.image import imread

        pixels = (imread(path)[..., :3] * 255).round().astype("uint8")
        self._writer.add_image("curve", pixels, step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def markdown_table(rows: Sequence[SampledAttempt]) -> str:
    """The rows as Markdown in which all text is literal."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([literal(str(cell)) for cell in row] for row in cells(rows))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def literal(text: str) -> str:
    """Text that Markdown shows as it is: what a model wrote becomes no link and no image that a browser would fetch."""
    escaped = re.sub(r"[^\w\s]", lambda found: f"&#{ord(found[0])};", text).replace("_", "&#95;")
    return "<br>".join(escaped.splitlines())

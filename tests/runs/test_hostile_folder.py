"""Run folders of somebody hostile: whatever lies in them, reading them runs nothing."""

import pickle
import shutil
from contextlib import suppress

import pytest

from support.running import micro_recipe, resume, train
from turnwise.cli.commands import main
from turnwise.runs.checkpoint import latest_checkpoint
from turnwise.runs.checksums import NAME, write_checksums

PLANTED = (".metadata", "__0_0.distcp", "pytorch_model.bin", "optimizer.pt", "training_args.bin", "rng_state.pth")
"""Files that somebody's loader would unpickle."""


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def plant(path, ran):
    """Put a pickle at a path, and have the checkpoint say that this is how it was written."""
    path.write_bytes(pickle.dumps(Evil(ran)))
    for folder in (path.parent, path.parent.parent):
        if (folder / NAME).is_file():
            write_checksums(folder)


@pytest.mark.slow
def test_no_file_of_a_run_folder_is_unpickled(tmp_path):
    whole, run, ran = tmp_path / "run", tmp_path / "copy", tmp_path / "ran"
    small = ["steps=1", "groups_per_step=1", "sft.updates=0", "evaluation.tasks=1", "evaluation.final_tasks=1"]
    train(micro_recipe(tmp_path, *small, "credit.name=gae", "kl.coefficient=0.1"))
    assert {"optimizer", "critic"} <= {each.name for each in (whole / "checkpoints" / "step-000001").iterdir()}
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    there = latest_checkpoint(whole / "checkpoints").path.relative_to(whole)
    added = [there / folder / name for folder in ("", "optimizer", "critic") for name in PLANTED]
    for file in (*files, *added):
        shutil.copytree(whole, run)
        plant(run / file, ran)
        for work in (lambda: resume(run), lambda: main(["verify", str(run), "--groups", "1", "--tokens", "200"])):
            with suppress(Exception):  # it may be refused, as it likes
                work()
        assert not ran.exists(), file
        shutil.rmtree(run)

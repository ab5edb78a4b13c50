"""A training step from the command line to the optimizer: which files it goes through, as docs/ names them."""

import re
import sys
from pathlib import Path
from types import FrameType

import turnwise
from support.paths import DOCS
from support.running import micro_toml
from turnwise.cli.commands import main
from turnwise.learn.stepper import Stepper

SOURCE = Path(turnwise.__file__).parent
PASSED_ON = {"schedule"}
"""The watchdog and the workers call what they are given; they have no part in what is done."""


def files_on_the_stack():
    """Files of ours that have a frame on the stack, the outermost first."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE) and path.relative_to(SOURCE).parts[0] not in PASSED_ON:
            found.append(str(path.relative_to(SOURCE)))
        frame = frame.f_back
    return list(dict.fromkeys(reversed(found)))


def test_a_step_goes_through_five_files_and_the_docs_name_them(tmp_path, monkeypatch):
    seen, made = [], Stepper.__init__

    def watched(self, *arguments, **named):
        made(self, *arguments, **named)
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(lambda *_: seen.append(files_on_the_stack()))

    monkeypatch.setattr(Stepper, "__init__", watched)
    small = ["sft.updates=0", "steps=1", "groups_per_step=1", "evaluation.final_tasks=1"]
    assert main(["train", str(micro_toml(tmp_path)), f"out={tmp_path / 'run'}", *small]) == 0
    assert len(seen) == 1
    (line,) = re.findall(r"From the command line to `optimizer.step\(\)`: (.*?)\.\n\n", architecture(), re.DOTALL)
    assert seen[0] == re.findall(r"`([\w/]+\.py)`", line)
    assert len(seen[0]) <= 5


def architecture():
    return (DOCS / "explanation" / "architecture.md").read_text()

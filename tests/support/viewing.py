"""Run folders for the viewer's tests: a plain one, and one with all that a page must not fall for."""

import json

import numpy as np

from support.making import make_turn
from turnwise.messages import Message, ToolCall
from turnwise.runs.archive import Record, write_step
from turnwise.runs.evaluations import write_evaluation
from turnwise.runs.folder import RunFolder
from turnwise.types import Break, Group, Status, Task, Trajectory, TurnTiming

WORDS = ["<|im_start|>", "<|im_end|>", "\n", "user", "assistant", " get", " answer", " amber", " cedar", " birch"]
SCRIPT = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
HOSTILE = f"{SCRIPT} \x1b[31mred\x1b[0m \ud800 \u202eright\x07 &amp; </pre>"


def make_run(path, *, steps=3, recipe=None, finished=True):
    """A run with two groups of three attempts in each step and an evaluation."""
    folder = RunFolder.create(path, {"steps": steps, "out": str(path), "optimizer": {"rate": 0.1}, **(recipe or {})})
    write_tokenizer(folder)
    with folder.metrics.open("w") as file:
        for step in range(1, steps + 1):
            line = {"step": step, "success": step / 10, "loss": 1 / step, "seconds/step": 2.0}
            file.write(json.dumps(line) + "\n")
    for step in range(1, steps + 1):
        write_step(folder.archive, step, [made_group(step, number) for number in range(2)])
    write_evaluation(folder.evaluations, steps, "greedy", [made_group(0, 5, kept=False).group], 1.0, str)
    if finished:
        folder.summary.write_text('{"updates": 3}')
    return folder


def write_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="user"))
    tokenizer.decoder = decoders.Fuse()
    checkpoint = folder.checkpoints / "step-000001"
    checkpoint.mkdir(parents=True)
    tokenizer.save(str(checkpoint / "tokenizer.json"))


def made_group(step, number, kept=True):
    """Three attempts: two that part in the second action, one that ends after its first turn."""
    timing = TurnTiming(0.01, 0.2, 0.3, 0.05)
    call = Message("assistant", "", calls=(ToolCall("get", {"name": "amber"}),))
    first = make_turn(
        [0, 3, 2, 8],
        [5, 7, 1],
        logprobs=[-0.1, -2.0, -0.01],
        version=step,
        said=call,
        timing=timing,
        heard=(Message("user", "leads to cedar"),),
    )
    history = [0, 3, 2, 8, 5, 7, 1, 2, 0, 4]
    answers = [[6, 8, 1], [6, 9, 1]]
    attempts = [
        Trajectory(
            (first, make_turn(history, answer, version=step, timing=timing, said=Message("assistant", "answer"))),
            Status.finished,
            float(place == 0) + step / 100,
            {"lookups": 1.0},
        )
        for place, answer in enumerate(answers)
    ]
    attempts.append(Trajectory((make_turn([0, 3, 2, 8], [6, 1]),), Status.too_long, 0.0))
    group = Group(Task(f"task-{step}-{number}", "hops", {"links": 2}), tuple(attempts))
    credit = tuple(
        np.full(len(turn.action), value, np.float32)
        for value, attempt in zip((1.0, -0.5, -0.5), attempts, strict=True)
        for turn in attempt.turns
    )
    weights = tuple(np.full(len(part), 0.25, np.float32) for part in credit)
    return Record(group, kept, credit, weights) if kept else Record(group, False)


def make_hostile_run(path, observation_length=200_000):
    """A run whose texts want to be more than text, and whose files are damaged."""
    folder = RunFolder.create(path, {"steps": 9, "name": HOSTILE.replace("\ud800", "")})
    broken = make_turn([3, 4, 5], [6], said=Message("assistant", HOSTILE), broke=Break.template)
    said = Message("assistant", HOSTILE, thinking=HOSTILE, calls=(ToolCall(SCRIPT, {"x": HOSTILE}),), fault=HOSTILE)
    long = HOSTILE + "x" * observation_length
    turns = (make_turn([1, 2], [3], said=said, heard=(Message(SCRIPT, long), Message("user", "\x00" * 50))), broken)
    bad = Trajectory(turns, Status.finished, 1.0, {SCRIPT: 1.0})
    gone = Trajectory((), Status.failed, failure=HOSTILE)
    group = Group(Task(SCRIPT, SCRIPT, {"x": HOSTILE}), (bad,), (gone,))
    write_step(folder.archive, 1, [Record(group, False)])
    good = write_step(folder.archive, 2, [made_group(2, 0)])
    data = good.read_bytes()
    (folder.archive / "step-000003.parquet").write_bytes(data[: len(data) // 2])
    (folder.archive / "step-000004.parquet").write_bytes(b"")
    (folder.archive / "step-000005.parquet").symlink_to("nowhere")
    folder.metrics.write_text('{"step": 1, "loss": NaN, "<b>x</b>": 1}\n{"step": "no"}\n[1]\n\x1b[31m\n{"step": 2, "lo')
    folder.summary.write_text("{")
    return folder

"""Runs that were damaged, lost their pointer, or have two owners: one line each, and nothing lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.running import SilentScreen, micro_recipe, micro_toml, resume, train, train_once, unadvised, untimed
from turnwise.cli.commands import main
from turnwise.runs.checkpoint import latest_checkpoint, read_checkpoint
from turnwise.runs.checksums import Damaged
from turnwise.runs.folder import RunFolder
from turnwise.runs.lock import InUse, owned

COMMANDS: dict[str, list[str]] = {
    "resume": ["train", "--resume"],
    "eval": ["eval"],
    "verify": ["verify"],
    "cost": ["cost"],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 4 steps with a reference; checkpoints of steps 2 and 4 are there."""
    settings = ("kl.coefficient=0.1", "evaluation.final_tasks=4", "evaluation.tasks=4")
    return train_once(tmp_path_factory.mktemp("whole"), *settings)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(whole, tmp_path / "run"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def one_line(capsys: pytest.CaptureFixture[str], command: str, run: RunFolder) -> str:
    """What a command says that refuses a run and leaves it as it is."""
    before = contents(run.path)
    assert main([*COMMANDS[command], str(run.path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("turnwise: ")
    after = contents(run.path)
    assert {name: after[name] for name in after if name != "lock"} == {n: before[n] for n in before if n != "lock"}
    return line


def step(run: RunFolder, number: int) -> Path:
    return run.checkpoints / f"step-{number:06d}"


@pytest.mark.parametrize("spoil", [flip, truncate])
def test_every_file_of_a_checkpoint_counts(run: RunFolder, spoil: Callable[[Path], None], caplog: Any) -> None:
    files = sorted(path for path in step(run, 4).rglob("*") if path.is_file())
    names = {str(path.relative_to(step(run, 4))) for path in files}
    assert {"model.safetensors", "config.json", "tokenizer.json", "state.json", "SHA256SUMS"} <= names
    assert any(name.startswith("optimizer/") for name in names)
    for path in files:
        content = path.read_bytes()
        spoil(path)
        caplog.clear()
        found = latest_checkpoint(run.checkpoints)
        assert found is not None
        assert found.step == 2
        [said] = caplog.messages
        assert f"{step(run, 4)} is damaged: " in said
        assert path.name in said or path.name == "SHA256SUMS"
        with pytest.raises(Damaged):
            read_checkpoint(step(run, 4))
        path.write_bytes(content)
    read_checkpoint(step(run, 4))


@pytest.mark.parametrize("spoil", [flip, truncate])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer/contents.json", "state.json", "tokenizer.json", "config.json"]
)
def test_where_no_checkpoint_is_whole_every_command_says_so(
    run: RunFolder, capsys: pytest.CaptureFixture[str], name: str, spoil: Callable[[Path], None]
) -> None:
    for path in run.checkpoints.glob("step-*"):
        spoil(path / name)
    for command in COMMANDS:
        line = one_line(capsys, command, run)
        assert "has no whole checkpoint" in line
        assert f"step-000004 is damaged: {name}" in line


@pytest.mark.parametrize("spoil", [flip, truncate])
@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("config.json", ("resume", "eval", "verify", "cost")),
        ("reference/model.safetensors", ("resume", "eval", "verify", "cost")),
        ("archive/step-000004.parquet", ("cost",)),
        ("metrics.jsonl", ("resume",)),
    ],
)
def test_a_damaged_file_is_named_when_it_is_read(
    run: RunFolder,
    capsys: pytest.CaptureFixture[str],
    name: str,
    commands: tuple[str, ...],
    spoil: Callable[[Path], None],
) -> None:
    spoil(run.path / name)
    for command in commands:
        assert Path(name).name in one_line(capsys, command, run)


@pytest.mark.parametrize("name", ["checkpoints/step-000004/model.safetensors", "archive/step-000004.parquet"])
def test_verify_names_what_others_could_pass_over(
    run: RunFolder, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    flip(run.path / name)
    assert main(["verify", str(run.path), "--groups", "1", "--dtype", "float32"]) == 1
    printed = capsys.readouterr()
    assert any(line.startswith("DIFFERENT") and str(Path(name).parent) in line for line in printed.out.splitlines())
    assert "Traceback" not in printed.err


def test_a_checkpoint_that_a_person_named_is_not_replaced_by_another(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(step(run, 4) / "model.safetensors")
    for command in (["eval"], ["serve"]):
        assert main([*command, str(run.path), "--checkpoint", "4"]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "step-000004 is damaged: model.safetensors does not match" in line
    recipe, other = micro_toml(run.path.parent), run.path.parent / "other"
    for command in (["train"], ["play"], ["eval", "--recipe", str(recipe), str(step(run, 4))]):
        model = f"model={{path='{step(run, 4)}'}}"
        named = [] if command[0] == "eval" else [str(recipe), model, "sft.updates=0", f"out={other}"]
        assert main([*command, *named]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "step-000004 is damaged: model.safetensors does not match" in line
    assert not other.exists()


def test_a_resume_from_the_one_before_ends_where_the_run_did(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = untimed(run.metrics)
    archived = contents(run.archive)
    flip(step(run, 4) / "model.safetensors")
    assert main(["train", "--resume", str(run.path)]) == 0
    printed = unadvised(capsys.readouterr().err)
    assert "step-000004 is damaged: model.safetensors does not match its checksum; using step-000002" in printed[0]
    [aside] = run.set_back.iterdir()
    assert printed[1:] == [f"warning: what came after step 2 is in {aside} now"]
    assert untimed(run.metrics) == before
    assert [line["step"] for line in untimed(aside / "metrics.jsonl")] == [3, 4]
    assert contents(aside / "archive") == {name: archived[name] for name in archived if name > "step-000002.parquet"}
    read_checkpoint(step(run, 4))


@pytest.mark.parametrize("pointer", [None, b"\xff\x00"])
def test_a_lost_pointer_loses_nothing(run: RunFolder, pointer: bytes | None) -> None:
    before = contents(run.path)
    (run.checkpoints / "latest").unlink()
    if pointer is not None:
        (run.checkpoints / "latest").write_bytes(pointer)
    assert resume(run.path) is not None
    after = contents(run.path)
    made = {"lock", "checkpoints/latest", "summary.json", "curve.png"}
    assert {name: after[name] for name in after if name not in made} == {n: before[n] for n in before if n not in made}


def test_a_run_without_checkpoints_does_not_begin_again(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run.checkpoints)
    assert "has records up to step 4 and no checkpoint; put one back from a copy" in one_line(capsys, "resume", run)


# ---------------------------------------------------------------- owners


def test_a_second_owner_is_refused_and_changes_nothing(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with owned(run.path):
        before = contents(run.checkpoints)
        assert main(["train", "--resume", str(run.path)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert contents(run.checkpoints) == before
    assert "is in use by process" in line
    assert "since 20" in line


def test_a_run_owns_its_folder_from_start_to_end(tmp_path: Path) -> None:
    seen: list[str] = []

    class Second(SilentScreen):
        """Tries to take the folder whenever the run says something."""

        def attempt(self) -> None:
            try:
                with owned(tmp_path / "run"):
                    seen.append("free")
            except InUse:
                seen.append("owned")

        def begin(self, what: str, total: int, done: int = 0) -> None:
            super().begin(what, total, done)
            self.attempt()

        def show(self, done: int, metrics: Any) -> None:
            self.attempt()

    train(micro_recipe(tmp_path, "steps=1", "evaluation.final_tasks=2", "evaluation.tasks=2"), Second())
    assert set(seen) == {"owned"}
    with owned(tmp_path / "run"):
        pass


def test_readers_do_not_mind_an_owner(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with owned(run.path):
        assert main(["eval", str(run.path), "--tasks", "2"]) == 0
        assert main(["verify", str(run.path), "--step", "2", "--groups", "1", "--dtype", "float32"]) in (0, 2)
    assert "in use" not in capsys.readouterr().err

"""`turnwise report` and `turnwise compare` as commands."""

import os
import subprocess
import sys

import pytest

from support.reported import check_page, recorded_run
from turnwise.cli.commands import main


@pytest.fixture
def run(tmp_path):
    return recorded_run(tmp_path / "run", {"e": [1.0], "f": [0.0]})


def test_a_report_goes_into_the_run_folder(run, capsys):
    assert main(["report", str(run.folder.path)]) == 0
    assert capsys.readouterr().out == f"wrote {run.folder.report}\n"
    check_page(run.folder.report.read_bytes())


def test_a_report_and_a_picture_go_where_they_are_asked_for(run, tmp_path, capsys):
    out, picture = tmp_path / "a.html", tmp_path / "b.png"
    assert main(["report", str(run.folder.path), "--out", str(out), "--png", str(picture)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\nwrote {picture}\n"
    assert not run.folder.report.exists()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_a_run_that_has_only_begun(run, tmp_path):
    run.folder.metrics.write_text('{"step": 0, "success": null, "nonfinite": ["success"]}\n{"st')
    assert main(["report", str(run.folder.path), "--png", str(tmp_path / "b.png")]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "RUN", "--out", "RUN"], "is a folder; name a file in it"),
        (["report", "RUN", "--out", "RUN/no/a.html"], "is not a folder; make it or choose another file"),
        (["report", "RUN/archive"], "is not the folder of a run"),
        (["compare", "RUN"], "compare needs two runs or more"),
        (["compare", "RUN", "RUN/archive"], "is not the folder of a run"),
    ],
)
def test_mistakes_are_one_line(run, capsys, arguments, said):
    assert main([argument.replace("RUN", str(run.folder.path)) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--out", "--png"])
def test_a_place_that_cannot_be_written_to_is_one_line(run, tmp_path, capsys, monkeypatch, option):
    replace = os.replace

    def refused(source, target):
        if str(target).endswith("a.file"):
            raise PermissionError(13, "Permission denied")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refused)
    assert main(["report", str(run.folder.path), option, str(tmp_path / "a.file")]) == 2
    assert "a.file (Permission denied); choose another file" in capsys.readouterr().err


def test_runs_are_compared(run, tmp_path, capsys):
    other = recorded_run(tmp_path / "other", {"e": [1.0], "f": [1.0]})
    page = tmp_path / "compare.html"
    assert main(["compare", str(run.folder.path), str(other.folder.path), "--html", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "recipes: no difference"
    assert lines[-1] == f"wrote {page}"
    assert lines[-2].startswith("sampled: other against run: +50.0 points")
    check_page(page.read_bytes())


@pytest.mark.parametrize("command", ["report", "compare"])
def test_neither_imports_torch(run, command):
    path = str(run.folder.path)
    arguments = [command, path, *([path] if command == "compare" else [])]
    code = (
        "import sys; from turnwise.cli.commands import main; main(sys.argv[1:]); "
        "print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr

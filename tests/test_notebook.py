"""The notebook of the docs: it is valid, says nothing of the machine it was made on, and runs from top to bottom."""

import ast
import re

import nbformat
import pytest

from support.paths import DOCS

PAGE = DOCS / "start" / "notebook.ipynb"
MACHINE = re.compile(r"/(home|root|tmp|work|usr|Users|var|opt)/|[A-Z]:\\\\")


def cells(kind):
    return [cell for cell in nbformat.read(PAGE, as_version=4).cells if cell.cell_type == kind]


def test_it_is_a_valid_notebook_whose_code_compiles():
    nbformat.validate(nbformat.read(PAGE, as_version=4))
    assert len(cells("code")) >= 8
    for cell in cells("code"):
        ast.parse(cell.source)


def test_its_outputs_are_small_and_name_no_machine():
    assert PAGE.stat().st_size < 120_000
    for cell in cells("code"):
        for output in cell.outputs:
            text = str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", ""))
            assert output.output_type != "error"
            assert not MACHINE.search(text)


def test_its_links_lead_somewhere():
    for cell in cells("markdown"):
        for target in re.findall(r"\]\(([^)\s]+)\)", cell.source):
            assert (PAGE.parent / target.partition("#")[0]).exists(), target


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(tmp_path, monkeypatch):
    import os
    from pathlib import Path

    from nbclient import NotebookClient

    import turnwise

    source = str(Path(turnwise.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(PAGE, as_version=4)
    NotebookClient(
        notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output
    )
    [(before, after)] = re.findall(r"held-out success before: (\d+)%, after: (\d+)%", printed)
    assert int(after) >= int(before) + 20
    said_cherry = [int(share) for share in re.findall(r"said cherry (\d+)%", printed)]
    assert said_cherry[-1] > said_cherry[0]
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))

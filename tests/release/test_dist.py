"""The wheel and the sdist, and what a package index shows of them."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from support.paths import ROOT

DIST = runpy.run_path(str(ROOT / ".ci" / "dist.py"))
URL = "https://example.org/someone/turnwise"


def checkout(folder: Path) -> Path:
    """The files of this checkout that packages are made of."""
    names = ["pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"]
    for name in names:
        shutil.copy(ROOT / name, folder / name)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    shutil.copytree(ROOT / "src", folder / "src", symlinks=True, ignore=ignored)
    return folder


def test_links_of_the_readme_become_absolute() -> None:
    text = "[a](docs/a.md#b) ![p](docs/p.png) [c](https://x.org/y) [d](#here)"
    assert DIST["with_addresses"](text, URL) == (
        f"[a]({URL}/blob/main/docs/a.md#b) ![p]({URL}/raw/main/docs/p.png) [c](https://x.org/y) [d](#here)"
    )


def test_an_address_is_written_into_the_project(tmp_path: Path) -> None:
    import tomllib

    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    DIST["give_address"](tmp_path, URL)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == URL
    assert project["scripts"] == {"turnwise": "turnwise.cli.commands:program"}
    assert "urls" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_readme_renders_on_a_package_index() -> None:
    from readme_renderer.markdown import render

    page = render((ROOT / "README.md").read_text())
    assert page is not None
    for tag in ("<h1", "<table", "<img", "<pre"):
        assert tag in page


def test_people_find_the_extras_that_they_are_told_of() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "start" / "install.md").read_text()
    for extra in extras.keys() - {"browser", "dev", "docs", "peers", "templates"}:  # for those who change turnwise
        assert f"`{extra}`" in page, extra
    for extra in ("agents", "all", "envs", "gpu"):
        assert f"| `{extra}` |" in page


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = checkout(tmp_path_factory.mktemp("turnwise"))
    DIST["give_address"](folder, URL)
    return folder, *DIST["build"](folder, tmp_path_factory.mktemp("dist"))


@pytest.mark.slow
def test_packages_are_whole(packages: tuple[Path, Path, Path]) -> None:
    folder, wheel, sdist = packages
    shutil.rmtree(folder / "build", ignore_errors=True)
    for made in (folder / "src").glob("*.egg-info"):
        shutil.rmtree(made)
    assert DIST["problems_of_wheel"](wheel, folder, URL) == []
    assert DIST["problems_of_sdist"](sdist, folder) == []
    assert DIST["problems_of_wheel"](wheel, folder, "") != []  # it has an address


@pytest.mark.slow
def test_a_package_that_lacks_something_is_noticed(packages: tuple[Path, Path, Path], tmp_path: Path) -> None:
    folder, wheel, sdist = packages
    poor = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(poor, "w") as less:
        for name in whole.namelist():
            if "recipes/ppo" not in name and name != "turnwise/py.typed":
                less.writestr(name, whole.read(name))
    found = DIST["problems_of_wheel"](poor, folder, URL)
    assert {text.rpartition("turnwise/")[2] for text in found} == {"recipes/ppo.toml", "py.typed"}
    empty = tmp_path / sdist.name
    with tarfile.open(empty, "w:gz") as files:
        files.add(ROOT / "LICENSE", "turnwise-0/LICENSE")
    assert any("recipes/ppo.toml" in text for text in DIST["problems_of_sdist"](empty, folder))


@pytest.mark.slow
def test_recipes_are_found_in_the_wheel(packages: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Unpacked as pip does it, in an empty folder and without a checkout on the path."""
    with zipfile.ZipFile(packages[1]) as files:
        files.extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); from turnwise.cli.commands import main; main()"
    first_line = (ROOT / "recipes/quickstart.toml").read_text().splitlines()[0].removeprefix("# ")
    for arguments in (["recipes"], ["recipes", "quickstart"]):
        done = subprocess.run(
            [sys.executable, "-I", "-c", code, *arguments],
            cwd=tmp_path / "empty",
            capture_output=True,
            text=True,
            check=True,
        )
        assert first_line in done.stdout

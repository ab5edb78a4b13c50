"""Builds the wheel and the sdist into dist/, from what is committed, and checks what is in them.

    make dist                            # no [project.urls]: turnwise has no address of its own
    make dist URL=https://host/owner/turnwise

With an address, the packages carry it, and the README's links to files of the repository lead there, also on PyPI.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
"""A link of Markdown, or with `!` an image, whose target is a file of the repository."""


def committed(folder: Path) -> None:
    """Put the files of the last commit into a folder, and nothing that only lies beside them."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="tar")
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True).stdout
    if changed:
        print("what is not committed is left out")


def with_addresses(readme: str, url: str) -> str:
    """A README whose links to files of the repository lead to an address."""

    def absolute(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        return f"{picture}[{text}]({url}/{'raw' if picture else 'blob'}/main/{target})"

    return LINK.sub(absolute, readme)


def project_urls(url: str) -> str:
    return "\n".join(
        (
            "[project.urls]",
            f'Repository = "{url}"',
            f'Documentation = "{url}/blob/main/docs/README.md"',
            f'Changelog = "{url}/blob/main/CHANGELOG.md"',
            f'Issues = "{url}/issues"',
            "\n",
        )
    )


def give_address(folder: Path, url: str) -> None:
    """Write an address into the files of a checkout."""
    readme, project = folder / "README.md", folder / "pyproject.toml"
    readme.write_text(with_addresses(readme.read_text(), url))
    marker = "[project.scripts]\n"
    text = project.read_text()
    assert text.count(marker) == 1
    project.write_text(text.replace(marker, project_urls(url) + marker))


def build(folder: Path, out: Path) -> tuple[Path, Path]:
    """The wheel and the sdist of a checkout. The wheel is made from the sdist, so that this is known to be whole."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def wanted(folder: Path) -> dict[str, bytes]:
    """By path within the package: every file that an installed turnwise must have."""
    source = folder / "src"
    found = [path for path in (source / "turnwise").rglob("*") if path.is_file()]
    found += (source / "turnwise" / "recipes").glob("*.toml")  # rglob does not follow the link
    return {path.relative_to(source).as_posix(): path.read_bytes() for path in found}


def problems_of_wheel(wheel: Path, folder: Path, url: str) -> list[str]:
    """What is wrong with a wheel; nothing where it is right."""
    with zipfile.ZipFile(wheel) as files:
        held = {name: files.read(name) for name in files.namelist()}
    package = {name: data for name, data in held.items() if name.startswith("turnwise/")}
    (about,) = (name.partition("/")[0] for name in held if name.endswith(".dist-info/METADATA"))
    expected = wanted(folder)
    problems = [f"missing or changed: {name}" for name, data in expected.items() if package.get(name) != data]
    problems += [f"has no place there: {name}" for name in package.keys() - expected.keys()]
    problems += [f"has no place there: {name}" for name in held if not name.startswith(("turnwise/", f"{about}/"))]
    for name in ("turnwise/py.typed", "turnwise/recipes/quickstart.toml", "turnwise/view/page/index.html"):
        if name not in package:
            problems.append(f"missing: {name}")
    if "turnwise = turnwise.cli.commands:program" not in held[f"{about}/entry_points.txt"].decode():
        problems.append("the command turnwise is missing")
    if not any(name.endswith("/LICENSE") for name in held):
        problems.append("the licence is missing")
    return problems + problems_of_description(held[f"{about}/METADATA"].decode(), folder, url)


def problems_of_description(metadata: str, folder: Path, url: str) -> list[str]:
    """What is wrong with what a package index shows."""
    from readme_renderer.markdown import render

    fields = Parser().parsestr(metadata)
    text, problems = str(fields.get_payload()), []
    rendered = render(text) or ""
    if fields["Description-Content-Type"] != "text/markdown" or not all(tag in rendered for tag in ("<h1", "<table")):
        problems.append("the README does not render")
    if url and (left := LINK.findall(re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))):
        problems.append(f"links of the README that lead nowhere: {left}")
    if bool(fields.get_all("Project-URL")) != bool(url):
        problems.append(f"Project-URL: {fields.get_all('Project-URL')}")
    extras = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if set(fields.get_all("Provides-Extra") or ()) != set(extras):
        problems.append("the extras are not those of pyproject.toml")
    return problems


def problems_of_sdist(sdist: Path, folder: Path) -> list[str]:
    """What is wrong with an sdist; nothing where it is right."""
    with tarfile.open(sdist) as files:
        top = files.getnames()[0].partition("/")[0]
        regular = {member.name.removeprefix(f"{top}/") for member in files if member.isfile()}
    needed = {f"src/{name}" for name in wanted(folder)} | {"README.md", "LICENSE", "pyproject.toml", "CHANGELOG.md"}
    problems = [f"missing: {name}" for name in sorted(needed - regular)]
    return problems + [f"has no place there: {name}" for name in regular if name.startswith(("tests/", "runs/"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="", help="where the repository is")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    chosen = parser.parse_args()
    url = chosen.url.rstrip("/")
    if url and not re.fullmatch(r"https?://[^\s\"]+", url):
        sys.exit(f"URL={url} is no address; write for instance URL=https://host/owner/turnwise")
    with tempfile.TemporaryDirectory() as temporary:
        folder, made = Path(temporary) / "turnwise", Path(temporary) / "dist"
        folder.mkdir()
        committed(folder)
        if url:
            give_address(folder, url)
        wheel, sdist = build(folder, made)
        problems = [f"{wheel.name}: {text}" for text in problems_of_wheel(wheel, folder, url)]
        problems += [f"{sdist.name}: {text}" for text in problems_of_sdist(sdist, folder)]
        if problems:
            sys.exit("\n".join(problems))
        shutil.rmtree(chosen.out, ignore_errors=True)
        shutil.copytree(made, chosen.out)
    for name in (wheel.name, sdist.name):
        print(f"{chosen.out / name}: {(chosen.out / name).stat().st_size / 1e6:.2f} MB")
    print(
        "the recipes, the viewer's page and py.typed are inside; the README renders", "" if url else "; no URL is given"
    )


if __name__ == "__main__":
    main()

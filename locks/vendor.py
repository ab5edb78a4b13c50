"""Puts the libraries of the viewer's page into src/turnwise/view/page/vendor, from npm's packages.

    make vendor

The checksum of each package is npm's, and stands here. A package that does not match it is refused.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "src" / "turnwise" / "view" / "page" / "vendor"
PACKAGES = {
    "htm@3.1.1": (
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"preact/standalone.module.js": "preact-htm.js", "LICENSE": "htm.LICENSE"},
    ),
    "preact@10.19.3": (
        "sha512-nHHTeFVBTHRGxJXKkKu5hT8C/YWBkPso4/Gad6xuj5dbptt9iF9NZr9pHbPhBrnT2klheu7mHTxTZ/LjwJiEiQ==",
        {"LICENSE": "preact.LICENSE"},
    ),
    "uplot@1.6.32": (
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {"dist/uPlot.esm.js": "uPlot.esm.js", "dist/uPlot.min.css": "uPlot.min.css", "LICENSE": "uPlot.LICENSE"},
    ),
}
"""By package: npm's checksum, and which of its files becomes which of ours. htm's standalone module has
Preact 10 in it, whose licence comes from Preact's package."""


def checksum(content: bytes) -> str:
    return "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()


def files_of(package: str, expected: str, names: dict[str, str]) -> dict[str, bytes]:
    """By our name: the content of a package's files."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        [archive] = Path(folder).iterdir()
        if checksum(archive.read_bytes()) != expected:
            sys.exit(f"{package} does not match its checksum; nothing was changed")
        with tarfile.open(archive) as opened:
            found = {}
            for inside, name in names.items():
                file = opened.extractfile(f"package/{inside}")
                assert file is not None
                found[name] = file.read()
            return found


def main() -> None:
    fetched = {name: content for package, how in PACKAGES.items() for name, content in files_of(package, *how).items()}
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in fetched.items():
        changed = not (FOLDER / name).is_file() or (FOLDER / name).read_bytes() != content
        (FOLDER / name).write_bytes(content)
        print(f"{name}: {len(content)} bytes{', changed' if changed else ''}")
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(fetched.items()))
    (FOLDER / "SHA256SUMS").write_text(sums)


if __name__ == "__main__":
    main()

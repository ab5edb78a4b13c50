"""Tables: rows of tasks from a file, from a Hugging Face dataset, or from Python code.

    tasks.jsonl                     an object a line
    tasks.json                      a list of objects, or one; or an object a line
    tasks.parquet                   a Parquet file
    hf:openai/gsm8k:main@test       a Hugging Face dataset, its configuration and split; @train unless it says so
    hf:data/mine                    one that `save_to_disk` wrote, or a folder of files; "hf:" may be left out
    my_module:rows                  what a function without arguments returns, or any iterable

Every row has a place, by which a mistake in it is named: tasks.jsonl, row 3.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from turnwise.data.json_lines import numbered_lines, parse_line

Row = tuple[str, Any]
"""Its place, and what is there."""


def read_rows(source: str) -> Iterator[Row]:
    """The rows of a table."""
    if source.startswith("hf:"):
        return placed(source, hugging_face_rows(source))
    path = Path(source)
    if path.is_dir():
        return placed(source, hugging_face_rows(f"hf:{source}"))
    if path.suffix == ".parquet":
        return placed(source, parquet_rows(path))
    if path.suffix in (".jsonl", ".json", ".ndjson") or path.exists():
        return json_file_rows(path) if path.suffix == ".json" else json_rows(path)
    if ":" in source:
        return placed(source, python_rows(source))
    raise ValueError(f"there is no file {source}; give one of JSON lines or Parquet, hf:NAME, or module:function")


def is_columnar(source: str) -> bool:
    """Whether the rows of a table all have the same fields, where some rows have nothing."""
    return source.startswith("hf:") or source.endswith(".parquet") or Path(source).is_dir()


def placed(source: str, rows: Iterable[Any]) -> Iterator[Row]:
    return ((f"{source}, row {number}", row) for number, row in enumerate(rows, 1))


def json_rows(path: Path) -> Iterator[Row]:
    """The rows of JSON lines; empty lines count and hold none."""
    for number, line in numbered_lines(path):
        where = f"{path}, row {number}"
        yield where, parse_line(line, where)


def json_file_rows(path: Path) -> Iterator[Row]:
    """The objects of a JSON list, one JSON object, or JSON lines."""
    lines = [line for _, line in numbered_lines(path)]
    try:
        whole = json.loads("\n".join(lines))
    except (ValueError, RecursionError):
        return json_rows(path)
    return placed(str(path), whole if isinstance(whole, list) else [whole])


def parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"cannot read {path}: {str(error).splitlines()[0]}") from None


def hugging_face_rows(source: str) -> Iterator[Any]:
    """The rows of a dataset of the Hub or of a folder."""
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f'{source} needs datasets: pip install "turnwise[datasets]"')
    import datasets

    name, _, split = source.removeprefix("hf:").partition("@")
    name, _, configuration = name.partition(":")
    split = split or "train"
    try:
        if (Path(name) / "state.json").is_file():
            dataset = datasets.load_from_disk(name)
        elif (Path(name) / "dataset_dict.json").is_file():
            dataset = datasets.load_from_disk(name)[split]
        else:
            dataset = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the library raises what its transports raise
        message = (str(error).splitlines() or [""])[0]
        raise ValueError(f"cannot load {source}: {type(error).__name__}: {message[:300]}") from None
    return iter(dataset)


def python_rows(source: str) -> Iterator[Any]:
    """What a function returns, or what a name stands for."""
    module, _, name = source.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{source}: {error}; is the module on PYTHONPATH?") from None
    except AttributeError:
        raise ValueError(f"{source}: module {module} has no {name}") from None
    rows = value() if callable(value) else value
    if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes, Mapping)):
        raise ValueError(f"{source} gives {type(rows).__name__}; it needs to give rows, one object per task")
    return iter(rows)

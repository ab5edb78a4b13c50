"""Arrow columns: text, lists, structs and maps built from whole numpy arrays, and read back.

No loop here runs over tokens. Offsets are 64 bit, so a column may hold more than 2 GB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


def text_column(texts: Sequence[str]) -> Any:
    """A column of `texts`, every Python string included.

    A lone surrogate, which an environment may decode from half an escape in a tool call, has no UTF-8. It is stored as
    the three bytes it would have, which other readers may reject and `texts_of` gives back.
    """
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

    try:
        return pa.array(texts, pa.large_string())
    except UnicodeEncodeError:
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    places = pa.py_buffer(_offsets([len(text) for text in encoded]))
    return pa.LargeStringArray.from_buffers(len(encoded), places, pa.py_buffer(b"".join(encoded)))


def texts_of(column: Any) -> list[str]:
    """Inverse of `text_column`."""
    import pyarrow as pa

    return [text.decode("utf-8", "surrogatepass") for text in column.cast(pa.large_binary()).to_pylist()]


def number_column(values: Iterable[float], dtype: Any) -> Any:
    """A column of one number per row."""
    import pyarrow as pa

    return pa.array(np.fromiter(values, dtype))


def list_column(sizes: Sequence[int], values: Any) -> Any:
    """A column of lists: the first `sizes[0]` of `values`, the next `sizes[1]`, and so on."""
    import pyarrow as pa

    return pa.LargeListArray.from_arrays(pa.array(_offsets(sizes)), values)


def token_column(sizes: Sequence[int], parts: Sequence[NDArray[Any]], dtype: Any) -> Any:
    """A column of lists of numbers, from arrays which end to end hold the values of all rows."""
    import pyarrow as pa

    return list_column(sizes, pa.array(np.concatenate([np.zeros(0, dtype), *parts])))


def pieces_of(column: Any, sizes: Iterable[int]) -> Iterator[NDArray[Any]]:
    """The values of a column of lists, rows end to end, cut into read-only views of `sizes`."""
    values = column.values.to_numpy()
    for start, end in pairwise(_offsets(sizes).tolist()):
        yield values[start:end]


def bounds_of(column: Any) -> list[tuple[int, int]]:
    """Where the values of each row start and end in `column.values`."""
    return list(pairwise(column.offsets.to_pylist()))


def struct_column(fields: Mapping[str, Any]) -> Any:
    """A column of structs."""
    import pyarrow as pa

    return pa.StructArray.from_arrays(list(fields.values()), names=list(fields))


def fields_of(column: Any) -> dict[str, Any]:
    """Inverse of `struct_column`."""
    return dict(zip((field.name for field in column.type), column.flatten(), strict=True))


def map_column(maps: Sequence[Mapping[str, float]]) -> Any:
    """A column of maps from names to numbers."""
    import pyarrow as pa

    places = pa.array(_offsets([len(one) for one in maps]).astype(np.int32))
    names = text_column([name for one in maps for name in one])
    return pa.MapArray.from_arrays(places, names, number_column((v for one in maps for v in one.values()), np.float64))


def maps_of(column: Any) -> list[dict[str, float]]:
    """Inverse of `map_column`."""
    pairs = list(zip(texts_of(column.keys), column.items.to_pylist(), strict=True))
    return [dict(pairs[start:end]) for start, end in bounds_of(column)]


def _offsets(sizes: Iterable[int]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.fromiter(sizes, np.int64))])

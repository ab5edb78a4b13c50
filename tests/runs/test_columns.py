import numpy as np
import pytest

from turnwise.runs.columns import (
    bounds_of,
    fields_of,
    list_column,
    map_column,
    maps_of,
    number_column,
    pieces_of,
    struct_column,
    text_column,
    texts_of,
    token_column,
)


@pytest.mark.parametrize("texts", [[], [""], ["a", "", "ünï 🜁\x00"], ["\ud800", "\ud83d\ude00", "half \udce9 byte"]])
def test_every_string_comes_back(texts):
    assert texts_of(text_column(texts)) == texts


def test_ordinary_text_is_ordinary_utf8():
    column = text_column(["ü", "🜁"])
    column.validate(full=True)
    assert column.to_pylist() == ["ü", "🜁"]


def test_lists_are_cut_from_whole_arrays():
    parts = [np.array([1, 2], np.int32), np.array([], np.int32), np.array([3], np.int32)]
    column = token_column([0, 3], parts, np.int32)
    assert column.to_pylist() == [[], [1, 2, 3]]
    assert bounds_of(column) == [(0, 0), (0, 3)]
    assert [piece.tolist() for piece in pieces_of(column, [2, 0, 1])] == [[1, 2], [], [3]]
    assert token_column([], [], np.float32).to_pylist() == []


def test_structs_in_lists():
    structs = struct_column({"n": number_column([1, 2, 3], np.int32), "t": text_column(["a", "b", "c"])})
    column = list_column([1, 2], structs)
    assert column.to_pylist() == [[{"n": 1, "t": "a"}], [{"n": 2, "t": "b"}, {"n": 3, "t": "c"}]]
    read = fields_of(column.values)
    assert read["n"].to_pylist() == [1, 2, 3]
    assert texts_of(read["t"]) == ["a", "b", "c"]


def test_maps_keep_their_order():
    maps = [{}, {"z": 1.5, "a": -0.0}, {"\ud800": 2.0}]
    assert [list(one.items()) for one in maps_of(map_column(maps))] == [list(one.items()) for one in maps]
    assert maps_of(map_column([])) == []

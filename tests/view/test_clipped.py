import json
import math

from turnwise.view.clipped import as_bytes, clipped, number


def test_long_texts_are_cut_and_say_how_long_they_are():
    assert clipped("abc", "task", limit=2) == {"text": "ab", "length": 3, "part": "task"}


def test_json_has_every_string_and_no_number_that_is_none():
    assert json.loads(as_bytes({"a": "\ud800é", "b": number(math.nan), "c": number(1 / 3)})) == {
        "a": "\ud800é",
        "b": None,
        "c": 0.333333,
    }
    assert as_bytes("é") == '"é"'.encode()

import json

from support.worlds import COUNT, write_package
from turnwise.data.factbook import COUNTRIES, PASSAGES, clean, fields_of, make, name_of


def test_every_field_is_a_passage(tmp_path):
    make(write_package(tmp_path / "package.tgz"), tmp_path)
    passages = [json.loads(line) for line in (tmp_path / PASSAGES).read_text().splitlines()]
    countries = json.loads((tmp_path / COUNTRIES).read_text())
    assert len(countries) == COUNT
    assert len(passages) == sum(map(len, countries.values()))
    assert [passage["id"] for passage in passages] == [str(number) for number in range(len(passages))]
    [capital] = [one["contents"] for one in passages if one["contents"].startswith('"Landddd: Capital"\n')]
    assert capital == '"Landddd: Capital"\nname: Townddd (since 1901)'


def test_parts_are_kept_apart_and_empty_ones_left_out():
    page = {"Geography": {"Area": {"text": "big", "total": {"text": " 7  sq km"}, "note": None, "x": {"text": "++ "}}}}
    assert fields_of(page) == {"Area": {"": "big", "total": "7 sq km"}}
    assert fields_of({"Geography": {"Coastline": {"text": "++"}}}) == {}


def test_marks_of_line_ends_are_gone():
    assert clean(" ++ urban: 100%; ++ rural:  98% ++") == "urban: 100%; rural: 98%"


def test_names_are_what_people_say():
    names = {"conventional short form": {"text": "none"}, "conventional long form": {"text": "Republic of X"}}
    assert name_of("xy", {"Government": {"Country name": names}}) == "Republic of X"
    assert name_of("zh", {}) == "Atlantic Ocean"

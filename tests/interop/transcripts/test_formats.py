"""Every format: read, written and read again, from files too; what is lost is what the page says."""

import json
import runpy

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.making import few
from support.paths import ROOT
from support.transcribed import SAMPLES, TALK, texts, transcripts
from turnwise.interop.transcripts.cell import ReadingNotes
from turnwise.interop.transcripts.formats import FORMATS, as_columns, read_row, read_transcripts, write_row
from turnwise.interop.transcripts.transcript import LOSSES, Transcript, check_writable
from turnwise.messages import Message, ToolCall
from turnwise.recipe.warm_start import SftConfig

NAMES = sorted(FORMATS)


def again(transcript, name, how="auto"):
    """A transcript that was written in a format and read, by its name or by what it looks like."""
    (read,) = read_row(("talks.jsonl, row 1", json.loads(json.dumps(write_row(transcript, name)))), how)
    return read


def without(transcript, losses):
    for loss in losses:
        transcript = LOSSES[loss][0](transcript)
    return transcript


@few
@given(transcript=transcripts())
def test_a_round_trip_loses_what_is_listed_and_no_more(transcript):
    for name, format in FORMATS.items():
        read = again(transcript, name)
        assert without(read, format.loses) == without(transcript, format.loses)
        assert again(transcript, name, name) == read


@pytest.mark.parametrize("name", NAMES)
def test_what_is_listed_is_lost(name):
    """The losses of a format, as its own round trips show them, are those of its file and of the page."""
    lost = {loss for loss, transcript in SAMPLES.items() if again(transcript, name) != transcript}
    assert lost == set(FORMATS[name].loses)
    row = next(
        line for line in (ROOT / "docs/reference/transcripts.md").read_text().splitlines() if f"| `{name}` |" in line
    )
    assert {loss for loss, (_, words) in LOSSES.items() if words in row} == lost


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", pytest.param("folder", marks=pytest.mark.slow)])
def test_files_of_every_kind(tmp_path, name, kind):
    other = Transcript(
        (Message("user", "b?"), Message("assistant", "", calls=(ToolCall("other", {"deep": {"x": [1, None]}}),))),
        (False, True),
        reward=0.0,
    )
    rows, path = [write_row(one, name) for one in (TALK, other)], tmp_path / f"talks.{kind}"
    if kind == "jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)))
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == "parquet":
        pq.write_table(as_columns(rows), path)
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset(as_columns(rows)).save_to_disk(str(path))
    loses = FORMATS[name].loses
    read = list(read_transcripts(str(path)))
    assert [without(one, loses) for one in read] == [without(one, loses) for one in (TALK, other)]
    assert read[0].place == f"{path}, row 1"


def test_a_file_may_mix_formats(tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(write_row(TALK, name)) + "\n" for name in NAMES))
    every = tuple(LOSSES)
    assert [without(one, every) for one in read_transcripts(str(path))] == [without(TALK, every)] * len(NAMES)


def test_the_recipe_names_the_formats():
    assert set(SftConfig.model_fields["format"].annotation.__args__) == {"auto", "turnwise", *FORMATS}
    made = runpy.run_path(str(ROOT / "docs" / "make_transcripts.py"))
    assert set(made["ABOUT"]) == set(FORMATS)


def test_what_no_format_can_hold_is_refused():
    call = Message("assistant", "", calls=(ToolCall("get", {}), ToolCall("get", {"name": "x"})))
    ask, result = Message("user", "a"), Message("tool", "r")
    for messages, says in [
        ((ask, call, ask), "a call has no result"),
        ((ask, call, result), "a call has no result"),
        ((ask, call, result, result, result), "more results than calls"),
        ((ask, call, Message("narrator", "x")), "the role 'narrator' is unknown"),
    ]:
        with pytest.raises(ValueError, match=says):
            check_writable(Transcript(messages, tuple(message is call for message in messages)))
    check_writable(Transcript((ask, call), (False, True)))
    check_writable(Transcript((ask, call, result, result), (False, True, False, False)))


# ---------------------------------------------------------------- hostile rows

wrong = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(2**64), 1e308, float("nan"), float("inf"), "\ud800", "", "assistant", "{", "[[["])
    | st.floats()
    | texts
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def places_in(value, above=()):
    """Every place in a row."""
    yield above
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from places_in(part, (*above, key))


def changed(value, place, new):
    if not place:
        return new
    first, *rest = place
    parts = dict(value) if isinstance(value, dict) else list(value)
    parts[first] = changed(parts[first], rest, new)
    return parts


def complaint(row, how, columnar):
    """What reading a row says; nothing if it can be read, and then its texts are texts."""
    try:
        found = read_row(("talks.jsonl, row 7", row), how, ReadingNotes(columnar=columnar))
    except ValueError as error:
        return f"{type(error).__name__} {error}"
    for read in found:
        assert any(read.trained)
        json.dumps([[m.content, m.thinking] for m in read.messages], ensure_ascii=False).encode()
    return ""


ROWS = {name: json.loads(json.dumps(write_row(TALK, name))) for name in NAMES}


@few
@given(data=st.data(), anything=st.lists(wrong, min_size=len(NAMES), max_size=len(NAMES)), columnar=st.booleans())
def test_a_row_with_anything_anywhere_is_read_or_named_in_one_line(data, anything, columnar):
    for (name, row), new in zip(ROWS.items(), anything, strict=True):
        place = data.draw(st.sampled_from(list(places_in(row))))
        for how in (name, "auto"):
            said = complaint(changed(row, place, new), how, columnar)
            assert not said or said.startswith("ValueError talks.jsonl, row 7: ")
            assert "\n" not in said


@pytest.mark.parametrize("name", NAMES)
def test_every_place_of_a_row_can_be_wrong(name):
    row = ROWS[name]
    for place in places_in(row):
        for new in (None, 3, "", "x", "\ud800", True, [], [[]], {}, {"x": 10**400}, float("nan")):
            said = complaint(changed(row, place, new), name, columnar=False)
            assert not said or said.startswith("ValueError talks.jsonl, row 7: ")
            assert "\n" not in said


def test_nesting_and_huge_numbers_in_a_file(tmp_path):
    path = tmp_path / "bad.jsonl"
    deep = '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}"
    for text, says in [
        (deep, "nested too deeply"),
        ('{"messages": 1' + "0" * 9999 + "}", "number is too long"),
        ('{"messages": ', "not JSON"),
        ('"messages"', "needs to be an object, got text"),
        ("[]", "needs to be an object, got a list"),
        ("{}", "is no transcript|has no "),
    ]:
        path.write_text(json.dumps(write_row(TALK, "openai")) + "\n" + text)
        with pytest.raises(ValueError, match=says) as raised:
            list(read_transcripts(str(path)))
        assert str(raised.value).startswith(f"{path}, row 2: ")
        assert "\n" not in str(raised.value)

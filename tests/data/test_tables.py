import sys

import pyarrow
import pytest
from pyarrow import parquet

from turnwise.data.tables import read_rows

ROWS = [{"question": "a", "answers": ["x", "y"]}, {"question": "b", "answers": ["z"]}]


def test_json_lines_are_counted_with_the_empty_ones(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert list(read_rows(str(path))) == [(f"{path}, row 1", {"a": 1}), (f"{path}, row 3", {"a": 2})]


def test_parquet(tmp_path):
    path = tmp_path / "tasks.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert list(read_rows(str(path))) == [(f"{path}, row 1", ROWS[0]), (f"{path}, row 2", ROWS[1])]


def test_hugging_face_datasets_from_a_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made, "test": made.select([1])}).save_to_disk(str(tmp_path / "splits"))
    assert [row for _, row in read_rows(f"hf:{tmp_path / 'one'}")] == ROWS
    assert [row for _, row in read_rows(f"hf:{tmp_path / 'splits'}@test")] == ROWS[1:]
    with pytest.raises(ValueError) as error:
        list(read_rows(f"hf:{tmp_path / 'nowhere'}"))
    assert str(error.value).startswith(f"cannot load hf:{tmp_path / 'nowhere'}: ")
    assert "\n" not in str(error.value)


def test_python_code(tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text(
        "TEN = [{'n': n} for n in range(10)]\ndef rows():\n    yield from TEN\nONE = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [row["n"] for _, row in read_rows("my_rows:rows")] == list(range(10))
    assert next(read_rows("my_rows:TEN")) == ("my_rows:TEN, row 1", {"n": 0})
    for source, message in {
        "my_rows:ONE": "gives int; it needs to give rows",
        "my_rows:NONE": "has no NONE",
        "my_row:x": "is the module on PYTHONPATH",
    }.items():
        with pytest.raises(ValueError, match=message):
            list(read_rows(source))
    sys.modules.pop("my_rows")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"a": 1}\n{', "x.jsonl, row 2: not JSON (Expecting property name"),
        ("x.jsonl", b"\xff\xfe\x00", "is not text"),
        ("x.jsonl", None, "cannot read"),
        ("x.parquet", b"nonsense", "cannot read"),
        ("x", None, "there is no file"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        list(read_rows(str(path)))
    assert message in str(error.value)
    assert "\n" not in str(error.value)

import pytest

from turnwise.runs.trackers.record import TrackerRecord


def test_what_was_kept_comes_back(tmp_path):
    path = tmp_path / "wandb.json"
    record = TrackerRecord(path)
    assert (record.id, record.step, record.curve) == ("", -1, False)
    assert not path.exists()
    record.opened("3f9a")
    record.reached(4)
    record.reached(3)
    record.drawn()
    again = TrackerRecord(path)
    assert (again.id, again.step, again.curve) == ("3f9a", 4, True)


def kept(id='"a"', step="1", curve="false"):
    return f'{{"id": {id}, "step": {step}, "curve": {curve}}}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", '{"id": "a"}'),
        *(kept(id='"../a"'), kept(id='""'), kept(id="3"), kept(id='"a b"')),
        *(kept(step='"1"'), kept(step="true"), kept(curve="0")),
    ],
)
def test_a_damaged_record_is_named(tmp_path, text):
    (tmp_path / "wandb.json").write_text(text)
    with pytest.raises(ValueError, match=r"wandb.json is damaged; remove it to begin a new run in this tracker$"):
        TrackerRecord(tmp_path / "wandb.json")

import pytest
import torch

from turnwise.learn.snapshot import names_in, read_snapshot, write_snapshot


def test_what_is_read_is_what_was_written(tmp_path):
    kept = {"a/b.c": torch.randn(3, 2), "count": torch.tensor(7), "nothing": torch.zeros(0)}
    write_snapshot(tmp_path / "x", kept)
    assert names_in(tmp_path / "x") == kept.keys()
    room = {name: torch.zeros_like(tensor) for name, tensor in kept.items()}
    read_snapshot(tmp_path / "x", room)
    assert all(torch.equal(room[name], kept[name]) for name in kept)


def test_a_snapshot_can_be_written_over(tmp_path):
    for value in (1.0, 2.0):
        write_snapshot(tmp_path, {"a": torch.tensor(value)})
    read_snapshot(tmp_path, room := {"a": torch.tensor(0.0)})
    assert room["a"] == 2.0


def test_parameters_are_filled_in_place(tmp_path):
    write_snapshot(tmp_path, {"a": torch.ones(2)})
    parameter = torch.nn.Parameter(torch.zeros(2))
    read_snapshot(tmp_path, {"a": parameter})
    assert parameter.tolist() == [1.0, 1.0]


def test_one_that_is_not_whole_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not whole"):
        names_in(tmp_path)

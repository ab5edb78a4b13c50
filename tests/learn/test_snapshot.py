import json
import pickle
from contextlib import suppress

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from turnwise.learn import snapshot
from turnwise.learn.snapshot import names_in, read_snapshot, stage, write_snapshot


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


@pytest.mark.parametrize("damage", ["contents.json", "shard", "half a shard"])
def test_parts_that_are_missing_are_noticed(tmp_path, damage):
    write_snapshot(tmp_path, {"a": torch.ones(4, 2), "b": torch.ones(3)})
    [shard] = tmp_path.glob("*.safetensors")
    if damage == "half a shard":
        shard.write_bytes(shard.read_bytes()[:-9])
    else:
        (shard if damage == "shard" else tmp_path / damage).unlink()
    with pytest.raises(ValueError, match="not whole") as refused:
        names_in(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_tensor_of_which_a_part_is_missing_is_noticed(tmp_path):
    write_snapshot(tmp_path, {"a": torch.ones(4, 2)})
    with pytest.raises(ValueError, match="cannot be read .*Size mismatch"):
        read_snapshot(tmp_path, {"a": torch.ones(8, 2)})
    contents = json.loads((tmp_path / "contents.json").read_text())
    for wrong in ({"a": [8, 2]}, {"a": [4, 2], "b": [1]}, ["a"], {"a": None}):
        (tmp_path / "contents.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="not whole"):
            names_in(tmp_path)
    (tmp_path / "contents.json").write_text(json.dumps(contents))
    assert names_in(tmp_path) == {"a"}


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", [".metadata", "contents.json", "__0_0.distcp", "*.safetensors", "__0.metadata"])
def test_nothing_is_unpickled(tmp_path, name):
    folder, ran = tmp_path / "x", tmp_path / "ran"
    write_snapshot(folder, {"a": torch.ones(2)})
    for path in list(folder.glob(name)) or [folder / name]:
        path.write_bytes(pickle.dumps(Evil(ran)))
    for read in (lambda: names_in(folder), lambda: read_snapshot(folder, {"a": torch.zeros(2)})):
        with suppress(Exception):  # it may be refused
            read()
    assert not ran.exists()
    pickle.loads(pickle.dumps(Evil(ran)))
    assert ran.exists()  # which is what would have been


def test_an_optimizer_of_an_earlier_turnwise_is_refused_in_one_line(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match="as a pickle, which is not read; go on from its checkpoint") as refused:
        names_in(tmp_path)
    assert "\n" not in str(refused.value)


def test_what_pytorch_s_own_writer_wrote_is_read(tmp_path):
    """As in the checkpoints of earlier versions: files have the same names, tensors and metadata."""
    kept = {"a/b.c": torch.randn(3, 2), "count": torch.tensor(7)}
    writer = HuggingFaceStorageWriter(str(tmp_path / "theirs"), save_distributed=True)
    save(dict(kept), storage_writer=writer, no_dist=True)
    write_snapshot(tmp_path / "ours", kept)
    [theirs], [ours] = ((tmp_path / name).glob("*.safetensors") for name in ("theirs", "ours"))
    assert theirs.name == ours.name
    with safe_open(theirs, "pt") as one, safe_open(ours, "pt") as other:
        assert one.metadata() == other.metadata()
        assert set(one.keys()) == set(other.keys())
    (tmp_path / "theirs" / "contents.json").write_text((tmp_path / "ours" / "contents.json").read_text())
    assert names_in(tmp_path / "theirs") == kept.keys()
    room = {name: torch.zeros_like(tensor) for name, tensor in kept.items()}
    read_snapshot(tmp_path / "theirs", room)
    assert all(torch.equal(room[name], kept[name]) for name in kept)


def test_what_is_staged_does_not_change_any_more():
    parameter, tied = torch.nn.Parameter(torch.ones(3)), torch.arange(4.0)
    staged = stage({"a": parameter, "b": tied, "c": tied[1:]})
    with torch.no_grad():
        parameter.zero_()
        tied.zero_()
    assert [staged[name].tolist() for name in "abc"] == [[1.0] * 3, [0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    assert not staged["a"].requires_grad


def test_a_failure_of_the_disk_comes_out_as_it_is(tmp_path, monkeypatch):
    def full(*arguments, **how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_snapshot(tmp_path, {"a": torch.ones(2)})
    assert not (tmp_path / "contents.json").exists()

"""Weights that are published: whole or not there, read where they lie, gone when nobody needs them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from support.acting import tiny_model
from turnwise.weights.manifest import Manifest
from turnwise.weights.published import Published
from turnwise.weights.publisher import Publisher


@pytest.fixture
def publisher(tmp_path):
    publisher = Publisher(tmp_path)
    yield publisher
    publisher.close()


def files_of(publisher):
    return sorted(path.name for path in publisher.folder.iterdir() if path.name != "lock")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_what_was_published(publisher, dtype):
    model = tiny_model(tied=True).to(dtype)
    odd = {"few": torch.arange(3, dtype=torch.int8), "none": torch.zeros(0, 4), "one": torch.tensor(2.5)}
    weights = {**odd, **model.state_dict(), "across": torch.arange(12.0).view(3, 4).T}
    found = publisher.publish(weights, 7)
    assert found.version == 7
    assert set(found) == set(weights)
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_tied_tensor_is_there_once(publisher):
    model = tiny_model(tied=True)
    found = publisher.publish(model.state_dict(), 0)
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
    bytes_of_model = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert bytes_of_model <= found.path.stat().st_size < bytes_of_model + 8192


def test_the_file_is_one_that_safetensors_reads(publisher):
    weights = {**tiny_model().state_dict(), "small": torch.ones(3, dtype=torch.uint8)}
    path = publisher.publish(weights, 3).path
    with safe_open(path, "pt") as file:
        assert file.metadata()["version"] == "3"
        assert set(file.keys()) == set(weights)
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in weights.items())


def test_readers_share_pages_and_cannot_write_to_each_other(publisher):
    path = publisher.publish({"a": torch.ones(1000)}, 0).path
    with Published(path) as one, Published(path) as other:
        one["a"].zero_()
        assert other["a"].sum() == 1000


def test_publishing_again_changes_nothing_that_was_read(publisher):
    source = torch.zeros(5)
    with publisher.publish({"a": source}, 0) as first:
        source += 1
        second = publisher.publish({"a": source}, 1)
        assert len(files_of(publisher)) == 1
        assert first["a"].tolist() == [0.0] * 5
        assert second["a"].tolist() == [1.0] * 5


def test_a_writer_that_fails_leaves_the_version_before(publisher, monkeypatch):
    publisher.publish({"a": torch.zeros(5)}, 0)
    monkeypatch.setattr(os, "rename", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        publisher.publish({"a": torch.ones(5)}, 1)
    assert publisher.newest.version == 0
    assert len(files_of(publisher)) == 1


def test_no_room_is_one_line_that_says_where(publisher, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match="has no room for 4 MiB of weights: No space left"):
        publisher.publish({"a": torch.zeros(1 << 20)}, 1)
    assert files_of(publisher) == []


def test_a_dtype_that_cannot_be_published_is_named(publisher):
    with pytest.raises(ValueError, match="odd is of torch.complex64"):
        publisher.publish({"odd": torch.zeros(2, dtype=torch.complex64)}, 1)


def test_a_file_without_a_version_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="says no version"):
        Manifest.read(tmp_path / "other.safetensors")


WRITER = """
import os, sys, torch
from pathlib import Path
from turnwise.weights.publisher import Publisher
publisher = Publisher(Path(sys.argv[1]))
publisher.publish({"a": torch.zeros(100)}, 0)
rename = os.rename
def stuck(*names):
    print("half", flush=True)
    __import__("time").sleep(60)
os.rename = stuck
publisher.publish({"a": torch.ones(100)}, 1)
"""


def test_a_writer_that_is_killed_leaves_nothing_half_visible_and_is_cleared_away(tmp_path, publisher):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "half\n"
    [folder] = [path for path in tmp_path.iterdir() if path != publisher.folder]
    Publisher(tmp_path).close()
    assert folder.exists()  # its owner lives
    [visible] = folder.glob("*.safetensors")
    with Published(visible) as weights:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert weights.version == 0
        deadline = time.monotonic() + 600
        while folder.exists() and time.monotonic() < deadline:
            Publisher(tmp_path).close()
        assert weights["a"].tolist() == [0.0] * 100
    assert list(tmp_path.iterdir()) == [publisher.folder]


def test_closing_removes_the_folder(tmp_path):
    publisher = Publisher(tmp_path)
    path: Path = publisher.publish({"a": torch.zeros(3)}, 0).path
    publisher.close()
    publisher.close()
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []

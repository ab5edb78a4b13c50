"""Failures of the disk, whoever meets them."""

import errno
import os
import resource

import pytest

from turnwise.disk import in_words, is_failure, named_failures


@pytest.fixture
def small_files():
    """No file may have more than 4096 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_failures(number):
    error = OSError(number, os.strerror(number), "runs/a/metrics.jsonl")
    assert is_failure(error)
    assert in_words(error) == f"cannot write runs/a/metrics.jsonl ({os.strerror(number)})"
    assert in_words(OSError(number, "x")) == f"cannot write ({os.strerror(number)})"


@pytest.mark.parametrize("error", [OSError("no number"), FileNotFoundError(2, "x"), ValueError("No space")])
def test_others(error):
    assert not is_failure(error)


def test_what_a_library_says_in_words_is_the_error_it_was(tmp_path):
    class RustError(Exception):
        pass

    with pytest.raises(OSError, match="No space left") as caught, named_failures(tmp_path):
        raise RustError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path))
    with pytest.raises(OSError, match="quota") as caught, named_failures(tmp_path):
        try:
            raise OSError(errno.EDQUOT, "quota")
        except OSError as error:
            raise RuntimeError("could not save") from error
    assert caught.value.errno == errno.EDQUOT


def test_what_a_library_does_not_say_is_tried(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(RuntimeError, match="unexpected pos"), named_failures(tmp_path):
        raise RuntimeError("unexpected pos 704 vs 598")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), named_failures(tmp_path):
        raise RuntimeError("unexpected pos 704 vs 598")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_grew_to_the_limit_is_found(tmp_path, small_files):
    with pytest.raises(OSError, match="File too large"), named_failures(tmp_path):
        try:
            (tmp_path / "weights").write_bytes(bytes(5000))
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598") from None
    (tmp_path / "weights").write_bytes(b"small")
    with pytest.raises(RuntimeError, match="a mistake of our own"), named_failures(tmp_path):
        raise RuntimeError("a mistake of our own")


def test_an_interrupt_is_let_through(tmp_path):
    with pytest.raises(KeyboardInterrupt), named_failures(tmp_path):
        raise KeyboardInterrupt

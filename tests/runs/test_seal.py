"""Every bit of a Parquet file of ours counts."""

import numpy as np
import pytest

from making import make_group
from turnwise.runs.archive import Record, read_step, to_table, write_step
from turnwise.runs.checksums import Damaged
from turnwise.runs.seal import check_seal
from turnwise.types import turns_of


@pytest.fixture
def written(tmp_path):
    group = make_group([1.0, 0.0])
    rng = np.random.default_rng(0)
    credit, weights = (tuple(rng.normal(size=len(turn.action)) for turn in turns_of([group])) for _ in range(2))
    records = [Record(group, True, credit, weights)]
    return write_step(tmp_path, 3, records), records


def test_a_flipped_bit_is_found_or_changes_nothing(written):
    """The latter in the key of the seal itself."""
    path, records = written
    whole = path.read_bytes()
    said = []
    bits = range(0, 8 * len(whole), 101)
    for bit in bits:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            read = read_step(path)
        except ValueError as error:
            said.append(str(error))
        else:
            assert to_table(3, read).equals(to_table(3, records))
    assert all(str(path) in line and "\n" not in line for line in said)
    assert len(said) > len(bits) - 20


def test_a_truncated_file_is_found(written):
    path, _ = written
    whole = path.read_bytes()
    for size in (0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(
            ValueError, match=r"(is not a Parquet file|does not match its checksum); remove it or restore it"
        ):
            read_step(path)


def test_content_that_parquet_would_read_is_refused(written):
    """A changed logprob leaves a file that any reader takes: only the seal knows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, _ = written
    whole = path.read_bytes()
    for place in range(4, len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        try:
            pq.ParquetFile(pa.BufferReader(bytes(flipped))).read()
        except (pa.ArrowException, OSError):
            continue
        path.write_bytes(flipped)
        with pytest.raises(Damaged, match="does not match its checksum"):
            read_step(path)
        return
    raise AssertionError("Parquet notices everything by itself")


def test_files_from_before_there_were_seals_pass(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), tmp_path / "old.parquet")
    check_seal((tmp_path / "old.parquet").read_bytes(), tmp_path / "old.parquet")

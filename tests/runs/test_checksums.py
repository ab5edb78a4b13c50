import shutil
import subprocess

import pytest

from turnwise.runs.checksums import NAME, Damaged, check_checksums, write_checksums


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "sealed"
    (folder / "deep").mkdir(parents=True)
    (folder / "model.bin").write_bytes(bytes(range(256)) * 10)
    (folder / "deep" / "état.json").write_text("{}")
    (folder / "empty").touch()
    write_checksums(folder)
    return folder


def test_a_whole_folder_passes(folder):
    check_checksums(folder)


def test_a_copy_elsewhere_passes(folder, tmp_path):
    check_checksums(shutil.copytree(folder, tmp_path / "copy"))


@pytest.mark.parametrize("name", ["model.bin", "deep/état.json", NAME])
def test_every_flipped_bit_is_found(folder, name):
    path = folder / name
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 67):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(Damaged, match="is damaged: "):
            check_checksums(folder)
    path.write_bytes(whole)
    check_checksums(folder)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "model.bin").unlink(), "model.bin is missing"),
        (lambda folder: (folder / "model.bin").write_bytes(b""), "model.bin does not match its checksum"),
        (lambda folder: (folder / "more").touch(), "more was added after it was written"),
        (lambda folder: (folder / NAME).unlink(), f"it has no readable {NAME}"),
        (lambda folder: (folder / NAME).write_bytes(b"\xff"), f"it has no readable {NAME}"),
        (lambda folder: (folder / NAME).write_text("nonsense"), f"{NAME} is not a list of checksums"),
        (lambda folder: (folder / NAME).write_text(""), "was added after it was written"),
    ],
)
def test_damage_is_named(folder, spoil, said):
    spoil(folder)
    with pytest.raises(Damaged, match=said):
        check_checksums(folder)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="coreutils is not installed")
def test_the_usual_tool_reads_it(folder):
    subprocess.run(["sha256sum", "--check", "--quiet", NAME], cwd=folder, check=True)

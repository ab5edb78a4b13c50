import json

import numpy as np
import pytest

from support.recorded import attempt, record
from turnwise.inspect.attempts import AttemptKey
from turnwise.inspect.run_reader import RunReader, TokenText
from turnwise.runs import archive
from turnwise.runs.archive import read_step, step_path, write_step
from turnwise.runs.folder import RunFolder
from turnwise.types import Status, turns_of


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {"steps": 3})
    return RunReader(folder)


def test_one_attempt_is_read_with_its_credit(run, monkeypatch):
    monkeypatch.setattr(archive, "ROW_GROUP_TOKENS", 20)  # so that a file has several parts
    records = [
        record(str(number), attempt(number, number + 1), attempt(0.5), failed=[attempt(0, 1, Status.failed)])
        for number in range(4)
    ]
    written = []
    for number, one in enumerate(records):
        credit = tuple(
            np.full(len(turn.action), 10 * number + place, np.float32)
            for place, turn in enumerate(turns_of([one.group]))
        )
        written.append(
            archive.Record(one.group, number != 2, credit if number != 2 else (), credit if number != 2 else ())
        )
    path = write_step(run.folder.archive, 7, written)
    import pyarrow.parquet as pq

    assert pq.ParquetFile(path).num_row_groups > 1
    assert len(read_step(path)) == 4
    for number in range(4):
        for place, trajectory in enumerate((*records[number].group.trajectories, *records[number].group.failed)):
            seen = run.attempt(AttemptKey("train", 7, number, place))
            assert seen.task.id == str(number)
            assert seen.trajectory.total == trajectory.total
            assert seen.trajectory.status == trajectory.status
            trained = number != 2 and place < 2
            assert seen.trained == trained
            first = 10 * number + (0, number + 1, 0)[place]
            assert [values[0] for values in seen.credit] == (
                [first + turn for turn in range(len(trajectory.turns))] if trained else []
            )
            assert seen.new_from == tuple(5 * turn for turn in range(len(trajectory.turns)))


def test_what_is_not_there_is_said(run):
    write_step(run.folder.archive, 1, [record("a", attempt(1.0))])
    for key, reason in (
        ("train/1/0/1", "attempts 0 to 0"),
        ("train/1/5/0", "no group 5"),
        ("train/2/0/0", "no attempts of step 2"),
        ("greedy/1/0/0", "no evaluation 'greedy'"),
        ("../../x/1/0/0", "names no attempt"),
    ):
        with pytest.raises(ValueError, match=reason):
            run.attempt(AttemptKey.parse(key))
    step_path(run.folder.archive, 1).write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(ValueError, match="step-000001"):
        run.attempt(AttemptKey.parse("train/1/0/0"))


def test_recipe_and_summary_are_shown_as_far_as_they_can_be_read(run):
    assert run.config == {"steps": 3}
    assert run.summary == {}
    run.folder.summary.write_text("[1]")
    assert run.summary == {}
    run.folder.config.write_text("{")
    assert run.config == {}
    run.folder.metrics.write_text(json.dumps({"step": 0, "loss": 1}) + "\n")
    assert run.refresh()
    assert run.metrics.series("loss") == [(0, 1.0)]


def test_tokens_without_a_tokenizer_are_numbers(run, tmp_path):
    assert run.text_of.pieces([3, 1, 3]) == ["3 ", "1 ", "3 "]
    assert run.text_of.text(np.array([3, 1])) == "3 1"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert TokenText.of_file(tmp_path / "tokenizer.json").pieces([5]) == ["5 "]


def test_tokens_are_shown_by_the_tokenizer_of_the_run(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"get": 0, "amber": 1, "<|im_end|>": 2}, unk_token="get"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = TokenText.of_file(tmp_path / "tokenizer.json")
    assert text.pieces([0, 1, 2, 999, 2**40]) == ["get", "amber", "<|im_end|>", "999 ", f"{2**40} "]


def test_a_tokenizer_that_comes_later_is_found(run):
    from tokenizers import Tokenizer, models

    assert run.text_of.pieces([0]) == ["0 "]
    folder = run.folder.checkpoints / "step-000010"
    folder.mkdir(parents=True)
    Tokenizer(models.WordLevel({"get": 0}, unk_token="get")).save(str(folder / "tokenizer.json"))
    assert run.text_of.pieces([0]) == ["get"]
    assert run.text_of is run.text_of


def test_a_character_of_several_tokens_stands_with_the_first(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = tokenizer.encode("aé🙂b").ids
    text = TokenText.of_file(tmp_path / "tokenizer.json")
    assert text.pieces(tokens) == ["a", "é", "", "🙂", "", "", "", "b"]
    assert text.pieces(tokens[:2]) == ["a", "\ufffd"]

import json
import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.making import lines_run, make_turn
from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.runs.archive import Record, archived_steps, cut_back, prune, read_step, to_table, write_step
from turnwise.tokens import pack_tokens
from turnwise.types import Break, Group, Status, StopReason, Task, Trajectory, Turn, TurnTiming, turns_of

TOKEN_COLUMNS = ("tokens", "logprobs", "versions", "credit", "weights")


def same(one, other):
    """Whether two values are equal in every field, bit for bit where they are arrays."""
    assert type(one) is type(other), (one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, (Record, Group, Task, Trajectory, Turn, TurnTiming, Message)):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if hasattr(one, "items"):
        return list(one) == list(other) and same(list(one.values()), list(other.values()))
    return one == other


text = st.text(st.characters(exclude_categories=()), max_size=8)
"""Every Python string: lone surrogates too."""
number = st.floats(-1e9, 1e9)
token = st.integers(0, 2**31 - 1)
json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
single = st.floats(width=32)
call = st.builds(ToolCall, text.filter(bool), st.dictionaries(text, json_value, max_size=3))
message = st.builds(Message, text, text, text, st.lists(call, max_size=2), text)


@st.composite
def turn_lists(draw, min_size):
    """Turns whose prompts sometimes extend the turn before and sometimes begin anew."""
    turns, history = [], []
    for _ in range(draw(st.integers(min_size, 4))):
        fresh = draw(st.lists(token, min_size=1, max_size=5))
        prompt = [*history, *fresh] if draw(st.booleans()) else fresh
        action = draw(st.lists(token, max_size=4))
        size = len(action)
        logprob = st.just(math.nan) | st.just(-math.inf) | st.floats(max_value=0.0, width=32)
        turns.append(
            Turn(
                prompt=prompt,
                action=action,
                logprobs=draw(st.lists(logprob, min_size=size, max_size=size)),
                versions=draw(st.lists(st.integers(-1, 2**31 - 1), min_size=size, max_size=size)),
                stop=draw(st.sampled_from(StopReason)),
                reward=draw(number),
                said=draw(message),
                heard=draw(st.lists(message, max_size=3)),
                timing=draw(st.builds(TurnTiming, number, number, number, number)),
                broke=draw(st.sampled_from(Break)),
            )
        )
        history = [*prompt, *action]
    return tuple(turns)


@st.composite
def attempts(draw, counts):
    status = draw(st.sampled_from([status for status in Status if status.counts == counts]))
    return Trajectory(
        draw(turn_lists(int(counts))),
        status,
        draw(number),
        draw(st.dictionaries(text, st.floats(), max_size=3)),
        opening=tuple(draw(st.lists(message, max_size=2))),
        tools=draw(st.sampled_from([(), (ToolSpec("get", "é\ud800", {"type": "object"}), ToolSpec("stop"))])),
    )


@st.composite
def record_lists(draw):
    records = []
    for _ in range(draw(st.integers(0, 3))):
        task = Task(draw(text.filter(bool)), draw(text), draw(st.dictionaries(text, json_value, max_size=3)))
        counting, failed = (draw(st.lists(attempts(counts), max_size=2)) for counts in (True, False))
        group = Group(task, tuple(counting), tuple(failed))
        kept = draw(st.booleans())
        credit, weights = (
            tuple(draw(st.lists(single, min_size=len(t.action), max_size=len(t.action))) for t in turns_of([group]))
            if kept
            else ()
            for _ in range(2)
        )
        records.append(Record(group, kept, credit, weights))
    return records


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(records=record_lists())
def test_every_field_comes_back(tmp_path_factory, records):
    path = write_step(tmp_path_factory.mktemp("archive"), 3, records)
    assert same(read_step(path), records)


def trajectory(rng, num_turns, prompt=200, action=100, heard=50, status=Status.finished):
    """An attempt whose history only grows, of random tokens."""
    history = rng.integers(0, 150_000, prompt, np.int32)
    turns = []
    for _ in range(num_turns):
        sampled = rng.integers(0, 150_000, action, np.int32)
        logprobs = -rng.exponential(1.0, action).astype(np.float32)
        versions = np.full(action, 7, np.int32)
        said, answer = Message("assistant", "get amber"), (Message("user", "amber: cedar"),)
        turns.append(Turn(history, sampled, logprobs, versions, StopReason.end_token, 0.0, said, answer))
        history = np.concatenate([history, sampled, rng.integers(0, 150_000, heard, np.int32)])
    return Trajectory(tuple(turns), status, 1.0)


def kept_record(rng, size, num_turns, name="hops-0", **lengths):
    group = Group(Task(name, "hops", {"links": 2}), tuple(trajectory(rng, num_turns, **lengths) for _ in range(size)))
    credit, weights = (tuple(rng.normal(size=len(t.action)) for t in turns_of([group])) for _ in range(2))
    return Record(group, True, credit, weights)


def test_a_growing_history_takes_its_unique_bytes(tmp_path):
    record = kept_record(np.random.default_rng(0), size=1, num_turns=64)
    (attempt,) = record.group.trajectories
    buffer, _ = pack_tokens(attempt.turns)
    unique = buffer.nbytes + 4 * 4 * attempt.num_action_tokens
    naive = sum(len(turn.prompt) for turn in attempt.turns) * 4
    table = to_table(1, [record])
    assert sum(table[name].nbytes for name in TOKEN_COLUMNS) < 1.01 * unique < naive / 4
    assert table["tokens"].nbytes < 1.01 * buffer.nbytes
    assert write_step(tmp_path, 1, [record]).stat().st_size < 1.2 * unique


def test_what_is_read_shares_storage(tmp_path):
    record = kept_record(np.random.default_rng(0), size=1, num_turns=8)
    (read,) = read_step(write_step(tmp_path, 1, [record]))
    turns = read.group.trajectories[0].turns
    assert all(np.shares_memory(turns[0].prompt, turn.prompt) for turn in turns)
    assert not any(
        array.flags.writeable for array in (turns[0].logprobs, turns[0].versions, *read.credit, *read.weights)
    )


def test_python_loops_over_turns_and_not_over_tokens(tmp_path):
    """A hundred times the tokens take exactly the same lines, to write and to read."""

    def of_length(times):
        turns = [make_turn(np.arange(5 * times), np.arange(3 * times)) for _ in range(4)]
        shares = tuple(np.ones(3 * times, np.float32) for _ in turns)
        return [Record(Group(Task("a", "hops"), (Trajectory(tuple(turns), Status.finished),)), True, shares, shares)]

    def lines_to_write(times):
        records = of_length(times)
        return lines_run(lambda: write_step(tmp_path / str(times), 1, records))

    def lines_to_read(times):
        return lines_run(lambda: read_step(tmp_path / str(times) / "step-000001.parquet"))

    assert lines_to_write(1) == lines_to_write(100)
    assert lines_to_read(1) == lines_to_read(100)


def test_groups_without_attempts_and_steps_without_groups(tmp_path):
    empty = Group(Task("a", "hops"), ())
    failed = Group(Task("b", "hops"), (), (Trajectory((), Status.prompt_too_long), Trajectory((), Status.failed)))
    records = [Record(empty, True), Record(empty, False), Record(failed, False), Record(failed, True)]
    assert same(read_step(write_step(tmp_path, 1, records)), records)
    assert read_step(write_step(tmp_path, 2, [])) == []


def test_text_that_has_no_utf8_comes_back(tmp_path):
    odd = "\ud83d \ud83d\ude00 \udce9"
    said = Turn([1], [2], [0.0], [0], StopReason.length, 0.0, Message("assistant", odd), (Message(odd, "🜁"),))
    group = Group(Task(odd, odd, {odd: [odd]}), (Trajectory((said,), Status.finished, 0.0, {odd: 1.0}),))
    records = [Record(group, False)]
    assert same(read_step(write_step(tmp_path, 1, records)), records)


def test_two_groups_of_one_task_stay_apart(tmp_path):
    rng = np.random.default_rng(0)
    records = [kept_record(rng, 2, 1), kept_record(rng, 3, 2)]
    assert same(read_step(write_step(tmp_path, 1, records)), records)


def test_credit_and_weights_fit_the_turns_that_train():
    record = kept_record(np.random.default_rng(0), size=1, num_turns=2)
    with pytest.raises(ValueError, match=r"Record.credit of a kept group .* \[100, 100\] tokens, got \[100\]"):
        Record(record.group, True, record.credit[:1], record.weights)
    with pytest.raises(ValueError, match=r"Record.weights .* got \[100, 99\]"):
        Record(record.group, True, record.credit, (record.weights[0], record.weights[1][1:]))
    with pytest.raises(ValueError, match="Record.credit of a dropped group"):
        Record(record.group, False, record.credit, record.weights)
    assert not record.credit[0].flags.writeable
    assert record.credit[0].dtype == np.float32


def test_the_file_is_an_ordinary_table(tmp_path):
    import pyarrow.parquet as pq

    record = kept_record(np.random.default_rng(0), size=2, num_turns=2)
    table = pq.read_table(write_step(tmp_path, 12, [record, Record(Group(Task("b", "maze"), ()), False)]))
    assert table["step"].to_pylist() == [12, 12, 12]
    assert table["task"].to_pylist() == ["hops-0", "hops-0", "b"]
    assert table["attempt"].to_pylist() == [0, 1, None]
    assert table["status"].to_pylist() == ["finished", "finished", None]
    assert table["kept"].to_pylist() == [True, True, False]
    turn = table["turns"][0].as_py()[1]
    assert turn["said"] == {"role": "assistant", "content": "get amber", "thinking": "", "calls": "", "fault": ""}
    assert turn["broke"] == "none"
    assert [len(table[name][0]) for name in TOKEN_COLUMNS] == [450, 200, 200, 200, 200]


def test_calls_are_json_in_the_table(tmp_path):
    import pyarrow.parquet as pq

    said = Message("assistant", "", "hm", (ToolCall("get", {"name": "é"}), ToolCall("stop", {})), "")
    turn = Turn([1], [2], [0.0], [0], StopReason.length, 0.0, said)
    path = write_step(tmp_path, 1, [Record(Group(Task("a", "hops"), (Trajectory((turn,), Status.finished),)), False)])
    stored = pq.read_table(path)["turns"][0].as_py()[0]["said"]
    assert json.loads(stored["calls"]) == [["get", {"name": "é"}], ["stop", {}]]
    assert stored["thinking"] == "hm"


def test_an_archive_from_before_breaks_and_calls_can_be_read(tmp_path):
    """Its turns have neither a cause nor messages with calls; a broken prefix is then one of unknown cause. Nor are the
    messages of the first prompt known."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    turns = [Turn(p, [9], [-0.5], [0], StopReason.length, 0.0, Message("assistant", "x"), (Message("user", "y"),))
             for p in ([1, 2], [1, 2, 9, 3], [4])]  # fmt: skip
    records = [Record(Group(Task("a", "hops"), (Trajectory(tuple(turns), Status.finished),)), False)]
    path = write_step(tmp_path, 1, records)
    table = pq.read_table(path)
    rows = [
        [{name: older(value) for name, value in turn.items() if name != "broke"} for turn in row.as_py()]
        for row in table["turns"]
    ]
    old = table.set_column(table.column_names.index("turns"), "turns", pa.array(rows, old_type(table["turns"].type)))
    old = old.drop_columns(["opening", "tools"])
    pq.write_table(old.replace_schema_metadata(table.schema.metadata), path)
    assert same(read_step(path), records)
    assert [turn.broke for turn in turns_of([read_step(path)[0].group])] == ["none", "none", "unknown"]


def older(value):
    """A message, or messages, with the fields of the first archives."""
    if isinstance(value, list):
        return [older(one) for one in value]
    return {name: value[name] for name in ("role", "content")} if isinstance(value, dict) else value


def old_type(turns):
    import pyarrow as pa

    message = pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
    types = {"said": message, "heard": pa.large_list(message)}
    fields_ = [(field.name, types.get(field.name, field.type)) for field in turns.value_type if field.name != "broke"]
    return pa.large_list(pa.struct(fields_))


def test_unknown_formats_are_refused_in_one_line(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "step-000001.parquet"
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"turnwise.archive": "99"}), path)
    with pytest.raises(ValueError, match=r"has archive format 99, not 1; read it with the turnwise that wrote it$"):
        read_step(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(ValueError, match="has archive format none"):
        read_step(path)
    path.write_text("torn")
    with pytest.raises(ValueError, match=r"is not a Parquet file; .*$"):
        read_step(path)


def test_task_data_that_is_not_json_is_refused(tmp_path):
    group = Group(Task("odd", "hops", {"set": {1}}), ())
    with pytest.raises(ValueError, match="the data of task odd must be JSON values"):
        write_step(tmp_path, 1, [Record(group, False)])
    assert archived_steps(tmp_path) == []


def test_steps_are_listed_cut_back_and_pruned(tmp_path):
    folder = tmp_path / "archive"
    assert archived_steps(folder) == []
    cut_back(folder, 3)
    for step in (1, 2, 10, 1_000_000):
        write_step(folder, step, [])
    (folder / ".step-000011.parquet.partial").write_text("torn")
    assert archived_steps(folder) == [1, 2, 10, 1_000_000]
    cut_back(folder, 10)
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:06d}.parquet" for step in (1, 2, 10)]
    prune(folder, 2)
    assert archived_steps(folder) == [2, 10]
    prune(folder, 5)
    assert archived_steps(folder) == [2, 10]
    with pytest.raises(ValueError, match="at least 1 step"):
        prune(folder, 0)


def test_writing_a_step_again_replaces_it(tmp_path):
    write_step(tmp_path, 1, [Record(Group(Task("old", "hops"), ()), False)])
    path = write_step(tmp_path, 1, [Record(Group(Task("new", "hops"), ()), False)])
    assert [record.group.task.id for record in read_step(path)] == ["new"]

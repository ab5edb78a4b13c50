"""Whatever a query says, it is answered or refused within its limits, and the file stays as it was."""

import hashlib
import os
import sqlite3
import threading

import pytest

from turnwise.envs.sql.database import Database, QueryError, Table

REFUSED = "only reading is allowed"
HOSTILE = {
    "insert": ("INSERT INTO t VALUES (1, 'x')", REFUSED),
    "update": ("UPDATE t SET a = 0", REFUSED),
    "delete": ("DELETE FROM t", REFUSED),
    "upsert": ("WITH x AS (SELECT 1) INSERT OR REPLACE INTO t SELECT 1, 'x' FROM x", REFUSED),
    "returning": ("DELETE FROM t RETURNING a", REFUSED),
    "create": ("CREATE TABLE u (a)", REFUSED),
    "temporary": ("CREATE TEMP TABLE u AS SELECT * FROM t", REFUSED),
    "view": ("CREATE VIEW v AS SELECT 1", REFUSED),
    "trigger": ("CREATE TRIGGER r AFTER INSERT ON t BEGIN DELETE FROM t; END", REFUSED),
    "index": ("CREATE INDEX i ON t (b)", REFUSED),
    "virtual": ("CREATE VIRTUAL TABLE v USING fts5(x)", REFUSED),
    "drop": ("DROP TABLE t", REFUSED),
    "alter": ("ALTER TABLE t RENAME TO u", REFUSED),
    "schema": ("UPDATE sqlite_master SET sql = ''", "."),
    "pragma": ("PRAGMA journal_mode = WAL", REFUSED),
    "writable schema": ("PRAGMA writable_schema = ON", REFUSED),
    "limits": ("PRAGMA hard_heap_limit = 1", REFUSED),
    "pragma function": ("SELECT * FROM pragma_database_list", "."),
    "attach": ("ATTACH DATABASE '/tmp/turnwise-hostile.sqlite' AS other", REFUSED),
    "detach": ("DETACH DATABASE main", REFUSED),
    "vacuum": ("VACUUM", "."),
    "vacuum into": ("VACUUM INTO '/tmp/turnwise-hostile.sqlite'", "."),
    "reindex": ("REINDEX", "."),
    "analyze": ("ANALYZE", REFUSED),
    "begin": ("BEGIN EXCLUSIVE", REFUSED),
    "lock": ("BEGIN IMMEDIATE TRANSACTION", REFUSED),
    "savepoint": ("SAVEPOINT s", REFUSED),
    "commit": ("COMMIT", REFUSED),
    "two statements": ("SELECT 1; DROP TABLE t", "write one SELECT"),
    "extension": ("SELECT load_extension('/lib/x86_64-linux-gnu/libc.so.6')", REFUSED),
    "tokenizer": ("SELECT fts3_tokenizer('simple')", REFUSED),
    "files": ("SELECT readfile('/etc/passwd')", "."),
    "writing files": ("SELECT writefile('/tmp/turnwise-hostile', 'x')", "."),
    "recursion": ("WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r", REFUSED),
    "recursion in memory": ("WITH RECURSIVE r(n) AS (SELECT 1 UNION SELECT n + 1 FROM r) SELECT * FROM r", REFUSED),
    "product": ("SELECT count(*) FROM t a, t b, t c, t d", "too much work"),
    "sorting a product": ("SELECT a.b || b.b || c.b AS x FROM t a, t b, t c ORDER BY x", "too much (work|memory)"),
    "wide sorting": (
        "SELECT x FROM (SELECT a.b || (SELECT group_concat(b) FROM t WHERE a < 8000) AS x FROM t a) ORDER BY x",
        "too (much|long|large)",
    ),
    "concatenation": ("SELECT group_concat(a.b) FROM t a, t b", "too big|too much work"),
    "huge result": ("SELECT b || (SELECT group_concat(b) FROM t WHERE a < 16000) FROM t", "too large"),
    "zeroblob": ("SELECT zeroblob(1000000000)", REFUSED),
    "randomblob": ("SELECT length(randomblob(1000000000))", REFUSED),
    "printf": ("SELECT printf('%.*c', 1000000000, 'x')", REFUSED),
    "format": ("SELECT format('%999999999d', 1)", "."),
    "hex": ("SELECT hex(zeroblob(500000000))", REFUSED),
    "regexp": ("SELECT * FROM t WHERE b REGEXP '(a+)+$'", "no such function"),
    "like": (f"SELECT * FROM t WHERE b LIKE '{'%a' * 400}'", "pattern too complex"),
    "deep": ("SELECT " + "(" * 5000 + "1" + ")" * 5000, "."),
    "deep sum": ("SELECT " + "+".join(["1"] * 5000), "."),
    "long": ("SELECT '" + "x" * 100_000 + "'", "too large|too big"),
    "compound": (" UNION ".join(["SELECT 1"] * 600), "too many terms"),
    "columns": ("SELECT " + ", ".join(["1"] * 1000), "too many columns"),
    "joins": ("SELECT count(*) FROM " + ", ".join(f"t t{i}" for i in range(80)), "."),
    "nothing": ("", "write one SELECT"),
    "a comment": ("-- DROP TABLE t", "write one SELECT"),
    "nil": ("SELECT '\0'", "null character"),
    "half a character": ("SELECT '\ud800'", "."),
}


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    made = tmp_path_factory.mktemp("database") / "some file?.sqlite"
    connection = sqlite3.connect(made)
    connection.execute("CREATE TABLE t (a INTEGER, b TEXT)")
    connection.executemany("INSERT INTO t VALUES (?, ?)", ((number, str(number)) for number in range(20_000)))
    connection.commit()
    connection.close()
    return made


@pytest.fixture(scope="module")
def database(path):
    made = Database(path, workers=2, seconds=20.0, steps=5_000_000)
    yield made
    made.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_queries_are_refused_or_stopped_and_change_nothing(name, path, database):
    before = digest(path), sorted(os.listdir(path.parent)), os.path.exists("/tmp/turnwise-hostile.sqlite")
    sql, says = HOSTILE[name]
    with pytest.raises(QueryError, match=says) as refused:
        database.query(sql)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) <= 300
    assert before == (digest(path), sorted(os.listdir(path.parent)), os.path.exists("/tmp/turnwise-hostile.sqlite"))
    assert database.query("SELECT count(*) FROM t").rows == ((20_000,),)


def test_results_have_the_rows_that_were_asked_for(database):
    assert database.query("SELECT a, b FROM t", rows=2) == Table(("a", "b"), ((0, "0"), (1, "1")), more=True)
    assert not database.query("SELECT a FROM t WHERE a < 2", rows=2).more
    assert database.query("SELECT a FROM t WHERE a < 0").rows == ()
    assert database.query("SELECT NULL, 1.5, x'00ff', 9e999").rows == ((None, 1.5, "<2 bytes>", "inf"),)
    assert database.query("SELECT name FROM sqlite_master").rows == (("t",),)


def test_a_query_that_no_step_interrupts_is_killed(path):
    """One step of SQLite's may take for ever; the worker is then replaced."""
    database = Database(path, workers=1, patience=5.0)
    assert database.query("SELECT 1").rows == ((1,),)
    (worker,) = database.idle.queue
    worker.process.send_signal(19)  # SIGSTOP: it does nothing any more
    with pytest.raises(QueryError, match="was stopped"):
        database.query("SELECT 1")
    assert worker.process.poll() is not None
    assert database.query("SELECT 2").rows == ((2,),)
    database.close()


def test_a_query_that_takes_too_long_in_one_step_is_ended_by_the_kernel(path):
    letters = "(SELECT group_concat('a', '') AS {} FROM (SELECT 1 FROM t a, t b LIMIT {}))"
    slow = f"SELECT sum(instr(x, y || 'b')) FROM t, {letters.format('x', 90_000)}, {letters.format('y', 45_000)}"
    database = Database(path, workers=1, seconds=1.0, steps=10**12)
    with pytest.raises(QueryError, match="too long or too much memory and was stopped"):
        database.query(slow)
    assert database.query("SELECT 2").rows == ((2,),)
    database.close()


def test_a_worker_that_dies_is_replaced(path):
    database = Database(path, workers=1)
    database.query("SELECT 1")
    (worker,) = database.idle.queue
    worker.process.kill()
    worker.process.wait()
    with pytest.raises(QueryError, match="was stopped"):
        database.query("SELECT 1")
    assert database.query("SELECT 2").rows == ((2,),)
    database.close()


def test_threads_share_the_workers(database):
    found = []

    def ask(number):
        found.append(database.query(f"SELECT {number}, count(*) FROM t").rows[0])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [(number, 20_000) for number in range(20)]


def test_readers_take_no_locks(path, database):
    """Somebody who has the file locked holds up nobody."""
    database.query("SELECT 1")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    assert database.query("SELECT count(*) FROM t").rows == ((20_000,),)
    holder.execute("ROLLBACK")
    holder.close()


def test_a_file_that_is_no_database(tmp_path):
    (tmp_path / "x").write_text("nothing of the kind, but long enough to look at" * 9)
    database = Database(tmp_path / "x", workers=1)
    with pytest.raises(QueryError, match="not a database"):
        database.query("SELECT * FROM sqlite_master")
    database.close()

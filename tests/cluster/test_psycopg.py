"""psycopg 3: parameters in text and binary, server-side cursors, pipelines, COPY, transactions.

node-postgres, tokio-postgres and pgbench are in tests/drivers.
"""

import asyncio
import datetime
import decimal
import uuid

import psycopg
import pytest
from psycopg import errors

# A key of each type, as Python has it; {n} stands for 1 to 30.
TYPES = {
    "int2": lambda n: n, "int4": lambda n: n * 1000, "int8": lambda n: n * 10**12,
    "numeric": lambda n: decimal.Decimal(n) / 4, "text": lambda n: f"key é {n} \\ ' \"", "varchar": lambda n: f"v{n}",
    "uuid": lambda n: uuid.UUID(int=n * 7919),
    "date": lambda n: datetime.date(2024, 1, 1) + datetime.timedelta(n), "bytea": lambda n: bytes([0, n, 255]),
    "timestamptz": lambda n: datetime.datetime(2024, 1, 1, n % 24, 30, n, n * 1001, datetime.timezone.utc),
}

SETUP = "CREATE TABLE t (k int, id int, c text, PRIMARY KEY (k, id));" + "".join(
    f"CREATE TABLE t_of_{name} (k {name} PRIMARY KEY, v int); SELECT shardmap.distribute_table('t_of_{name}', 'k');"
    for name in TYPES) + """
INSERT INTO t SELECT k, id, 'c' || k FROM generate_series(1, 20) k, generate_series(1, 100) id;
SELECT shardmap.distribute_table('t', 'k');"""


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
@pytest.mark.parametrize("name", TYPES)
def test_parameters_of_every_key_type(db, name, binary):
    """Rows written by parameters are on their shard, and are found, by every other kind of parameter."""
    key = TYPES[name]
    with db.connect(timezone="Asia/Tokyo") as conn:
        conn.execute(f"DELETE FROM t_of_{name}")
        for n in range(1, 31):
            conn.execute(f"INSERT INTO t_of_{name} VALUES (%s, %s)", (key(n), n), binary=binary, prepare=n > 10)
    found = db.shard_rows(f"SELECT v, k FROM t_of_{name}")
    assert sorted(v for rows in found.values() for v, _ in rows) == list(range(1, 31))
    with db.connect(shardmap__fanout_policy="error", timezone="America/New_York") as conn:
        for shard, rows in found.items():
            for v, k in rows:
                assert k == key(v)
                for prepare in (False, True):
                    for other in (False, True):
                        cursor = conn.execute(f"SELECT v, k FROM t_of_{name} WHERE k = %s", (k,), binary=other,
                                              prepare=prepare)
                        assert cursor.fetchall() == [(v, k)]
                        assert conn.execute("SELECT shard_for(%s::" + name + ")", (k,), binary=other).fetchone() == (
                            f"shard-{shard}",)
        few = [key(n) for n in (1, 2, 3)]
        cursor = conn.execute(f"SELECT v FROM t_of_{name} WHERE k = ANY (%s::{name}[])", (few,), binary=binary)
        assert sorted(cursor.fetchall()) == [(1,), (2,), (3,)]


def test_server_side_cursors(db):
    one = db.owners(7, key_type="int4")
    for where, count, shards in (("WHERE k = %s", 100, one), ("WHERE k = %s OR true", 2000, {0, 1, 2, 3})):
        for scrollable in (None, True):
            with db.connect() as conn, conn.transaction():
                with conn.cursor("named", scrollable=scrollable, withhold=False) as cursor:
                    def run():
                        cursor.execute(f"SELECT k, id FROM t {where}", (7,))
                        cursor.itersize = 30
                        return list(cursor)
                    rows, found = db.asked(run)
                    assert (len(set(rows)), set(found)) == (count, shards)
                    if scrollable:
                        cursor.scroll(0, "absolute")
                        assert cursor.fetchmany(5) == rows[:5]
    with db.connect() as conn, conn.cursor("held", withhold=True) as cursor:
        cursor.execute("SELECT k, id FROM t")
        conn.commit()
        assert len(cursor.fetchall()) == 2000


def test_cursor_beside_other_statements(db):
    """A cursor's rows are those of the moment it was opened, whatever the transaction does between its fetches."""
    with db.connect() as conn, conn.transaction(force_rollback=True):
        with conn.cursor("named") as cursor:
            cursor.execute("SELECT id FROM t WHERE k = 7")
            assert len(cursor.fetchmany(10)) == 10
            assert conn.execute("SELECT count(*) FROM t").fetchone() == (2000,)
            assert conn.execute("UPDATE t SET c = 'x' WHERE k = 7").rowcount == 100
            assert conn.execute("DELETE FROM t WHERE k = 7 AND id > 50").rowcount == 50
            assert len(cursor.fetchall()) == 90
        assert conn.execute("SELECT count(*) FROM t WHERE k = 7").fetchone() == (50,)


@pytest.mark.parametrize("where", ["k = 7", "k IN (7, 8)", "true"])
def test_cursor_that_was_opened_before_a_write(db, where):
    with db.connect() as conn, conn.transaction(force_rollback=True):
        with conn.cursor("named") as cursor:
            count = conn.execute(f"SELECT count(*) FROM t WHERE {where}").fetchone()[0]
            cursor.execute(f"SELECT c FROM t WHERE {where}")
            conn.execute("UPDATE t SET c = 'new'")
            conn.execute("DELETE FROM t WHERE id > 50")
            try:
                rows = cursor.fetchall()
            except errors.FeatureNotSupported as refusal:
                assert refusal.diag.message_hint
            else:
                assert len(rows) == count and ("new",) not in rows


@pytest.mark.parametrize("where", ["k = 7", "k IN (7, 8)", "id <= 20", "id <= 20 ORDER BY k, id"])
def test_loop_over_a_table_that_it_writes(db, where):
    with db.connect() as conn, conn.transaction(force_rollback=True):
        count = conn.execute(f"SELECT count(*) FROM t WHERE {where.split(' ORDER')[0]}").fetchone()[0]
        conn.execute(f"""DO $$ DECLARE r record; BEGIN FOR r IN SELECT * FROM t WHERE {where} LOOP
                         INSERT INTO t VALUES (r.k, r.id + 10000, 'loop');
                         UPDATE t SET c = 'seen' WHERE k = r.k AND id = r.id; END LOOP; END $$""")
        assert conn.execute("SELECT count(*) FILTER (WHERE c = 'loop'), count(*) FILTER (WHERE c = 'seen') FROM t"
                            ).fetchone() == (count, count)


def test_where_current_of_is_right_or_refused(db):
    with db.connect() as conn, conn.transaction(force_rollback=True):
        with conn.cursor("named") as cursor:
            cursor.execute("SELECT id FROM t WHERE k = 7 FOR UPDATE")
            row = cursor.fetchone()
            try:
                with conn.transaction():
                    assert conn.execute("UPDATE t SET c = 'x' WHERE CURRENT OF named").rowcount == 1
                assert conn.execute("SELECT id FROM t WHERE c = 'x'").fetchall() == [row]
            except errors.FeatureNotSupported:
                pass


def test_pipeline(db):
    keys = list(range(1, 21))
    with db.connect(shardmap__fanout_policy="error") as conn:
        with conn.pipeline():
            cursors = [conn.execute("SELECT count(*), min(k) FROM t WHERE k = %s", (k,)) for k in keys]
            conn.execute("INSERT INTO t VALUES (%s, 1000, 'new')", (7,))
            again = conn.execute("SELECT count(*) FROM t WHERE k = %s", (7,))
        assert [cursor.fetchone() for cursor in cursors] == [(100, k) for k in keys]
        assert again.fetchone() == (101,)
        with pytest.raises(errors.UniqueViolation), conn.pipeline():
            conn.execute("INSERT INTO t VALUES (8, 1000, 'new')")
            conn.execute("INSERT INTO t VALUES (7, 1000, 'twice')")
            conn.execute("INSERT INTO t VALUES (9, 1000, 'new')")
        # What shares the failed one's implicit transaction is undone with it.
        assert conn.execute("SELECT count(*) FROM t WHERE k IN (7, 8, 9) AND id = 1000").fetchone()[0] in (1, 2)
        with conn.pipeline() as pipeline:
            first = conn.execute("SELECT count(*) FROM t WHERE k = 7 AND id = 1000")
            with pytest.raises(errors.FeatureNotSupported):
                conn.execute("SELECT count(*) FROM t")
                pipeline.sync()
        assert first.fetchone() == (1,)
        assert conn.execute("DELETE FROM t WHERE k = ANY (%s) AND id = 1000", ([7, 8, 9],)).rowcount in (1, 2)


def test_copy_in_and_out(db):
    with db.connect() as conn:
        for binary in ("", "(FORMAT binary)"):
            with conn.cursor() as cursor:
                with cursor.copy(f"COPY t (id, k, c) FROM STDIN {binary}") as copy:
                    if binary:
                        copy.set_types(["int4", "int4", "text"])
                    for n in range(5000):
                        copy.write_row((1000 + n, n % 20 + 1, None if n % 7 == 0 else f"text\t{n}\\"))
                assert cursor.rowcount == 5000
            for shard, rows in db.shard_rows("SELECT DISTINCT k FROM t WHERE id >= 1000").items():
                assert {db.owner(k, "int4") for (k,) in rows} <= {shard}
            keyed = "SELECT id, k, c FROM t WHERE k = 7 AND id >= 1000"
            with conn.cursor().copy(f"COPY ({keyed}) TO STDOUT {binary}") as copy:
                copy.set_types(["int4", "int4", "text"])
                rows = list(copy.rows())
            assert len(rows) == 250 and {k for _, k, _ in rows} == {7}
            assert conn.execute("DELETE FROM t WHERE id >= 1000").rowcount == 5000
        # A row that fails leaves none behind.
        with pytest.raises(errors.UniqueViolation), conn.cursor().copy("COPY t FROM STDIN") as copy:
            for n in range(3000):
                copy.write_row((n % 20 + 1, 1000 + n, "x"))
            copy.write_row((7, 1, "twice"))
        assert conn.execute("SELECT count(*) FROM t").fetchone() == (2000,)


def test_many_and_returning(db):
    with db.connect() as conn:
        with conn.cursor() as cursor:
            cursor.executemany("INSERT INTO t VALUES (%s, %s, 'many') RETURNING k, id",
                               [(k, 2000) for k in range(1, 21)], returning=True)
            found = []
            while True:
                found += cursor.fetchall()
                if not cursor.nextset():
                    break
            assert found == [(k, 2000) for k in range(1, 21)]
        assert conn.execute("DELETE FROM t WHERE id = 2000 RETURNING k").rowcount == 20


def test_asyncio_sessions_side_by_side(db):
    async def session(k):
        dsn = db.cluster.dsn(db.name)
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            for _ in range(5):
                cursor = await conn.execute("SELECT count(*) FROM t WHERE k = %s", (k,))
                assert await cursor.fetchone() == (100,)

    async def all_sessions():
        await asyncio.gather(*(session(k) for k in range(1, 9)))
    asyncio.run(all_sessions())


def test_transactions_and_savepoints(db):
    with db.connect() as conn:
        with conn.transaction():
            conn.execute("INSERT INTO t VALUES (1, 3000), (2, 3000)")
            with pytest.raises(errors.UniqueViolation), conn.transaction():
                conn.execute("INSERT INTO t VALUES (3, 3000)")
                conn.execute("INSERT INTO t VALUES (1, 3000)")
            with conn.transaction(force_rollback=True):
                conn.execute("DELETE FROM t WHERE k = 1")
            assert conn.execute("SELECT count(*) FROM t WHERE k IN (1, 2, 3)").fetchone() == (302,)
        with conn.transaction(force_rollback=True):
            conn.execute("DELETE FROM t WHERE id = 3000")
        assert conn.execute("SELECT array_agg(k ORDER BY k) FROM t WHERE id = 3000").fetchone() == ([1, 2],)
        conn.execute("DELETE FROM t WHERE id = 3000")

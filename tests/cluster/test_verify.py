"""Two shards compared: one row that is missing, doubled, changed or too many among 200,000 is found and named.

The rows of both shards are written behind the coordinator's back, the same on each, as after a copy.
"""

import json

import psycopg
import pytest
from patience import Running, lock_waiters, wait_until
from psycopg import errors

ROWS = 200_000
SETUP = """
CREATE TABLE big (k int, id int, v text, n numeric, PRIMARY KEY (k, id));
CREATE TABLE bare (k text NOT NULL, v text, at timestamptz);
CREATE TABLE types (k uuid PRIMARY KEY, f float8, r float4, b bytea, i interval, m money, d date, at timestamptz, a text[],
    j jsonb, e text, c char(5), n numeric, g int GENERATED ALWAYS AS (length(e)) STORED);
ALTER TABLE big ADD COLUMN gone int, ADD COLUMN late int;
ALTER TABLE big DROP COLUMN gone;
CREATE TABLE scales (k int, id int, n numeric, PRIMARY KEY (k, id));
SELECT shardmap.distribute_table('big', 'k'), shardmap.distribute_table('bare', 'k'), shardmap.distribute_table('types', 'k'),
    shardmap.distribute_table('scales', 'k');
"""
BIG = f"INSERT INTO big SELECT i / 4, i, 'row ' || i, i / 3.0, nullif(i % 5, 0) FROM generate_series(1, {ROWS}) i"
BARE = "INSERT INTO bare SELECT 'key ' || i % 10, nullif(i % 7, 0), '2024-01-01 UTC'::timestamptz + i * interval '1 h' FROM generate_series(1, 500) i"
TYPES = """
INSERT INTO types SELECT md5(i::text)::uuid, i / 7.0, -i / 3.0, decode(md5(i::text), 'hex'), i * interval '1 month 1 h', i::money,
    '2000-01-01'::date + i, '2000-01-01 12:00 UTC'::timestamptz + i * interval '1 day', ARRAY['a', NULL, ''], '{"a": null}',
    CASE WHEN i % 2 = 0 THEN '' ELSE 'x' END, 'c', 1.50 FROM generate_series(1, 100) i
"""


@pytest.fixture(scope="module", autouse=True)
def copies(db):
    for number in (0, 1):
        with db.shard(number) as shard:
            # What a shard's administrator may have set.
            shard.execute(f"ALTER DATABASE {shard.info.dbname} SET DateStyle = '{['SQL, DMY', 'ISO'][number]}'")
            shard.execute(f"ALTER DATABASE {shard.info.dbname} SET bytea_output = '{['escape', 'hex'][number]}'")
            shard.execute(f"ALTER DATABASE {shard.info.dbname} SET IntervalStyle = '{['iso_8601', 'postgres'][number]}'")
            shard.execute(f"ALTER DATABASE {shard.info.dbname} SET extra_float_digits = {[-10, 1][number]}")
            shard.execute(f"ALTER DATABASE {shard.info.dbname} SET TimeZone = '{['Asia/Tokyo', 'UTC'][number]}'")
        with db.shard(number) as shard:
            order = " ORDER BY random()" if number else ""
            for sql in (BIG, BARE, TYPES):
                shard.execute(sql + order)
            # Equal numbers, of which another one comes first on each shard.
            shard.execute(f"INSERT INTO scales VALUES {['(1, 1, 1.0), (1, 2, 1.00)', '(1, 2, 1.00), (1, 1, 1.0)'][number]}")


def compare(conn, table="big", scope="true", transactional=False, **named):
    extra = "".join(f", {name} => {value}" for name, value in named.items())
    rows = conn.execute("SELECT finding, key, row_id, source_rows, target_rows, detail, token_from, token_to"
                        " FROM shardmap._compare_shards(%s, 'shard-0', 'shard-1', %s, %s" + extra + ")",
                        (table, scope, transactional)).fetchall()
    return ([row for row in rows if row[0] == "bucket"], [row[:5] for row in rows if row[0] != "bucket"], rows)


@pytest.fixture
def change(db):
    """Changes shard 1 by one statement, and back afterwards."""
    with psycopg.connect(db.cluster.shard_dsn(1, db.name)) as shard:
        undone = []

        def run(sql, undo):
            shard.execute(sql)
            shard.commit()
            undone.append(undo)

        yield run
        for sql in undone:
            shard.execute(sql)
        shard.commit()


@pytest.mark.parametrize("table", ["big", "bare", "types", "scales"])
@pytest.mark.parametrize("transactional", [True, False])
def test_equal_rows_are_equal(db, table, transactional):
    """Whatever the order of the rows and the settings of the shards and of the session."""
    with db.connect(DateStyle="German", IntervalStyle="sql_standard", extra_float_digits=0, TimeZone="America/New_York") as conn:
        for by_key in ("false", "true"):
            assert compare(conn, table, transactional=transactional, by_key=by_key)[2] == []


@pytest.mark.parametrize("table", ["big", "bare", "types"])
@pytest.mark.parametrize("bits", [0, 5, 8, 13, 16])
def test_both_ways_to_sum_up_give_the_same(conn, table, bits):
    """Row by row, and key by key; a bucket is the first bits of the token of its keys."""
    primary_key = conn.execute("SELECT shardmap._primary_key(%s, '{shard-0,shard-1}', false)", (table,)).fetchone()[0]
    both = conn.execute("SELECT shardmap._summary_sql(%(t)s, %(p)s, 'true', shardmap._bucket_sql(%(b)s, false)),"
                        " shardmap._summary_by_key_sql(%(t)s, 'true', %(b)s)", {"t": table, "p": primary_key, "b": bits}).fetchone()
    answers = [sorted(json.loads(conn.execute("SELECT answer FROM shardmap._ask_shards('{shard-0}', %s, false)", (sql,)).fetchone()[0]))
               for sql in both]
    assert answers[0] == answers[1]
    tokens = conn.execute(f"SELECT DISTINCT token_for(k) >> {32 - bits} FROM {table}").fetchall()
    assert {bucket[0] for bucket in answers[0]} == {row[0] for row in tokens}
    assert sum(int(bucket[1]) for bucket in answers[0]) == {"big": ROWS, "bare": 500, "types": 100}[table]
    assert sum(int(bucket[3]) for bucket in answers[0]) == {"big": ROWS // 4 + 1, "bare": 10, "types": 100}[table]


FAULTS = {
    "changed": ("UPDATE big SET v = v || ' ' WHERE id = 123457", "UPDATE big SET v = 'row 123457' WHERE id = 123457", 1, 1),
    "missing": ("DELETE FROM big WHERE id = 123457",
                "INSERT INTO big SELECT i / 4, i, 'row ' || i, i / 3.0, nullif(i % 5, 0) FROM generate_series(123457, 123457) i", 1, 0),
    "extra": ("INSERT INTO big VALUES (30864, 123457000, 'x')", "DELETE FROM big WHERE id = 123457000", 0, 1),
    "doubled": ("ALTER TABLE big DROP CONSTRAINT big_pkey; INSERT INTO big SELECT * FROM big WHERE id = 123457",
                "DELETE FROM big WHERE ctid IN (SELECT max(ctid) FROM big WHERE id = 123457); ALTER TABLE big ADD PRIMARY KEY (k, id)",
                1, 2),
}


@pytest.mark.parametrize("by_key", ["false", "true"])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_bad_row_among_many_is_named(conn, change, fault, by_key):
    sql, undo, source, target = FAULTS[fault]
    change(sql, undo)
    buckets, rows, found = compare(conn, by_key=by_key)
    row = "(30864,123457000)" if fault == "extra" else "(30864,123457)"
    assert rows == [(fault, "30864", row, source, target)]
    [(_, _, _, here, there, detail, first, last)] = buckets
    token = conn.execute("SELECT token_for(30864)").fetchone()[0]
    assert first <= token <= last and last - first + 1 == 2**32 // 256
    assert there - here == target - source and "checksum" in detail
    assert ("sum(id)" in detail) == (fault != "changed")
    # Where nobody looked, nothing is said.
    scope = "SELECT shardmap._scope_sql('big', tokens => %s::int8multirange)"
    for tokens, want in ((f"{{[{token},{token}]}}", 2), (f"{{[0,{token}),[{token + 1},4294967296)}}", 0)):
        assert len(compare(conn, scope=conn.execute(scope, (tokens,)).fetchone()[0])[2]) == want
    assert len(compare(conn, max_rows=0)[2]) == 1


@pytest.mark.parametrize("by_key", ["false", "true"])
@pytest.mark.parametrize("transactional", [True, False])
def test_changes_that_cancel_each_other_out_are_named(conn, change, transactional, by_key):
    """Two rows of a key change their texts with each other, two their numbers: every sum, least and greatest value of the bucket
    stays as it was."""
    change("UPDATE big SET v = CASE id WHEN 123456 THEN 'row 123457' ELSE 'row 123456' END WHERE id IN (123456, 123457);"
           "UPDATE big SET late = late + CASE id WHEN 123457 THEN 1 ELSE -1 END WHERE id IN (123457, 123458)",
           "UPDATE big SET v = 'row ' || id, late = nullif(id % 5, 0) WHERE id IN (123456, 123457, 123458)")
    buckets, rows, _ = compare(conn, transactional=transactional, by_key=by_key)
    assert [row[5] for row in buckets] == ["checksum"]
    assert rows == [("changed", "30864", f"(30864,{id})", 1, 1) for id in (123456, 123457, 123458)]


def test_a_transaction_asks_both_shards_at_once(db, conn, change):
    """Each of them waits for a lock, at the same time; a cancel ends the question on both."""
    with db.shard(0) as first, db.shard(1) as second:
        with first.transaction(), second.transaction():
            first.execute("LOCK TABLE big")
            second.execute("LOCK TABLE big")
            asked = Running(lambda: compare(conn, transactional=True))
            try:
                wait_until(lambda: lock_waiters(first) and lock_waiters(second))
            finally:
                conn.cancel()
            with pytest.raises(errors.QueryCanceled):
                asked.end()
            wait_until(lambda: not lock_waiters(first) and not lock_waiters(second))
    assert compare(conn, transactional=True)[2] == []


def test_a_table_without_primary_key(conn, change):
    change("INSERT INTO bare VALUES ('key 3', NULL, '2024-01-01 UTC'), ('key 3', '', '2024-01-01 UTC')",
           "DELETE FROM bare WHERE at = '2024-01-01 UTC'")
    buckets, rows, _ = compare(conn, "bare")
    assert len(buckets) == 1 and [row[0] for row in rows] == ["extra", "extra"]
    assert {row[1] for row in rows} == {"key 3"} and rows[0][2] != rows[1][2]  # NULL is not ''


def test_a_lost_table_full_of_rows(conn, change):
    """All buckets are named, and as many rows as wanted."""
    change("ALTER TABLE big RENAME TO kept; CREATE TABLE big (LIKE kept INCLUDING ALL)",
           "DROP TABLE big; ALTER TABLE kept RENAME TO big")
    buckets, rows, _ = compare(conn, max_rows=7)
    assert len(buckets) == 256 and sum(row[3] for row in buckets) == ROWS and {row[4] for row in buckets} == {0}
    assert len(rows) == 7 and {row[0] for row in rows} == {"missing"}


@pytest.mark.parametrize("transactional", [True, False])
def test_what_cannot_be_read_is_an_error(conn, change, transactional):
    change("ALTER TABLE big RENAME TO kept", "ALTER TABLE kept RENAME TO big")
    with pytest.raises(errors.UndefinedTable if transactional else errors.ObjectNotInPrerequisiteState, match="shard-1|big"):
        compare(conn, transactional=transactional)


def test_a_shard_that_is_away_is_an_error(db):
    with db.connect() as conn:
        port = conn.execute("SELECT port FROM shardmap.shards WHERE name = 'shard-1'").fetchone()[0]
        conn.execute("ALTER SERVER \"shard-1\" OPTIONS (SET port '1')")
        try:
            with pytest.raises(errors.ObjectNotInPrerequisiteState, match='could not read table public.big on shard "shard-1"'):
                compare(conn)
            with pytest.raises(psycopg.OperationalError):
                compare(conn, transactional=True)
        finally:
            conn.execute(f"ALTER SERVER \"shard-1\" OPTIONS (SET port '{port}')")


def test_within_a_transaction_it_sees_what_the_transaction_did(db):
    """So that it can be made under a fence, with all that was written by then."""
    key = next(k for k in range(1, 100) if db.owner(k, "int4") == 0)
    with db.connect() as conn, conn.transaction(force_rollback=True):
        conn.execute(f"DELETE FROM big WHERE k = {key} AND id = {4 * key + 1}")
        assert compare(conn, transactional=True)[1] == [("extra", str(key), f"({key},{4 * key + 1})", 0, 1)]
        assert compare(conn)[2] == []


def test_row_security_hides_nothing(db, change):
    change("ALTER TABLE bare ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY; CREATE POLICY p ON bare USING (k <> 'key 3');"
           "CREATE ROLE verify_reader LOGIN IN ROLE pg_read_all_data",
           "DROP POLICY p ON bare; ALTER TABLE bare NO FORCE ROW LEVEL SECURITY, DISABLE ROW LEVEL SECURITY; DROP ROLE verify_reader")
    with db.connect() as conn:
        conn.execute("ALTER USER MAPPING FOR postgres SERVER \"shard-1\" OPTIONS (SET user 'verify_reader')")
        try:
            for transactional in (False, True):
                with pytest.raises((errors.ObjectNotInPrerequisiteState, errors.InsufficientPrivilege)):
                    compare(conn, "bare", transactional=transactional)
        finally:
            conn.execute("ALTER USER MAPPING FOR postgres SERVER \"shard-1\" OPTIONS (SET user 'postgres')")


def test_shards_of_all_versions_compute_the_same(db, conn):
    """Golden figures: the hash of 'abc' as hash partitions have it, and the last 32 bits of its MD5."""
    hashed, token, bucket = (conn.execute(f"SELECT shardmap.{sql}").fetchone()[0] for sql in (
        "_checksum_sql($$'abc'$$)", "_token_sql($$md5('abc')$$)", "_bucket_sql(16, false)"))
    summary = conn.execute("SELECT shardmap._summary_sql('big', '{k,id}', 'true', 's.token')").fetchone()[0]
    assert hashed.replace("'abc'", "ROW(t.k, t.id, t.v, t.n, t.late)::pg_catalog.text") in summary
    with db.shard(0) as shard:
        assert shard.execute(f"SELECT {hashed}, {token}, {bucket} FROM (SELECT md5('abc') AS h) s").fetchone() == (
            2475615566626286487, 0x28E17F72, 0x28E1)
    assert conn.execute("SELECT token_for('abc'::text)").fetchone()[0] == 0x28E17F72


def test_owned_tokens_are_those_that_shard_for_finds(conn):
    for number in range(4):
        owned = conn.execute("SELECT shardmap._owned_tokens(%s)::text", (f"shard-{number}",)).fetchone()[0]
        assert conn.execute("SELECT bool_and((shard_for(i) = %s) = (token_for(i) <@ %s::int8multirange))"
                            " FROM generate_series(1, 5000) i", (f"shard-{number}", owned)).fetchone()[0]
    whole = "SELECT range_agg(r)::text FROM shardmap.shard s, unnest(shardmap._owned_tokens(s.name)) r"
    assert conn.execute(whole).fetchone()[0] == "{[0,4294967296)}"

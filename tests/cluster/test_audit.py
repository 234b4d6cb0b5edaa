"""The map audited against the rows: what drifted is found, believed on the second look, corrected by compare and swap.

Keyspace "directory" is the example of the seeds: three ranges, one of which a shard has that the directory does not name.
Drift is made as it happens: the catalog or a shard is written without the other.
"""

import psycopg
import pytest
from psycopg import errors

SETUP = """
CREATE TABLE t (k int, id int, v text, PRIMARY KEY (k, id));
INSERT INTO t SELECT i / 4, i, 'row ' || i FROM generate_series(1, 4000) i;
CREATE TABLE country (id int PRIMARY KEY, name text);
INSERT INTO country SELECT i, 'c' || i FROM generate_series(1, 20) i;
SELECT shardmap.distribute_reference('country');
SELECT shardmap.distribute_table('t', 'k');
CREATE TABLE seen (v jsonb);
"""
DIRECTORY = [(0, 1000, "shard-A"), (1000, 2000, "shard-B"), (2000, 3000, "shard-B")]


@pytest.fixture(scope="module", autouse=True)
def directory(db):
    with db.connect() as conn:
        conn.execute("SELECT shardmap.create_keyspace('directory', 'range', range_order => 'integer')")
        for number, name in enumerate(("shard-A", "shard-B", "shard-C")):
            conn.execute("SELECT shardmap.add_shard(%s, '127.0.0.1', %s, %s, keyspace => 'directory')",
                         (name, db.cluster.shard_server(number).port, db.cluster.shard_database(number, db.name)))
        for lower, upper, shard in DIRECTORY:
            conn.execute("SELECT shardmap.set_range('directory', %s, %s, %s)", (str(lower), str(upper), shard))
        conn.execute("CREATE TABLE item (k int, id int, v text, at timestamptz DEFAULT '2024-01-01 UTC', PRIMARY KEY (k, id))")
        conn.execute("INSERT INTO item SELECT i % 3000, i, 'v' || i FROM generate_series(0, 5999) i")
        conn.execute("CREATE TABLE part (k int, v int)")
        conn.execute("INSERT INTO part SELECT i * 10, i FROM generate_series(0, 299) i")
        conn.execute("SELECT shardmap.distribute_table(x, 'k', 'directory') FROM unnest('{item,part}'::regclass[]) x")


def audit(conn, keyspace="directory", mode="full"):
    return [row for row in conn.execute("SELECT kind, state, table_name, shard, owner, lower, upper, rows, seen"
                                        " FROM shardmap.audit(%s, %s)", (keyspace, mode)).fetchall()]


def items(db):
    """What the shards of the directory have."""
    found = []
    for number in range(3):
        with db.shard(number) as shard:
            found.append(shard.execute("SELECT * FROM item ORDER BY 1, 2").fetchall())
    return found


def open_findings(conn):
    return conn.execute("SELECT kind, state FROM shardmap.audit_findings WHERE state <> 'closed' ORDER BY id").fetchall()


@pytest.fixture(autouse=True)
def nothing_left(conn):
    """Each test begins and ends with a map that is as the rows are, which an audit says."""
    yield
    for keyspace in ("directory", "main"):
        assert audit(conn, keyspace) == []
    assert open_findings(conn) == []


@pytest.fixture
def drift(db, conn):
    """Range 1000 to 2000 was moved to shard-C, and the directory did not hear of it."""
    for table, columns in (("item", "k, id, v, at"), ("part", "k, v")):
        with db.shard(1) as source, db.shard(2) as target:
            rows = source.execute(f"DELETE FROM {table} WHERE k >= 1000 AND k < 2000 RETURNING {columns}").fetchall()
            for row in rows:
                target.execute(f"INSERT INTO {table} ({columns}) VALUES ({', '.join(['%s'] * len(row))})", row)
    yield version(conn)
    give_back(db, conn)


def version(conn, lower="1000"):
    return conn.execute("SELECT version FROM shardmap.key_range WHERE keyspace = 'directory' AND lower = %s", (lower,)).fetchone()[0]


def directory_says(conn):
    return [(int(lower), int(upper), shard) for lower, upper, shard in conn.execute(
        "SELECT lower, upper, shard FROM shardmap.key_range WHERE keyspace = 'directory' ORDER BY lower::int").fetchall()]


def give_back(db, conn):
    """As it was: rows and range at shard-B."""
    for table, columns in (("item", "k, id, v, at"), ("part", "k, v")):
        with db.shard(2) as source, db.shard(1) as target:
            for row in source.execute(f"DELETE FROM {table} WHERE k >= 1000 AND k < 2000 RETURNING {columns}").fetchall():
                target.execute(f"INSERT INTO {table} ({columns}) VALUES ({', '.join(['%s'] * len(row))})", row)
    if directory_says(conn) != DIRECTORY:
        conn.execute("SELECT shardmap.set_range('directory', '1000', '2000', 'shard-B', %s)", (version(conn),))


def confirmed(conn):
    assert [row[1] for row in audit(conn)] == ["suspected"]
    assert [row[1] for row in audit(conn)] == ["confirmed"]
    return conn.execute("SELECT id, entry_version FROM shardmap.audit_findings WHERE state = 'confirmed'").fetchone()


@pytest.mark.parametrize("mode", ["full", "sample"])
def test_the_seeds_directory(db, conn, drift, mode):
    """Exactly the drifted range is found, once; suspected first, then confirmed."""
    want = ("drifted", "suspected", None, "shard-C", "shard-B", "1000", "2000", 2100, 1)
    assert audit(conn, mode=mode) == [want]
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="is suspected"):
        conn.execute("SELECT shardmap.correct(id, entry_version) FROM shardmap.audit_findings WHERE state = 'suspected'")
    assert audit(conn, mode=mode) == [want[:1] + ("confirmed",) + want[2:8] + (2,)]
    finding, seen = conn.execute("SELECT id, entry_version FROM shardmap.audit_findings WHERE state = 'confirmed'").fetchone()
    assert seen == drift and directory_says(conn) == DIRECTORY

    # A stale version changes nothing and says so.
    with pytest.raises(errors.SerializationFailure, match=f"is at version {seen}, version {seen - 1} was expected"):
        conn.execute("SELECT shardmap.correct(%s, %s)", (finding, seen - 1))
    assert directory_says(conn) == DIRECTORY and open_findings(conn) == [("drifted", "confirmed")]

    # A session with the old map in its cache reads by the new one once it is corrected.
    with db.connect() as other:
        assert other.execute("SELECT count(*) FROM item WHERE k = 1500").fetchone()[0] == 0
        assert conn.execute("SELECT shardmap.correct(%s, %s)", (finding, seen)).fetchone()[0] > seen
        assert other.execute("SELECT count(*) FROM item WHERE k = 1500").fetchone()[0] == 2
    assert directory_says(conn) == [DIRECTORY[0], (1000, 2000, "shard-C"), DIRECTORY[2]]
    assert open_findings(conn) == [("drifted", "corrected")]
    # Only a clean second look closes it: all rows, after the change is everywhere.
    assert audit(conn, mode="sample") == [] and open_findings(conn) == [("drifted", "corrected")]
    assert audit(conn) == [] and open_findings(conn) == []
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="is closed"):
        conn.execute("SELECT shardmap.correct(%s, %s)", (finding, seen))


def test_a_change_in_between_makes_it_stale(db, conn, drift):
    finding, seen = confirmed(conn)
    conn.execute("SELECT shardmap.split_range('directory', '1500', %s)", (drift,))
    with pytest.raises(errors.SerializationFailure, match="Nothing was changed|expected"):
        conn.execute("SELECT shardmap.correct(%s, %s)", (finding, seen))
    assert directory_says(conn)[1:3] == [(1000, 1500, "shard-B"), (1500, 2000, "shard-B")]
    assert [(row[0], row[1], row[5:7]) for row in audit(conn)] == [("drifted", "suspected", ("1000", "1500")), ("drifted", "suspected", ("1500", "2000"))]
    conn.execute("SELECT shardmap.merge_ranges('directory', '1500', %s)", (version(conn),))


def test_two_corrections_at_once(db, conn, drift):
    finding, seen = confirmed(conn)
    with db.connect() as first:
        first.autocommit = False
        first.execute("SELECT shardmap.correct(%s, %s)", (finding, seen))
        conn.execute("SET lock_timeout = '300ms'")
        with pytest.raises(psycopg.Error):
            conn.execute("SELECT shardmap.correct(%s, %s)", (finding, seen))
        first.commit()
    conn.execute("RESET lock_timeout")
    with pytest.raises(psycopg.Error, match="is corrected"):
        conn.execute("SELECT shardmap.correct(%s, %s)", (finding, seen))
    assert directory_says(conn)[1] == (1000, 2000, "shard-C")


def test_rows_written_meanwhile_stop_a_correction(db, conn, drift):
    """The owner by the directory got a row: the range is no shard's alone any more."""
    finding, seen = confirmed(conn)
    conn.execute("INSERT INTO item VALUES (1500, -1, 'new')")
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="has rows on shard"):
        conn.execute("SELECT shardmap.correct(%s, %s)", (finding, seen))
    assert directory_says(conn) == DIRECTORY
    kinds = {(row[0], row[2], row[7]) for row in audit(conn)}
    assert kinds == {("misplaced", "public.item", 1000), ("misplaced", "public.part", 100)}
    conn.execute("DELETE FROM item WHERE k = 1500 AND id = -1")


def test_misplaced_rows_go_home_and_orphans_go(db, conn):
    with db.shard(0) as shard:
        shard.execute("INSERT INTO item SELECT 2500, -i, 'late' FROM generate_series(1, 3) i")  # nobody else has them
        shard.execute("INSERT INTO item VALUES (2501, 2501, 'v2501', '2024-01-01 UTC')")  # the owner has the same
        shard.execute("INSERT INTO item VALUES (2502, 2502, 'other', '2024-01-01 UTC')")  # the owner has another
    found = {row[0]: row[7] for row in audit(conn)}
    assert found == {"misplaced": 3, "orphan": 1, "doubled": 1}
    assert {row[1] for row in audit(conn)} == {"confirmed"}
    ids = dict(conn.execute("SELECT kind, id FROM shardmap.audit_findings WHERE state = 'confirmed'").fetchall())
    before = items(db)

    def repair(kind, *more):
        return conn.execute(f"SELECT row_id, action FROM shardmap.repair({', '.join(['%s'] * (1 + len(more)))})", (ids[kind], *more)).fetchall()

    assert repair("misplaced") == [(f"(2500,-{i})", "would move from shard-A to shard-B") for i in (1, 2, 3)]
    assert repair("orphan") == [("(2501,2501)", "would delete on shard-A")]
    assert items(db) == before
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match='of kind "doubled"'):
        repair("doubled", False)
    # All or nothing, with the transaction that it is in.
    with conn.transaction(force_rollback=True):
        assert len(repair("misplaced", False)) == 3
    assert items(db) == before
    assert repair("misplaced", False)[0] == ("(2500,-1)", "move from shard-A to shard-B")
    assert repair("orphan", False) == [("(2501,2501)", "delete on shard-A")]
    assert repair("orphan", False) == []
    assert conn.execute("SELECT count(*), min(v) FROM item WHERE k = 2500 AND id < 0").fetchone() == (3, "late")
    assert [row[0] for row in audit(conn)] == ["doubled"]
    with db.shard(0) as shard:
        assert shard.execute("DELETE FROM item WHERE k >= 1000").rowcount == 1
    with db.shard(1) as shard:
        shard.execute("DELETE FROM item WHERE id < 0")


def test_a_ring_with_misplaced_rows(db, conn):
    key = next(k for k in range(100) if db.owner(k, "int4") == 2)
    with db.shard(3) as shard:
        shard.execute("INSERT INTO t VALUES (%s, -1, 'lost')", (key,))
        try:
            for mode in ("sample", "full"):
                assert [row[:5] + row[7:8] for row in audit(conn, "main", mode)] == [
                    ("misplaced", "suspected" if mode == "sample" else "confirmed", "public.t", "shard-3", "shard-2", 1)]
        finally:
            shard.execute("DELETE FROM t WHERE id = -1")


def test_a_shard_that_cannot_be_read_is_unknown_and_closes_nothing(db, conn, drift):
    finding, _ = confirmed(conn)
    port = conn.execute("SELECT port FROM shardmap.shards WHERE name = 'shard-C'").fetchone()[0]
    conn.execute("ALTER SERVER \"shard-C\" OPTIONS (SET port '1')")
    found = audit(conn)
    assert {row[0] for row in found} == {"unknown"} and {row[3] for row in found} == {"shard-C"}
    assert conn.execute("SELECT state FROM shardmap.audit_findings WHERE id = %s", (finding,)).fetchone() == ("confirmed",)
    conn.execute(f"ALTER SERVER \"shard-C\" OPTIONS (SET port '{port}')")
    # The owner away: that it has nothing of the range is not known, so that nothing has drifted.
    conn.execute("ALTER SERVER \"shard-B\" OPTIONS (SET port '1')")
    assert "drifted" not in {row[0] for row in audit(conn)}
    port = conn.execute("SELECT port FROM shardmap.shards WHERE name = 'shard-1'").fetchone()[0]
    conn.execute(f"ALTER SERVER \"shard-B\" OPTIONS (SET port '{port}')")
    # Not two in succession any more.
    assert [row[:2] + row[8:] for row in audit(conn)] == [("drifted", "suspected", 1)]


def test_layouts_and_reference_copies(db, conn):
    with db.shard(2) as shard, db.shard(3) as other:
        shard.execute("ALTER TABLE t ADD COLUMN extra int, ALTER COLUMN v TYPE varchar(99); CREATE INDEX drifted ON t (v)")
        other.execute("ALTER TABLE country RENAME TO hidden")
        shard.execute("UPDATE country SET name = 'wrong' WHERE id = 7")
        try:
            found = audit(conn, "main", "sample")
            assert {row[:4] for row in found} == {("layout", "suspected", "public.t", "shard-2"),
                                                  ("missing_copy", "suspected", "public.country", "shard-3")}
            detail = conn.execute("SELECT detail FROM shardmap.audit_findings WHERE kind = 'layout' AND state <> 'closed'").fetchone()[0]
            assert "lacks column v text" in detail and "column extra integer" in detail and "USING btree (v)" in detail
            assert {row[0]: row[1] for row in audit(conn, "main")} == {"layout": "confirmed", "missing_copy": "confirmed",
                                                                     "differing_copy": "suspected"}
        finally:
            shard.execute("DROP INDEX drifted; ALTER TABLE t DROP COLUMN extra, ALTER COLUMN v TYPE text")
            other.execute("ALTER TABLE hidden RENAME TO country")
            shard.execute("UPDATE country SET name = 'c7' WHERE id = 7")


def test_version_and_digest(db, conn):
    version, digest = conn.execute("SELECT shardmap.map_version('directory'), shardmap.map_digest('directory')").fetchone()
    with conn.transaction(force_rollback=True):
        conn.execute("ALTER SERVER \"shard-A\" OPTIONS (SET host 'elsewhere')")
        assert conn.execute("SELECT shardmap.map_digest('directory')").fetchone()[0] == digest
        conn.execute("SELECT shardmap.set_range('directory', '3000', '4000', 'shard-A')")
        after = conn.execute("SELECT shardmap.map_version('directory'), shardmap.map_digest('directory')").fetchone()
        assert after[0] == version + 1 and after[1] != digest
    assert conn.execute("SELECT shardmap.map_version('none'), shardmap.map_digest('none')").fetchone() == (None, None)


def test_refusals(conn):
    for sql, error, words in (
            ("SELECT shardmap.audit('none')", errors.UndefinedObject, "does not exist"),
            ("SELECT shardmap.audit('main', 'some')", errors.InvalidParameterValue, "mode"),
            ("SELECT shardmap.correct(-1, 1)", errors.UndefinedObject, "does not exist"),
            ("SELECT shardmap.repair(-1)", errors.UndefinedObject, "does not exist"),
            ("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT shardmap.audit('main')", errors.ActiveSqlTransaction, "READ COMMITTED")):
        with pytest.raises(error, match=words):
            conn.execute(sql)
        conn.rollback()

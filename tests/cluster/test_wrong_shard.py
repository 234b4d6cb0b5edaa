"""No row gets to a shard that does not own its key: not by a changed key, a partition written by hand, or a trigger.

Whatever is refused leaves every row as it was. Triggers, defaults and constraints of the coordinator hold as ever.
"""

import re

import psycopg
import pytest
from psycopg import errors

SETUP = """
CREATE TABLE t (k int, id int, c text CHECK (c <> 'bad'), PRIMARY KEY (k, id));
CREATE TABLE u (k int, id int, c text, PRIMARY KEY (k, id));
CREATE TABLE local (k int, id int, c text);
CREATE TABLE log (what text);
INSERT INTO local SELECT k, id, 'old' FROM generate_series(1, 20) k, generate_series(1, 2) id;
SELECT shardmap.distribute_table(x, 'k') FROM unnest('{t,u}'::regclass[]) x;
CREATE VIEW v AS SELECT id, c, k FROM t;
CREATE FUNCTION rekey(a int, b int) RETURNS void LANGUAGE plpgsql AS $$ BEGIN UPDATE t SET k = b WHERE k = a; END $$;
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO log VALUES (concat_ws(' ', TG_WHEN, TG_OP, TG_LEVEL)); RETURN NEW; END $$;
CREATE FUNCTION divert() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.k := NEW.k + 1; RETURN NEW; END $$;
CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.c := 'stamped'; RETURN NEW; END $$;
"""

ROUTING = pytest.mark.parametrize("routing", ["on", "off"])


@pytest.fixture(autouse=True)
def rows(db):
    with db.connect() as conn:
        conn.execute("DELETE FROM t; DELETE FROM u; DELETE FROM log")
        conn.execute("INSERT INTO t TABLE local; INSERT INTO u TABLE local")


def stored(db, table="t"):
    found = db.shard_rows(f"SELECT * FROM {table}")
    for shard, rows in found.items():
        assert {db.owner(k, "int4") for k, _, _ in rows} <= {shard}
    return sorted(row for rows in found.values() for row in rows)


@pytest.fixture
def far(db):
    """Two keys of different shards."""
    return tuple(int(key) for key in db.apart(key_type="int4"))


@pytest.fixture
def near(db, far):
    """A key on the first one's shard that is not the first."""
    return next(k for k in range(1, 21) if k != far[0] and db.owner(k, "int4") == db.owner(far[0], "int4"))


CHANGES = [
    "UPDATE t SET k = {b} WHERE k = {a}", "UPDATE t SET k = k + 1",
    "UPDATE t SET c = 'x', k = {b} WHERE k = {a} AND id = 1",
    "UPDATE t SET (k, c) = ({b}, 'x') WHERE k = {a}", "UPDATE t SET (k, c) = (SELECT {b}, 'x') WHERE k = {a}",
    "UPDATE t SET k = u.id FROM u WHERE u.k = t.k AND t.k = {a}", "UPDATE t SET k = DEFAULT WHERE k = {a}",
    "UPDATE t SET k = NULL WHERE k = {a}", "UPDATE v SET k = {b} WHERE k = {a}", "UPDATE ONLY t_{n} SET k = {b}",
    "UPDATE t_{n} SET k = {b} WHERE k = {a}", "SELECT rekey({a}, {b})", "UPDATE t SET k = {b} WHERE id = 1",
    "WITH w AS (UPDATE t SET k = {b} WHERE k = {a} RETURNING *) SELECT * FROM w",
    "UPDATE t AS x SET k = {b} WHERE x.k IN ({a}, {b})", "UPDATE t SET k = {b}, c = 'x' WHERE k IN ({a}, {b})",
    "UPDATE t SET k = {a} WHERE k IN ({a}, {b})", "UPDATE t SET k = {a} WHERE k = {a} OR id = 1",
    "INSERT INTO t VALUES ({a}, 1, 'x') ON CONFLICT (k, id) DO UPDATE SET k = EXCLUDED.id",
    "INSERT INTO t VALUES ({a}, 1, 'x') ON CONFLICT (k, id) DO UPDATE SET k = {b}",
    "MERGE INTO t USING local l ON t.k = l.k AND t.id = l.id WHEN MATCHED THEN UPDATE SET k = {b}",
]


@ROUTING
@pytest.mark.parametrize("sql", CHANGES)
def test_key_changes_are_refused(db, far, routing, sql):
    a, b = far
    text = sql.format(a=a, b=b, n=db.owner(a, "int4"))
    before = stored(db)
    for mode in ("force_custom_plan", "force_generic_plan"):
        with db.connect(shardmap__enable_routing=routing, plan_cache_mode=mode) as conn:
            with pytest.raises(errors.FeatureNotSupported) as caught:
                conn.execute(text, prepare=True)
            assert caught.value.diag.message_hint, text
    assert stored(db) == before


@ROUTING
def test_key_changes_with_parameters_are_refused(db, far, near, routing):
    a, b = far
    with db.connect(shardmap__enable_routing=routing) as conn:
        for target in (b, near):
            for _ in range(7):
                with pytest.raises(errors.FeatureNotSupported, match='cannot change the shard key "k"'):
                    conn.execute("UPDATE t SET k = %s WHERE k = %s", (target, a), prepare=True)
        # What the hint says works.
        with conn.transaction():
            moved = conn.execute("DELETE FROM t WHERE k = %s RETURNING *", (a,)).fetchall()
            for _, id, c in moved:
                conn.execute("INSERT INTO t VALUES (%s, %s, %s)", (b, id + 10, c))
    assert {(b, 11, "old"), (b, 12, "old")} <= set(stored(db))


# As programs write them that save a row as a whole.
KEEPS = [
    "UPDATE t SET k = k WHERE k = {a}", "UPDATE t SET k = t.k, c = 'x'", "UPDATE t SET k = {a} WHERE k = {a}",
    "UPDATE t SET c = 'x', k = {a} WHERE id = 1 AND {a} = k", "UPDATE t SET (c, k) = ('x', {a}) WHERE k IN ({a})",
    "UPDATE v SET k = {a}, c = 'x' WHERE k = {a}", "UPDATE t x SET k = x.k, c = local.c || 1 FROM local"
    " WHERE local.k = x.k AND local.id = x.id", "UPDATE t SET k = {a} FROM u WHERE u.k = t.k AND u.k = {a}",
    "INSERT INTO t VALUES ({a}, 1, 'x') ON CONFLICT (k, id) DO UPDATE SET k = EXCLUDED.k, c = EXCLUDED.c",
    "INSERT INTO t VALUES ({a}, 1, 'x') ON CONFLICT (id, k) DO UPDATE SET k = t.k, c = EXCLUDED.c",
    "WITH w AS (UPDATE t SET k = {a}, c = 'x' WHERE k = {a} RETURNING *) SELECT * FROM w",
    "UPDATE t_{n} SET k = k, c = 'x'",
]


@ROUTING
@pytest.mark.parametrize("sql", KEEPS)
def test_an_assignment_that_keeps_the_key_is_none(db, far, routing, sql):
    a, _ = far
    n = db.owner(a, "int4")
    if "CONFLICT" in sql and routing == "off":
        pytest.skip("only a whole shard can do it")
    with db.connect() as conn:
        conn.execute("CREATE TEMP TABLE plain AS SELECT * FROM local; ALTER TABLE plain ADD PRIMARY KEY (k, id)")
        conn.execute("CREATE TEMP TABLE other AS SELECT * FROM local")
        conn.execute("CREATE TEMP VIEW seen AS SELECT id, c, k FROM plain")
        same = re.sub(r"\bt_\{n\}", "t", sql).format(a=a)
        if "t_{n}" in sql:
            keys = [k for k in range(1, 21) if db.owner(k, "int4") == n]
            same += f" WHERE k IN ({', '.join(map(str, keys))})"
        same = re.sub(r"\bUPDATE v\b", "UPDATE seen", re.sub(r"\bFROM u\b", "FROM other u", same))
        conn.execute(re.sub(r"(UPDATE|INTO) t\b(?! x)", r"\1 plain AS t", same).replace("UPDATE t x", "UPDATE plain x"))
        expected = sorted(conn.execute("SELECT k, id, c FROM plain").fetchall())
    with db.connect(shardmap__enable_routing=routing) as conn:
        conn.execute(sql.format(a=a, n=n))
    assert sorted(stored(db)) == expected


def test_a_row_is_saved_as_a_whole(db, far):
    a, b = far
    for mode in ("force_custom_plan", "force_generic_plan", "auto"):
        with db.connect(plan_cache_mode=mode) as conn:
            for turn in range(8):
                done = conn.execute("UPDATE t SET k = %(k)s, id = 1, c = %(c)s WHERE k = %(k)s AND id = 1",
                                    {"k": (a, b)[turn % 2], "c": f"{mode} {turn}"}, prepare=True)
                assert done.rowcount == 1
        assert {(a, 1, f"{mode} 6"), (b, 1, f"{mode} 7")} <= set(stored(db))
    with db.connect() as conn:  # two parameters, which happen to be equal
        for turn in range(8):
            key = (a, b)[turn % 2]
            conn.execute("UPDATE t SET k = %s, c = %s WHERE k = %s", (key, f"two {turn}", key), prepare=True)
            with pytest.raises(errors.FeatureNotSupported):
                conn.execute("UPDATE t SET k = %s, c = %s WHERE k = %s", (b, "two", a), prepare=True)
    assert {(a, 1, "two 6"), (b, 1, "two 7")} <= set(stored(db))


def test_equal_values_that_look_different_are_no_reason(db):
    with db.connect() as conn:
        conn.execute("CREATE TABLE amounts (k numeric PRIMARY KEY, c text); SELECT shardmap.distribute_table('amounts', 'k')")
        conn.execute("INSERT INTO amounts VALUES (1.0, 'x')")
        with pytest.raises(errors.FeatureNotSupported):
            conn.execute("UPDATE amounts SET k = 1.00 WHERE k = 1.0")
        conn.execute("UPDATE amounts SET k = k, c = 'y' WHERE k = 1")
        assert [(str(k), c) for k, c in conn.execute("TABLE amounts")] == [("1.0", "y")]


WRONG = ["INSERT INTO t_{n} VALUES ({b}, 50, 'x')", "INSERT INTO t_{n} VALUES ({a}, 50), ({b}, 50)",
         "INSERT INTO t_{n} SELECT k, 50, c FROM local WHERE id = 1",
         "INSERT INTO t_{n} VALUES ({b}, 1) ON CONFLICT DO NOTHING",
         "WITH w AS (INSERT INTO t_{n} VALUES ({b}, 50) RETURNING *) TABLE w"]


@pytest.mark.parametrize("sql", WRONG)
def test_wrong_partition_is_refused(db, conn, far, sql):
    a, b = far
    before = stored(db)
    text = sql.format(a=a, b=b, n=db.owner(a, "int4"))
    for _ in range(2):
        with pytest.raises(errors.CheckViolation) as caught:
            conn.execute(text, prepare=True)
        assert caught.value.diag.message_hint
    assert stored(db) == before


def test_wrong_partition_by_copy(db, conn, far):
    a, b = far
    before = stored(db)
    for good in (0, 1, 2500):
        rows = [(a, n, "x") for n in range(100, 100 + good)] + [(b, 50, "x")]
        with pytest.raises(errors.CheckViolation), conn.cursor() as cursor:
            with cursor.copy(f"COPY t_{db.owner(a, 'int4')} FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
        assert stored(db) == before


def test_right_partition_is_written(db, conn, far):
    a, _ = far
    n = db.owner(a, "int4")
    conn.execute(f"INSERT INTO t_{n} VALUES ({a}, 50, 'x')")
    assert conn.execute(f"UPDATE t_{n} SET c = 'y' WHERE k = {a} AND id = 50").rowcount == 1
    assert (a, 50, "y") in stored(db)


@ROUTING
@pytest.mark.parametrize("on", ["t", "t_{n}"])
def test_a_trigger_that_changes_the_key(db, far, routing, on):
    a, _ = far
    before = stored(db)
    on = on.format(n=db.owner(a, "int4"))
    db.psql(f"CREATE TRIGGER divert BEFORE INSERT OR UPDATE ON {on} FOR EACH ROW EXECUTE FUNCTION divert()")
    try:
        with db.connect(shardmap__enable_routing=routing) as conn:
            for sql in (f"INSERT INTO t VALUES ({a}, 50, 'x')", f"UPDATE t SET c = 'x' WHERE k = {a}",
                        f"INSERT INTO t SELECT {a}, id + 50, c FROM local WHERE k = 1"):
                try:
                    conn.execute(sql)
                except (errors.CheckViolation, errors.FeatureNotSupported):
                    assert stored(db) == before
                else:  # the new key is on the same shard
                    stored(db)
                    conn.execute(f"DELETE FROM t WHERE k IN ({a}, {a} + 1)")
                    conn.execute("INSERT INTO t SELECT * FROM local WHERE k IN (%s, %s)", (a, a + 1))
    finally:
        db.psql(f"DROP TRIGGER divert ON {on}")


@ROUTING
def test_triggers_fire(db, far, routing):
    a, _ = far
    db.psql("""CREATE TRIGGER stamp BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION stamp();
               CREATE TRIGGER after AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note();
               CREATE TRIGGER once AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH STATEMENT EXECUTE FUNCTION note();
               CREATE TRIGGER first BEFORE INSERT OR UPDATE OR DELETE ON t FOR EACH STATEMENT
                   EXECUTE FUNCTION note()""")
    try:
        with db.connect(shardmap__enable_routing=routing) as conn:
            def fired(sql):
                conn.execute("DELETE FROM log")
                conn.execute(sql)
                return [what for (what,) in conn.execute("SELECT what FROM log")]

            for sql, op, count in ((f"INSERT INTO t VALUES ({a}, 50, 'x')", "INSERT", 1),
                                   (f"UPDATE t SET c = 'x' WHERE k = {a} AND id < 50", "UPDATE", 2),
                                   (f"DELETE FROM t WHERE k = {a} AND id = 50", "DELETE", 1),
                                   (f"UPDATE t SET c = 'x' WHERE k = {a} AND id = 77", "UPDATE", 0)):
                want = [f"BEFORE {op} STATEMENT", *[f"AFTER {op} ROW"] * count, f"AFTER {op} STATEMENT"]
                assert fired(sql) == want, sql
            assert {c for k, _, c in stored(db) if k == a} == {"stamped"}
    finally:
        db.psql("DROP TRIGGER stamp ON t; DROP TRIGGER after ON t; DROP TRIGGER once ON t; DROP TRIGGER first ON t")


@ROUTING
def test_constraints_hold(db, far, routing):
    a, _ = far
    before = stored(db)
    with db.connect(shardmap__enable_routing=routing) as conn:
        for sql, error in ((f"INSERT INTO t VALUES ({a}, 50, 'bad')", errors.CheckViolation),
                           (f"INSERT INTO t SELECT {a}, 50, 'bad'", errors.CheckViolation),
                           (f"UPDATE t SET c = 'bad' WHERE k = {a}", errors.CheckViolation),
                           (f"INSERT INTO t VALUES ({a}, 1, 'x')", errors.UniqueViolation),
                           (f"INSERT INTO t VALUES ({a}, 50), ({a}, 50)", errors.UniqueViolation),
                           (f"INSERT INTO t VALUES ({a}, NULL)", errors.NotNullViolation),
                           (f"UPDATE t SET id = 1 WHERE k = {a}", errors.UniqueViolation)):
            with pytest.raises(error):
                conn.execute(sql)
            assert isinstance(conn.execute("SELECT 1").fetchone(), tuple)
    assert stored(db) == before


def test_failed_statement_in_a_transaction_undoes_nothing_else(db, far):
    a, b = far
    with db.connect() as conn:
        conn.execute("BEGIN")
        conn.execute("INSERT INTO t VALUES (%s, 60, 'kept')", (a,))
        conn.execute("SAVEPOINT s")
        with pytest.raises(psycopg.Error):
            conn.execute("UPDATE t SET k = %s WHERE k = %s", (b, a))
        conn.execute("ROLLBACK TO s")
        conn.execute("INSERT INTO t VALUES (%s, 60, 'kept')", (b,))
        conn.execute("SAVEPOINT s")
        conn.execute("INSERT INTO t VALUES (%s, 61, 'lost')", (b,))
        conn.execute("ROLLBACK TO s; COMMIT")
    assert [row for row in stored(db) if row[1] >= 60] == sorted([(a, 60, "kept"), (b, 60, "kept")])

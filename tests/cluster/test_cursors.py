"""Rows that are on their way when something else is asked of their shard: cursors, loops, savepoints.

Each answer is compared with what the same statements give on an ordinary table.
"""

import pytest

SETUP = """
CREATE TABLE item (k int, id int, v text, PRIMARY KEY (k, id));
SELECT shardmap.distribute_table('item', 'k');
INSERT INTO item SELECT 7, i, repeat('x', 50) || i FROM generate_series(1, 5000) i;
INSERT INTO item SELECT i, 0, 'other' FROM generate_series(100, 400) i;
CREATE TABLE plain AS TABLE item;
CREATE FUNCTION loop_over(name text, condition text) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    r record; seen bigint := 0; failed bigint := 0; sum bigint := 0; inner_rows bigint;
BEGIN
    FOR r IN EXECUTE format('SELECT * FROM %I WHERE %s', name, condition) LOOP
        seen := seen + 1; sum := sum + r.id;
        CONTINUE WHEN r.id % 500 <> 0;
        EXECUTE format('SELECT count(*) FROM %I WHERE k = $1', name) INTO inner_rows USING r.k;
        BEGIN
            EXECUTE format('UPDATE %I SET v = %L WHERE k = $1 AND id = $2', name, 'changed') USING r.k, r.id;
            PERFORM 1 / (r.id % 1000);
        EXCEPTION WHEN division_by_zero THEN
            failed := failed + 1;
        END;
    END LOOP;
    RETURN ARRAY[seen, failed, sum, inner_rows];
END $$;
"""

CONDITIONS = ("k = 7", "k IN (7, 100, 200)", "true")


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("setting", ("enable_router", "enable_routing", None))
def test_a_loop_goes_on_after_its_body_failed(conn, condition, setting):
    if setting:
        conn.execute(f"SET shardmap.{setting} = off")
    conn.execute("BEGIN")
    found, wanted = (conn.execute("SELECT loop_over(%s, %s)", (name, condition)).fetchone()[0] for name in ("item", "plain"))
    same = [conn.execute(f"SELECT sum(hashtext(v)) FROM {name}").fetchone() for name in ("item", "plain")]
    conn.execute("ROLLBACK")
    assert found == wanted and same[0] == same[1]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_cursor_goes_on_after_a_savepoint_in_which_it_was_read(conn, condition):
    rows = {}
    for name in ("item", "plain"):
        conn.execute("BEGIN")
        conn.execute(f"DECLARE c CURSOR FOR SELECT k, id FROM {name} WHERE {condition} ORDER BY k, id")
        found = conn.execute("FETCH 3 FROM c").fetchall()
        conn.execute("SAVEPOINT s")
        conn.execute(f"UPDATE {name} SET v = 'y' WHERE k = 7 AND id = 1")
        found += conn.execute("FETCH 700 FROM c").fetchall()
        conn.execute("ROLLBACK TO s")
        found += conn.execute("FETCH ALL FROM c").fetchall()
        conn.execute("ROLLBACK")
        rows[name] = found
    assert rows["item"] == rows["plain"]


def test_two_cursors_on_one_shard_take_turns(conn):
    conn.execute("BEGIN")
    for name in ("a", "b"):
        conn.execute(f"DECLARE {name} CURSOR FOR SELECT id FROM item WHERE k = 7 ORDER BY id")
    found = {"a": [], "b": []}
    for number in (1, 600, 2, 3000, 5000):
        for name in found:
            found[name] += [id for id, in conn.execute(f"FETCH {number} FROM {name}").fetchall()]
    conn.execute("COMMIT")
    assert found["a"] == found["b"] == list(range(1, 5001))


def test_a_cursor_left_in_the_middle_leaves_the_session_usable(conn):
    for sql in ("SELECT * FROM item WHERE k = 7", "SELECT * FROM item"):
        conn.execute("BEGIN")
        conn.execute(f"DECLARE c CURSOR FOR {sql}")
        conn.execute("FETCH 1 FROM c")
        conn.execute("CLOSE c")
        assert conn.execute("SELECT count(*) FROM item WHERE k = 7").fetchone() == (5000,)
        conn.execute("COMMIT")
    assert conn.execute("SELECT count(*) FROM item").fetchone() == (5301,)

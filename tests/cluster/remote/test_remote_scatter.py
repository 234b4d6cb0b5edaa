"""shardmap.run_on_shards(): one statement on every shard."""

import pytest
from patience import PATIENCE
from psycopg import errors
from remote_place import SLEEP, everywhere, keys, rows, run_in_thread


def test_run_on_shards(conn):
    found = everywhere(conn, "SELECT 1 AS i, 12345678901234567890.10 AS n, 'NaN'::float8 AS f, NULL AS z, false AS b,"
                             " $$a\"\\\n\x01é$$ AS s, '[1]'::jsonb AS j")
    assert [row[:3] for row in found] == [(f"shard-{number}", True, "SELECT 1") for number in range(3)]
    assert found[0][4] is None
    assert found[0][3] == [{"i": 1, "n": 12345678901234567890.10, "f": "NaN", "z": None, "b": False,
                            "s": "a\"\\\n\x01é", "j": [1]}]
    exact = conn.execute("SELECT result->0->>'n' FROM shardmap.run_on_shards('SELECT 12345678901234567890.10 AS n')")
    assert exact.fetchone()[0] == "12345678901234567890.10"


def test_run_on_shards_rows(place, conn):
    assert {row[2:] for row in map(tuple, everywhere(conn, "CREATE TABLE public.r (a int)"))} == {("CREATE TABLE", None, None)}
    assert [row[3] for row in everywhere(conn, "TABLE public.r")] == [[], [], []]
    found = everywhere(conn, "SELECT * FROM generate_series(1, 1500) AS a")
    assert [(row[2], len(row[3])) for row in found] == [("SELECT 1500", 1000)] * 3
    assert [row[2] for row in everywhere(conn, "VACUUM public.r")] == ["VACUUM"] * 3
    assert [row[3] for row in everywhere(conn, "SELECT 1 AS a; SELECT 2 AS b")] == [[{"b": 2}]] * 3
    assert [row[3] for row in everywhere(conn, "SELECT 1 AS a; DROP TABLE public.r")] == [None] * 3


def test_run_on_shards_is_not_in_the_transaction(place, conn):
    with conn.transaction(force_rollback=True):
        everywhere(conn, "INSERT INTO public.t VALUES (1)")
    assert [keys(place, number) for number in range(3)] == [[1], [1], [1]]


def test_run_on_shards_with_errors(place, conn):
    with place.shard(1) as shard:
        shard.execute("INSERT INTO public.t VALUES (1)")
    found = everywhere(conn, "INSERT INTO public.t VALUES (1)")
    assert [row[1] for row in found] == [True, False, True]
    assert "(SQLSTATE 23505)\nDETAIL:  Key (a)=(1) already exists." in found[1][4]
    found = everywhere(conn, "COPY public.t FROM STDIN")
    assert all(not row[1] and "SQLSTATE 0A000" in row[4] for row in found)
    found = conn.execute("SELECT * FROM shardmap.run_on_each('{shard-2,nope,shard-0}', 'SELECT 1')").fetchall()
    assert [(row[0], row[1]) for row in found] == [("shard-2", True), ("nope", False), ("shard-0", True)]


def test_run_on_shards_uses_the_callers_search_path_and_leaves_nothing(conn):
    conn.execute("CREATE SCHEMA IF NOT EXISTS \"odd, sch\\\"\"\"")
    conn.execute("SET search_path = \"odd, sch\\\"\"\", public; SET TimeZone = 'Asia/Tokyo'")
    shown = everywhere(conn, "SELECT current_setting('search_path') AS p, current_setting('TimeZone') AS z")
    assert shown[0][3] == [{"p": "\"odd, sch\\\"\"\", public", "z": "Asia/Tokyo"}]
    everywhere(conn, "SET work_mem = '77kB'; CREATE TEMP TABLE leftover (a int)")
    assert everywhere(conn, "SELECT count(*) AS n FROM t, pg_class WHERE relname = 'leftover'")[0][3] == [{"n": 0}]
    assert rows(conn, "SHOW work_mem") != [["77kB"]]


def test_run_on_shards_is_concurrent_and_can_be_cancelled(place, conn):
    thread, caught = run_in_thread(lambda: everywhere(conn, SLEEP))
    for number in range(3):
        place.wait_for_shard(1, number)
    conn.cancel_safe()
    thread.join(PATIENCE)
    assert [type(error) for error in caught] == [errors.QueryCanceled]
    for number in range(3):
        place.wait_for_shard(0, number)
    conn.execute("SET statement_timeout = '500ms'")
    with pytest.raises(errors.QueryCanceled):
        everywhere(conn, SLEEP)
    for number in range(3):
        place.wait_for_shard(0, number)
    conn.execute("RESET statement_timeout")


def test_run_on_many_shards(conn):
    names = ["shard-0", "shard-1", "shard-2"] * 14
    found = conn.execute("SELECT * FROM shardmap.run_on_each(%s, 'SELECT 1')", (names,)).fetchall()
    assert [row[0] for row in found] == names and all(row[1] for row in found)

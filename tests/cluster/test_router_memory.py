"""A routed statement's memory is bounded: many rows pass through, and many statements, failed ones too, leave nothing."""

import contextlib
import os
import re

import pytest
from psycopg import errors, pq

SETUP = """
CREATE TABLE item (k int, id int, v text, PRIMARY KEY (k, id));
SELECT shardmap.distribute_table('item', 'k');
INSERT INTO item SELECT 7, i, 'value ' || i FROM generate_series(1, 10) i;
"""
ROWS = 300_000
MANY = f"SELECT id, v, g FROM item, generate_series(1, {ROWS}) g WHERE k = 7 AND id = 1"


def peak_mb(conn):
    with open(f"/proc/{conn.info.backend_pid}/status") as status:
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read()).group(1)) // 1024


def stream(conn, sql):
    """The number of rows, read one by one so that the client's memory does not matter."""
    conn.pgconn.send_query_params(sql.encode(), None)
    conn.pgconn.set_single_row_mode()
    rows = 0
    while result := conn.pgconn.get_result():
        assert result.status != pq.ExecStatus.FATAL_ERROR, result.error_message
        rows += result.ntuples
        result.clear()
    return rows


@pytest.mark.parametrize("in_transaction", (False, True))
def test_a_large_result_passes_through(db, in_transaction):
    with db.connect() as conn:
        conn.execute("SELECT count(*) FROM item WHERE k = 7")
        before = peak_mb(conn)
        if in_transaction:
            conn.execute("BEGIN")
        assert stream(conn, MANY) == ROWS
        assert peak_mb(conn) - before < 30


def test_a_loop_over_a_large_result(db):
    with db.connect() as conn:
        conn.execute("CREATE FUNCTION pg_temp.walk() RETURNS bigint LANGUAGE plpgsql AS $$ DECLARE r record; n bigint := 0;"
                     f" BEGIN FOR r IN {MANY} LOOP n := n + 1; END LOOP; RETURN n; END $$")
        conn.execute("SELECT count(*) FROM item WHERE k = 7")
        before = peak_mb(conn)
        assert conn.execute("SELECT pg_temp.walk()").fetchone() == (ROWS,)
        assert peak_mb(conn) - before < 30


def fails(conn, number):
    with contextlib.suppress(errors.DivisionByZero):
        conn.execute("SELECT 1 / (id - id) FROM item WHERE k = %s", (7,))


def violates(conn, number):
    with contextlib.suppress(errors.UniqueViolation):
        conn.execute("INSERT INTO item VALUES (7, 1, 'again')")


def is_cancelled(conn, number):
    with contextlib.suppress(errors.QueryCanceled), conn.transaction():
        conn.execute("SET LOCAL statement_timeout = 5")
        conn.execute("SELECT v, pg_sleep(1) FROM item WHERE k = 7 AND id = 1")


def cursor(conn, number):
    with conn.transaction():
        conn.execute("DECLARE c CURSOR FOR SELECT * FROM item WHERE k = 7; FETCH 3 FROM c")


def read(conn, number):
    conn.execute("SELECT v FROM item WHERE k = %s AND id = 1", (7,))


# By the last digit of a statement's number: a tenth are errors.
KINDS = [
    lambda conn, number: (violates if number % 20 == 0 else is_cancelled if number % 1000 == 10 else fails)(conn, number),
    lambda conn, number: conn.execute("UPDATE item SET v = v WHERE k = %s AND id = %s", (7, number % 5), prepare=number % 3 == 0),
    lambda conn, number: conn.execute(f"SELECT id + {number} FROM item WHERE k = 7 LIMIT 1"),  # its own text each time
    lambda conn, number: conn.execute("UPDATE item SET v = 'w' WHERE k = %s AND id = 2 RETURNING *", (7,)),
    lambda conn, number: conn.execute("INSERT INTO item VALUES (7, 11, 'x') ON CONFLICT (k, id) DO UPDATE SET v = excluded.v"),
    cursor, read, read, read, read,
]


MANY_STATEMENTS = int(os.environ.get("LEAK_STATEMENTS", 10_000))


@pytest.mark.soak
@pytest.mark.timeout(300 + MANY_STATEMENTS // 20)
def test_many_statements_leave_nothing(db):
    """LEAK_STATEMENTS says how many, 100,000 say; the first third brings caches to their size."""
    with db.connect() as conn:
        peaks = [peak_mb(conn)]
        for number in range(MANY_STATEMENTS):
            KINDS[number % 10](conn, number)
            if number % (MANY_STATEMENTS // 10) == MANY_STATEMENTS // 10 - 1:
                peaks.append(peak_mb(conn))
    print(f"\n{MANY_STATEMENTS} statements, peak in MB at the start and after each tenth: {peaks}")
    assert peaks[-1] - peaks[3] <= 4, peaks

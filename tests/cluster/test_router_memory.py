"""A routed statement's memory is bounded: many rows pass through, and many statements, failed ones too, leave nothing."""

import re

import psycopg
import pytest
from psycopg import pq

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


def test_many_statements_leave_nothing(db):
    with db.connect() as conn:
        def run(times):
            for number in range(times):
                try:
                    if number % 10 == 0:
                        conn.execute("SELECT 1 / (id - id) FROM item WHERE k = %s", (7,))
                    elif number % 10 == 1:
                        conn.execute("UPDATE item SET v = v WHERE k = %s AND id = %s", (7, number % 5), prepare=number % 3 == 0)
                    elif number % 10 == 2:  # a statement of its own each time
                        conn.execute(f"SELECT id + {number} FROM item WHERE k = 7 LIMIT 1")
                    else:
                        conn.execute("SELECT v FROM item WHERE k = %s AND id = 1", (7,))
                except psycopg.errors.DivisionByZero:
                    pass

        run(5_000)
        before = peak_mb(conn)
        run(15_000)
        assert peak_mb(conn) - before <= 4

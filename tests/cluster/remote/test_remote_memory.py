"""Many calls, good and bad, hold memory and file descriptors flat."""

import os

import pytest
from psycopg import errors
from remote_place import SLEEP, everywhere, execute


def memory(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]), len(os.listdir(f"/proc/{pid}/fd"))


def check_flat(conn, some, first, then):
    """`some(first)` calls may take what is kept for good; `some(then)` more take nothing that counts."""
    some(first)
    before = memory(conn.info.backend_pid)
    some(then)
    after = memory(conn.info.backend_pid)
    assert after[0] - before[0] < 1024, f"{before} kB before, {after} kB after"
    assert after[1] <= before[1] + 3


def test_ten_thousand_calls_hold_memory_flat(conn):
    def some(count):
        conn.execute("DO $$ BEGIN FOR i IN 1 .. %s LOOP"
                     " PERFORM * FROM shardmap.remote_rows('shard-0', 'SELECT pg_catalog.repeat(''x'', 10000)');"
                     " BEGIN PERFORM shardmap.remote_execute('shard-0', 'SELECT 1/0');"
                     " EXCEPTION WHEN division_by_zero THEN NULL; END;"
                     " END LOOP; END $$" % count)
        for _ in range(count // 10):
            execute(conn, "SELECT 1")
            execute(conn, "SELECT 1", transactional=False)
            with pytest.raises(errors.DivisionByZero):
                execute(conn, "SELECT 1/0")

    check_flat(conn, some, 500, 5000)


def test_lost_connections_hold_memory_flat(place, conn):
    def some(count):
        for _ in range(count):
            everywhere(conn, "SELECT 1")
            with pytest.raises(errors.QueryCanceled), conn.transaction():
                conn.execute("SET LOCAL statement_timeout = '5ms'")
                execute(conn, SLEEP)

    check_flat(conn, some, 30, 100)

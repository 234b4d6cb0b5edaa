"""A tenant moves while others read and write: nobody misses a row, sees one twice, or loses an update."""

import itertools

import psycopg
import pytest
from patience import lock_waiters
from tenants import plan, run

STEPS = ("move_hidden", "move_logging", "move_batch:3", "move_copied", "move_caught_up", "move_verified", "move_fenced", "move_flip",
         "move_flipped", "move_cleaning:1", "move_cleaning:3", "move_done")


def wait_until(crew, condition):
    while not condition():
        assert not crew.failures, crew.failures
        crew.over.wait(0.02)


class Writer:
    """Adds one to a random account of a tenant, moves entries, and remembers what was confirmed.

    Entries do not heap up: else each move of a test would take longer than the one before.
    """

    def __init__(self, tenants, tenant, seed):
        self.tenants, self.tenant, self.seed = tenants, tenant, seed
        self.added = dict.fromkeys(range(1, 41), 0)
        self.entries = set()

    def __call__(self, over):
        number = 0
        with self.tenants.connect() as conn:
            while not over.wait(0.01):
                number += 1
                account = (number * 7 + self.seed) % 40 + 1
                with conn.transaction():
                    conn.execute("UPDATE account SET balance = balance + 1 WHERE tenant = %s AND id = %s", (self.tenant, account))
                    entry = 10_000_000 * (self.seed + 1) + number
                    conn.execute("INSERT INTO entry VALUES (%s, %s, %s)", (entry, self.tenant, account))
                    gone = [entry - 20] + [entry - 1] * (number % 3 == 0)
                    conn.execute("DELETE FROM entry WHERE id = ANY (%s) AND tenant = %s", (gone, self.tenant))
                self.added[account] += 1
                self.entries.add(entry)
                self.entries.difference_update(gone)


class Reader:
    """Counts over all tenants, again and again: what nobody changes is always the same."""

    SQL = {
        "all shards": "SELECT count(*), sum(tenant::bigint * id), count(DISTINCT (tenant, id)) FROM account",
        "a join": "SELECT count(*), sum(a.tenant::bigint * a.id) FROM account a JOIN entry e ON e.tenant = a.tenant AND e.id = a.tenant * 1000 + a.id",
        "the tenant": "SELECT count(*), sum(id) FROM account WHERE tenant = {tenant}",
    }

    def __init__(self, tenants, tenant, sql, **settings):
        self.tenants, self.sql, self.settings = tenants, self.SQL[sql].format(tenant=tenant), settings
        self.rounds = 0

    def __call__(self, over):
        with self.tenants.connect(**self.settings) as conn:
            want = conn.execute(self.sql, prepare=True).fetchall()
            while not over.wait(0.01):
                got = conn.execute(self.sql, prepare=True).fetchall()
                assert got == want, f"{self.sql}: {got} instead of {want}"
                self.rounds += 1


def check(tenants, conn, tenant, writers):
    added = {account: sum(writer.added[account] for writer in writers) for account in range(1, 41)}
    assert dict(conn.execute("SELECT id, balance FROM account WHERE tenant = %s", (tenant,)).fetchall()) == added
    entries = {row[0] for row in conn.execute("SELECT id FROM entry WHERE tenant = %s AND id >= 10000000", (tenant,))}
    assert entries == set().union(*(writer.entries for writer in writers))
    assert len(tenants.stored(tenant)) == 1, "doubled"
    assert conn.execute("SELECT count(*) = sum(twice - 2 * balance + 1) FROM account").fetchone() == (True,)


def start(crew, tenants, tenant):
    writers = [Writer(tenants, tenant, seed) for seed in range(2)]
    readers = [Reader(tenants, tenant, sql) for sql in Reader.SQL]
    readers.append(Reader(tenants, tenant, "all shards", plan_cache_mode="force_generic_plan"))
    for work in writers + readers:
        crew.start(work)
    return writers, readers


def test_counts_and_counters_do_not_waver(tenants, conn, crew):
    tenant = tenants.fresh(0)
    writers, readers = start(crew, tenants, tenant)

    def were_busy():
        """Everybody has had enough of it, and a move has met changes."""
        return (all(reader.rounds > 3 for reader in readers) and all(sum(writer.added.values()) > 20 for writer in writers)
                and conn.execute("SELECT sum(changes) > 0 FROM shardmap.moves").fetchone() == (True,))
    for round_, target in enumerate(itertools.cycle((1, 2, 0))):
        number = plan(conn, tenant, target)
        run(conn, number)
        assert set(tenants.stored(tenant)) == {target}
        assert not crew.failures, crew.failures
        if round_ >= 3 and were_busy():
            break
    crew.stop()
    check(tenants, conn, tenant, writers)


@pytest.mark.parametrize("step", STEPS)
def test_the_session_breaks_off_under_load_and_another_goes_on(tenants, conn, crew, step):
    tenant = tenants.fresh(1)
    writers, _ = start(crew, tenants, tenant)
    number = plan(conn, tenant, 0)
    with tenants.connect(shardmap__crash_point=f"{step}=error") as runner, pytest.raises(psycopg.errors.InternalError_, match="crash point"):
        run(runner, number)
    run(conn, number)
    crew.stop()
    assert tenants.move(conn, number)["state"] == "done"
    check(tenants, conn, tenant, writers)
    assert tenants.left_behind() == []


def plan_and_verify(tenants, conn, tenant):
    """A move to shard 1 for which everything is done but the flip."""
    number = plan(conn, tenant, 1)
    with tenants.connect(shardmap__crash_point="move_fenced=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    return number


def test_a_writer_that_does_not_end_lifts_the_fence(tenants, conn, crew):
    tenant, other = tenants.fresh(0), tenants.fresh(2)
    number = plan_and_verify(tenants, conn, tenant)
    with tenants.connect() as writer, tenants.connect(shardmap__fence_timeout="50ms") as runner:
        writer.execute("BEGIN")
        writer.execute("UPDATE account SET balance = 5 WHERE tenant = %s AND id = 1", (other,))
        crew.start(lambda over: run(runner, number))
        wait_until(crew, lambda: conn.execute("SELECT fences FROM shardmap.moves WHERE id = %s", (number,)).fetchone()[0] >= 2)
        # Between two attempts others write.
        conn.execute("UPDATE account SET balance = 6 WHERE tenant = %s AND id = 2", (other,))
        writer.execute("COMMIT")
        crew.stop()
    assert tenants.move(conn, number)["state"] == "done"
    assert tenants.stored(tenant) == {1: (40, 40)}


def test_a_locked_row_is_a_writer(tenants, conn, crew):
    """Who has locked a row to change it by what he has read finds it as he has read it."""
    tenant = tenants.fresh(0)
    number = plan_and_verify(tenants, conn, tenant)
    with tenants.connect() as writer, tenants.connect(shardmap__fence_timeout="50ms") as runner:
        writer.execute("BEGIN")
        writer.execute("SELECT balance FROM account WHERE tenant = %s AND id = 1 FOR UPDATE", (tenant,))
        crew.start(lambda over: run(runner, number))
        wait_until(crew, lambda: conn.execute("SELECT fences FROM shardmap.moves WHERE id = %s", (number,)).fetchone()[0] >= 1)
        writer.execute("UPDATE account SET balance = 1 WHERE tenant = %s AND id = 1", (tenant,))
        writer.execute("COMMIT")
        crew.stop()
    assert conn.execute("SELECT balance FROM account WHERE tenant = %s AND id = 1", (tenant,)).fetchone() == (1,)


def test_a_writer_is_no_victim_of_cleaning(tenants, conn, crew):
    """Dropping the log takes the locks of a writer in the other order: it gives way, however long a fence may last."""
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    with tenants.connect(shardmap__crash_point="move_flipped=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    dsn = tenants.cluster.shard_dsn(1)
    with (psycopg.connect(dsn) as writer, psycopg.connect(dsn, autocommit=True) as watch,
          tenants.connect(shardmap__fence_timeout="60s") as runner):
        writer.execute("SELECT FROM entry WHERE tenant = %s FOR UPDATE", (tenant,))
        crew.start(lambda over: run(runner, number))
        wait_until(crew, lambda: lock_waiters(watch))
        writer.execute("UPDATE account SET balance = 9 WHERE tenant = %s", (tenant,))
        writer.commit()
        crew.stop()
    assert tenants.move(conn, number)["state"] == "done" and tenants.left_behind() == []
    assert conn.execute("SELECT DISTINCT balance FROM account WHERE tenant = %s", (tenant,)).fetchall() == [(9,)]


def test_a_reader_from_before_sees_no_copies(tenants, conn, crew):
    """A cursor of the map before has not begun with the target; rows come there only when it is over."""
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    count = conn.execute("SELECT count(*) FROM account").fetchone()[0]
    with tenants.connect() as reader, tenants.connect() as runner:
        reader.execute("BEGIN")
        reader.execute("DECLARE c CURSOR FOR SELECT id FROM account")
        crew.start(lambda over: run(runner, number))
        wait_until(crew, lambda: conn.execute("SELECT count(*) FROM shardmap.hidden_rows WHERE move = %s", (number,)).fetchone() != (0,))
        rows = reader.execute("FETCH 10 FROM c").fetchall()
        assert tenants.stored(tenant) == {0: (40, 40)}
        rows += reader.execute("FETCH ALL FROM c").fetchall()
        assert len(rows) == count
        reader.execute("COMMIT")
        crew.stop()
    assert tenants.stored(tenant) == {1: (40, 40)}


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("sql", ["SELECT count(*) FROM account WHERE tenant = %s", "SELECT count(*) FROM account WHERE %s IS NOT NULL",
                                 "UPDATE account SET balance = balance + 1 WHERE tenant = %s",
                                 "INSERT INTO account (tenant, id, balance) VALUES (%s, 77, 1)"])
def test_a_snapshot_from_before_does_not_go_on(tenants, conn, isolation, sql):
    """On the target it would lack the rows, or overwrite what it has not read."""
    tenant = tenants.fresh(0)
    number = plan_and_verify(tenants, conn, tenant)
    with tenants.connect() as reader, tenants.connect(shardmap__crash_point="move_flipped=error") as runner:
        reader.execute(f"BEGIN ISOLATION LEVEL {isolation}")
        reader.execute("SELECT count(*) FROM account").fetchone()
        with pytest.raises(psycopg.Error, match="crash point"):
            run(runner, number)
        with pytest.raises(psycopg.errors.SerializationFailure, match="change of the map"):
            reader.execute(sql, (tenant,))
        reader.execute("ROLLBACK")
        reader.execute(f"BEGIN ISOLATION LEVEL {isolation}")
        reader.execute(sql, (tenant,))
        reader.execute("ROLLBACK")
    run(conn, number)


def test_truncate_is_refused_meanwhile(tenants, conn):
    tenant = tenants.fresh(0)
    number = plan(conn, tenant, 1)
    with tenants.connect(shardmap__crash_point="move_copied=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)
    with pytest.raises(psycopg.errors.ObjectInUse, match="cannot truncate table"):
        conn.execute("TRUNCATE entry")
    run(conn, number)

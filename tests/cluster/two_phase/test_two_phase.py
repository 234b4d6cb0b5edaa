"""Which transactions commit in two phases, and that they do it whole or not at all."""

import re

import psycopg
import pytest
from ledger import ADD, transfer
from patience import wait_until
from psycopg import errors
from shardlog import ShardLog

JOURNAL = "INSERT INTO journal (note) VALUES ('x')"


@pytest.fixture
def logged(ledger):
    with ShardLog(ledger.cluster, ledger.cluster.database).switched_on():
        yield


def commits(ledger, call):
    """How many parts shards were told to prepare, and to commit, while `call()` ran: by the resolver too, if it takes long."""
    sizes = {server: server.log.stat().st_size for server in ledger.cluster.shard_servers}
    call()
    text = ""
    for server, size in sizes.items():
        with open(server.log, errors="replace") as log:
            log.seek(size)
            text += log.read()
    return tuple(len(set(re.findall(f"{verb} '(shardmap_\\w+)'", text))) for verb in ("PREPARE TRANSACTION", "COMMIT PREPARED"))


def statements(ids):
    """Transactions by their statements, and the number of shards that prepare."""
    first, second, third = ids
    read = f"SELECT balance FROM account WHERE id = {third}"
    add = "UPDATE account SET balance = balance WHERE id = "
    return {
        "one shard": ([f"{add}{first}"], 0),
        "one shard, twice": ([f"{add}{first}", f"{add}{first}"], 0),
        "one shard, others read": ([f"{add}{first}", read, f"SELECT sum(balance) FROM account WHERE id <> {second}"], 0),
        "reads only": ([read, "SELECT sum(balance) FROM account"], 0),
        "reads, and a local write": ([read, JOURNAL], 0),
        "a local write": ([JOURNAL], 0),
        "two shards": ([f"{add}{first}", f"{add}{second}"], 2),
        "two shards, one statement": ([f"{add}ANY ('{{{first},{second}}}')"], 2),
        "all shards": (["UPDATE account SET balance = balance"], 3),
        "all shards asked, one written": (["UPDATE account SET balance = balance WHERE abs(id) = " + str(first)], 0),
        "all shards asked, two written": (["DELETE FROM account WHERE abs(id) < 0", f"{add}{first}", f"{add}{second}"], 2),
        "statements that only read": (["SELECT shardmap.remote_rows('shard-0', 'SELECT 1')", JOURNAL], 0),
        "one shard and a local write": ([f"{add}{first}", JOURNAL], 1),
        "two shards and a local write": ([JOURNAL, f"{add}{first}", f"{add}{second}", read], 2),
        "a savepoint rolled back": ([f"{add}{first}", "SAVEPOINT s", f"{add}{second}", "ROLLBACK TO s"], 0),
        "a savepoint released": ([f"{add}{first}", "SAVEPOINT s", f"{add}{second}", "RELEASE s"], 2),
    }


@pytest.mark.parametrize("level", ["READ COMMITTED", "SERIALIZABLE"])
@pytest.mark.parametrize("name", statements([1, 2, 3]))
def test_protocol(ledger, conn, ids, logged, name, level):
    sqls, expected = statements(ids)[name]

    def run():
        conn.execute(f"BEGIN ISOLATION LEVEL {level}")
        for sql in sqls:
            conn.execute(sql)
        conn.execute("COMMIT")
    assert commits(ledger, run) == (expected, expected)


def test_read_only_transaction(ledger, conn, ids, logged):
    def run():
        conn.execute("BEGIN READ ONLY")
        for shard in range(3):
            conn.execute("SELECT shardmap.remote_execute(%s, 'SELECT 1')", (f"shard-{shard}",))
        conn.execute("COMMIT")
    assert commits(ledger, run) == (0, 0)


def test_writes_of_a_commit_are_seen_at_once(ledger, conn, ids):
    before = ledger.balances(*ids)
    with conn.transaction():
        transfer(conn, *ids)
    assert ledger.balances(*ids) == [before[0] - 20, before[1] + 10, before[2] + 10]
    assert ledger.prepared() == []


def test_ids_name_cluster_database_transaction_and_shard(ledger, conn, ids):
    with ledger.connect(shardmap__crash_point="after_decide=error") as breaking:
        system, database = breaking.execute(
            "SELECT system_identifier, (SELECT oid FROM pg_database WHERE datname = current_database())"
            " FROM pg_control_system()").fetchone()
        with ShardLog(ledger.cluster, ledger.cluster.database).switched_on(), pytest.raises(errors.InternalError):
            with breaking.transaction():
                transfer(breaking, *ids[:2])
                xid, server = breaking.execute(
                    "SELECT pg_current_xact_id(), (SELECT oid FROM pg_foreign_server WHERE srvname = 'shard-1')").fetchone()
            wait_until(lambda: not ledger.prepared(), ledger.prepared)
    log = ledger.cluster.shard_server(1).log.read_text()
    assert f"PREPARE TRANSACTION 'shardmap_{system}_{database}_{xid}_" in log and f"_{server}_2'" in log
    assert "ROLLBACK PREPARED 'shardmap_" in log


def test_rollback_leaves_nothing(ledger, conn, ids):
    before = ledger.balances(*ids)
    with conn.transaction(force_rollback=True):
        transfer(conn, *ids)
    assert ledger.balances(*ids) == before


def test_procedures_commit_in_two_phases_too(ledger, conn, ids):
    before = ledger.balances(*ids)
    conn.execute(f"DO $$ BEGIN FOR i IN 1..3 LOOP UPDATE account SET balance = balance - 1 WHERE id = {ids[0]};"
                 f" UPDATE account SET balance = balance + 1 WHERE id = {ids[1]}; COMMIT; END LOOP; END $$")
    assert ledger.balances(*ids[:2]) == [before[0] - 3, before[1] + 3]


@pytest.mark.parametrize("point", ["before_prepare", "prepare_sent", "after_prepare:1", "after_prepare:3",
                                   "before_decide", "after_decide"])
def test_errors_before_the_decision_undo_everything(ledger, ids, point):
    before = ledger.balances(*ids)
    with ledger.connect() as conn:
        conn.execute(f"SET shardmap.crash_point = '{point}=error'")
        with pytest.raises(errors.InternalError, match="crash point"), conn.transaction():
            conn.execute(JOURNAL)
            transfer(conn, *ids)
        wait_until(lambda: not ledger.prepared(), ledger.prepared)
        assert ledger.balances(*ids) == before
        conn.execute("RESET shardmap.crash_point")
        # The session and its connections go on.
        with conn.transaction():
            transfer(conn, *ids)
    assert ledger.balances(*ids) != before


def test_a_shard_that_cannot_prepare(ledger, conn, ids):
    """Its own error reaches the client, and the others are rolled back."""
    ledger.cluster.shard_psql(1, "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS"
                       " 'BEGIN RAISE EXCEPTION ''not here'' USING ERRCODE = ''P0042''; END'; CREATE CONSTRAINT TRIGGER no"
                       " AFTER UPDATE ON account DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION no()")
    before = ledger.balances(*ids)
    try:
        with pytest.raises(psycopg.Error, match="not here") as caught, conn.transaction():
            transfer(conn, *ids)
        assert caught.value.sqlstate == "P0042" and 'shard "shard-1"' in caught.value.diag.context
    finally:
        ledger.cluster.shard_psql(1, "DROP TRIGGER no ON account; DROP FUNCTION no()")
    # A shard that does not answer at once is told by the resolver.
    wait_until(lambda: not ledger.prepared(), ledger.prepared)
    assert ledger.balances(*ids) == before
    with conn.transaction():
        transfer(conn, *ids)


def test_a_temporary_table_on_a_shard(ledger, conn, ids):
    with pytest.raises(errors.FeatureNotSupported) as caught, conn.transaction():
        conn.execute("SELECT shardmap.remote_execute('shard-1', 'CREATE TEMPORARY TABLE tt (a int)')")
        conn.execute(ADD, (0, ids[0]))
    assert "one_phase" in caught.value.diag.message_hint


def test_refuse(ledger, conn, ids):
    conn.execute("SET shardmap.multi_shard_commit = refuse")
    before = ledger.balances(*ids)
    with pytest.raises(errors.FeatureNotSupported) as caught, conn.transaction():
        transfer(conn, *ids[:2])
    assert caught.value.diag.message_detail == 'It wrote on "shard-0", "shard-1", and shardmap.multi_shard_commit is refuse.'
    with pytest.raises(errors.FeatureNotSupported, match="more than one place"), conn.transaction():
        conn.execute(ADD, (1, ids[0]))
        conn.execute(JOURNAL)
    assert ledger.balances(*ids) == before
    with conn.transaction():
        conn.execute(ADD, (0, ids[0]))
        conn.execute("SELECT sum(balance) FROM account")


def test_one_phase(ledger, conn, ids, logged):
    conn.execute("SET shardmap.multi_shard_commit = one_phase")
    before = ledger.balances(*ids)

    def run():
        with conn.transaction():
            transfer(conn, *ids)
    assert commits(ledger, run) == (0, 0)
    assert ledger.balances(*ids) != before


def test_prepare_transaction_by_the_user(ledger, conn, ids):
    conn.execute("BEGIN")
    transfer(conn, *ids)
    with pytest.raises(errors.FeatureNotSupported, match="cannot PREPARE a transaction that has used shards"):
        conn.execute("PREPARE TRANSACTION 'mine'")


def test_a_shard_without_prepared_transactions(ledger, ids):
    server = ledger.cluster.shard_server(2)
    server.configure(max_prepared_transactions=0)
    server.restart()
    before = ledger.balances(*ids)
    try:
        with ledger.connect() as conn:
            with pytest.raises(errors.ObjectNotInPrerequisiteState) as caught, conn.transaction():
                transfer(conn, *ids)
            diag = caught.value.diag
            assert 'shard "shard-2" does not allow prepared transactions' in diag.message_primary
            assert "max_prepared_transactions" in diag.message_hint and "one_phase" in diag.message_hint
            wait_until(lambda: not ledger.prepared(), ledger.prepared)
            assert ledger.balances(*ids) == before
            with conn.transaction():
                conn.execute(ADD, (0, ids[2]))
            # One shard and the coordinator commit one after the other; a sequence is as much as a write here now and then.
            with conn.transaction():
                conn.execute(ADD, (0, ids[2]))
                conn.execute(JOURNAL)
            # Administration works on any shard.
            conn.execute("CREATE TABLE drawn (k int, id bigserial, PRIMARY KEY (k, id)); INSERT INTO drawn SELECT generate_series(1, 50)")
            conn.execute("SELECT shardmap.distribute_table('drawn', 'k')")
            for _ in range(70):
                conn.execute("INSERT INTO drawn (k) VALUES (%s)", (ids[2],))
            assert conn.execute("SELECT count(*) FROM drawn").fetchone() == (120,)
            conn.execute("DROP TABLE drawn")
            conn.execute("SET shardmap.multi_shard_commit = one_phase")
            with conn.transaction():
                transfer(conn, *ids)
            assert ledger.balances(*ids) != before
            conn.execute("RESET shardmap.multi_shard_commit")
            # What administration only looks at on a shard is no write there.
            server.psql("CREATE DATABASE spare")
            conn.execute("SELECT shardmap.create_keyspace('spare'), shardmap.add_shard('spare', host => '127.0.0.1',"
                         f" port => {server.port}, dbname => 'spare', keyspace => 'spare')")
            conn.execute("SELECT shardmap.pin_key(-1, 'shard-2'), shardmap.unpin_key(-1)")
            conn.execute("SELECT shardmap.drop_shard('spare'), shardmap.drop_keyspace('spare')")
    finally:
        server.configure(max_prepared_transactions=64)
        server.restart()


def test_ordinary_users(ledger, ids):
    """They commit in two phases, and have no other way to the records, nor to crash points."""
    ledger.cluster.psql("CREATE ROLE teller LOGIN; GRANT ALL ON account, journal, journal_id_seq TO teller;" + "".join(
        f"CREATE USER MAPPING FOR teller SERVER \"shard-{n}\" OPTIONS (user 'teller', password_required 'false');"
        for n in range(3)))
    for n in range(3):
        ledger.cluster.shard_psql(n, "CREATE ROLE teller LOGIN; GRANT ALL ON account TO teller")
    before = ledger.balances(*ids)
    with ledger.connect("teller") as conn:
        with conn.transaction():
            transfer(conn, *ids)
            conn.execute(JOURNAL)
        for sql in ("INSERT INTO shardmap.transactions VALUES ('x', '3', '{}', now())", "DELETE FROM shardmap.transactions",
                    "SELECT * FROM shardmap.in_doubt", "SELECT shardmap.resolve_transactions()",
                    "SET shardmap.crash_point = 'before_decide'"):
            with pytest.raises(errors.InsufficientPrivilege):
                conn.execute(sql)
    assert ledger.balances(*ids) != before


def test_two_users_of_one_shard(ledger, conn, ids):
    """They are two parts: each connection prepares for itself."""
    with conn.transaction():
        conn.execute(ADD, (-1, ids[0]))
        conn.execute("SET LOCAL ROLE teller")
        conn.execute(ADD, (1, ledger.keys(1)[-1]))
        conn.execute("SELECT balance FROM account WHERE id = %s", (ids[2],))
    assert ledger.prepared() == []


def test_without_preloading(ledger, ids):
    """Nothing would finish what a failure leaves: such commits are refused, and there are no workers."""
    before = ledger.balances(*ids)
    ledger.coordinator.configure(shared_preload_libraries=None)
    ledger.coordinator.restart()
    try:
        with ledger.connect() as conn:
            conn.execute("LOAD 'pg_shardmap'")
            with pytest.raises(errors.ObjectNotInPrerequisiteState) as caught, conn.transaction():
                transfer(conn, *ids)
            assert "shared_preload_libraries" in caught.value.diag.message_hint
            conn.execute("SET shardmap.multi_shard_commit = one_phase")
            with conn.transaction():
                transfer(conn, *ids)
            assert conn.execute("SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'pg_shardmap%'"
                                ).fetchone() == (0,)
        assert ledger.balances(*ids) != before
    finally:
        ledger.coordinator.configure(shared_preload_libraries="pg_shardmap")
        ledger.coordinator.restart()

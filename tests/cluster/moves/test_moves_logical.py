"""Moves by logical replication: nothing is lost, doubled or left behind, on servers of their own and on databases of one."""

import psycopg
import pytest
from cluster import Cluster
from fleet import KEYS, Fleet, Load
from patience import Running, crashing, wait_until
from tenants import SETTINGS, SHARDS, Tenants, run
from test_moves_crashes import finish
from test_moves_rollback import check as check_rolled_back
from test_moves_rollback import write_after
from test_moves_under_load import Writer, start
from test_moves_under_load import check as check_load
from test_rebalance import STRATEGIES

LOGICAL = {"wal_level": "logical", "max_prepared_transactions": "20", "wal_receiver_status_interval": "1"}
POINTS = ("move_hidden", "move_subscribing", "move_logging", "move_copied", "move_caught_up", "move_verified", "move_logging_back",
          "move_fenced", "move_flip", "after_local_commit", "move_unsubscribe", "move_unsubscribing", "move_unsubscribed", "move_flipped",
          "move_cleaning:2", "move_done")
LEFT = """SELECT 'slot ' || slot_name FROM pg_replication_slots UNION ALL SELECT 'publication ' || pubname FROM pg_publication
    UNION ALL SELECT 'subscription ' || subname FROM pg_subscription UNION ALL SELECT 'origin ' || roname FROM pg_replication_origin"""


@pytest.fixture(scope="module", params=["servers", "databases"])
def tenants(request):
    with Cluster(shards=SHARDS, layout=request.param, coordinator_settings={**SETTINGS, "shardmap.fence_timeout": "5s"},
                 shard_settings=LOGICAL) as cluster:
        yield Tenants(cluster)


@pytest.fixture(scope="module")
def servers():
    with Cluster(shards=SHARDS, layout="servers", coordinator_settings={**SETTINGS, "shardmap.fence_timeout": "5s"},
                 shard_settings=LOGICAL) as cluster:
        yield Tenants(cluster)


def stop_at(tenants, number, point):
    with tenants.connect(shardmap__crash_point=f"{point}=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
        run(runner, number)


def plan(conn, tenant, target):
    return conn.execute("SELECT DISTINCT move FROM shardmap.move_key(%s, %s, engine => 'logical')", (tenant, f"shard-{target}")).fetchone()[0]


def left_behind(tenants):
    return tenants.left_behind() + [row[0] for shard in range(SHARDS) for row in tenants.on_shard(shard, LEFT)]


def check(tenants, tenant, number, target=1):
    with tenants.connect() as conn:
        move = tenants.move(conn, number)
        assert move["state"] == "done" and move["last_error"] is None, move
        assert conn.execute("SELECT engine, rows_copied, replicates FROM shardmap.move WHERE id = %s", (number,)).fetchone() == ("logical", 80, False)
        assert tenants.stored(tenant) == {target: (40, 40)} and left_behind(tenants) == []
        assert conn.execute("SELECT count(*), sum(twice) FROM account WHERE tenant = %s", (tenant,)).fetchone() == (40, 0)
        assert conn.execute("SELECT shard_for(%s)", (tenant,)).fetchone() == (f"shard-{target}",)


def test_a_key_moves(tenants):
    tenant = tenants.fresh(0)
    with tenants.connect() as conn:
        number = plan(conn, tenant, 1)
        run(conn, number)
    check(tenants, tenant, number)


def test_counts_and_counters_do_not_waver(tenants, crew):
    tenant = tenants.fresh(0)
    writers, readers = start(crew, tenants, tenant)
    with tenants.connect() as conn:
        for round_, target in enumerate((1, 2, 0) * 20):
            run(conn, plan(conn, tenant, target))
            assert set(tenants.stored(tenant)) == {target}
            assert not crew.failures, crew.failures
            if round_ >= 2 and all(reader.rounds > 3 for reader in readers) and all(sum(writer.added.values()) > 20 for writer in writers):
                break
        crew.stop()
        check_load(tenants, conn, tenant, writers)
    assert left_behind(tenants) == []


@pytest.mark.soak
@pytest.mark.parametrize("point", POINTS)
def test_the_session_is_killed(servers, point):
    tenant = servers.fresh(0)
    with servers.connect() as conn:
        number = plan(conn, tenant, 1)
    with crashing(servers.cluster.coordinator), servers.connect(shardmap__crash_point=point) as runner, pytest.raises(psycopg.OperationalError):
        run(runner, number)
    finish(servers, number)
    check(servers, tenant, number)


@pytest.mark.soak
@pytest.mark.parametrize("shard", [2, 1], ids=["source", "target"])
@pytest.mark.parametrize("point", ["move_logging", "move_verified", "move_fenced", "move_flipped"])
def test_a_shard_is_killed(servers, crew, shard, point):
    """It was writing when it stopped, and goes on where it was."""
    tenant = servers.fresh(2)
    with servers.connect() as conn:
        number = plan(conn, tenant, 1)
        stop_at(servers, number, point)
        conn.execute("UPDATE account SET balance = id WHERE tenant = %s", (tenant,))
    server = servers.cluster.shard_server(shard)
    server.kill()
    server.start()
    writer = Writer(servers, tenant, 1)
    writer.added = {account: account for account in writer.added}
    crew.start(writer)
    finish(servers, number)
    crew.stop()
    with servers.connect() as conn:
        check_load(servers, conn, tenant, [writer])
        assert set(servers.stored(tenant)) == {1}
    assert left_behind(servers) == []


@pytest.mark.parametrize("point", ["move_subscribing", "move_logging", "move_fenced"])
def test_a_move_is_given_up(tenants, point):
    tenant = tenants.fresh(0)
    with tenants.connect() as conn:
        number = plan(conn, tenant, 1)
        stop_at(tenants, number, point)
        conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
        run(conn, number)
        assert tenants.move(conn, number)["state"] == "rolled_back"
    assert tenants.stored(tenant) == {0: (40, 40)} and left_behind(tenants) == []


def test_the_source_keeps_no_log_for_a_target_that_is_gone(servers):
    tenant, target = servers.fresh(0), servers.cluster.shard_server(1)
    with servers.connect() as conn:
        number = plan(conn, tenant, 1)
        stop_at(servers, number, "move_verified")
        conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
    target.kill()
    try:
        with servers.connect() as conn, pytest.raises(psycopg.OperationalError):
            run(conn, number)
        assert servers.on_shard(0, "SELECT slot_name FROM pg_replication_slots") == []
    finally:
        target.start()
    finish(servers, number)
    assert servers.stored(tenant) == {0: (40, 40)} and left_behind(servers) == []


@pytest.mark.parametrize("point", ["move_unsubscribe", "move_unsubscribing", "move_flipped"])
def test_a_move_is_taken_back(tenants, point):
    """Also when it is asked for before the subscription is gone."""
    tenant = tenants.fresh(0)
    with tenants.connect() as conn:
        number = plan(conn, tenant, 1)
        stop_at(tenants, number, point)
        assert tenants.move(conn, number)["state"] == "flipped"
        rows = write_after(conn, tenant)
        conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
        run(conn, number)
    check_rolled_back(tenants, tenant, number, rows)
    assert left_behind(tenants) == []


def test_nothing_is_deleted_or_taken_back_while_it_would_be_replicated(tenants):
    """The catalog is wrong about it: the shard itself is asked."""
    tenant = tenants.fresh(0)
    with tenants.connect() as conn:
        number = plan(conn, tenant, 1)
        stop_at(tenants, number, "move_unsubscribe")
        conn.execute("UPDATE shardmap.move SET replicates = false WHERE id = %s", (number,))
        conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
        with pytest.raises(psycopg.errors.ObjectInUse, match="still replicated") as caught:
            run(conn, number)
        assert "Drop the subscription" in caught.value.diag.message_hint
        conn.execute("SELECT shardmap._update_move(%s, '{\"wish\": null}')", (number,))
        with pytest.raises(psycopg.errors.ObjectInUse, match="still replicated"):
            run(conn, number)
        assert tenants.move(conn, number)["state"] == "cleaning"
        assert tenants.stored(tenant) == {0: (40, 40), 1: (40, 40)}
        conn.execute("UPDATE shardmap.move SET replicates = true WHERE id = %s", (number,))
        run(conn, number)
    check(tenants, tenant, number)


def test_a_difference_stops_the_move(tenants):
    tenant = tenants.fresh(0)
    with tenants.connect() as conn:
        number = plan(conn, tenant, 1)
        stop_at(tenants, number, "move_caught_up")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="goes by logical replication"):
            conn.execute("SELECT * FROM shardmap.verify_move(%s)", (number,))
        with psycopg.connect(tenants.cluster.shard_dsn(1), autocommit=True) as target:
            target.execute("UPDATE account SET balance = 7 WHERE tenant = %s AND id = 3", (tenant,))
        with pytest.raises(psycopg.errors.DataCorrupted, match="rows of table public.account differ"):
            run(conn, number)
        conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
        run(conn, number)
        assert tenants.move(conn, number)["state"] == "rolled_back"
    assert tenants.stored(tenant) == {0: (40, 40)} and left_behind(tenants) == []


def test_a_conflict_on_the_target_stops_the_move_until_it_is_gone(tenants):
    tenant = tenants.fresh(0)
    with tenants.connect() as conn, psycopg.connect(tenants.cluster.shard_dsn(1), autocommit=True) as target:
        number = plan(conn, tenant, 1)
        stop_at(tenants, number, "move_verified")
        target.execute("INSERT INTO account (tenant, id, balance) VALUES (%s, 77, 5)", (tenant,))
        conn.execute("INSERT INTO account (tenant, id, balance) VALUES (%s, 77, 6)", (tenant,))
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="stopped by an error"):
            run(conn, number)
        assert "stopped by an error" in tenants.move(conn, number)["last_error"]
        assert conn.execute("SELECT shard_for(%s)", (tenant,)).fetchone() == ("shard-0",)
        target.execute("DELETE FROM account WHERE tenant = %s AND id = 77", (tenant,))
        run(conn, number)
        assert conn.execute("SELECT balance FROM account WHERE tenant = %s AND id = 77", (tenant,)).fetchone() == (6,)
        assert tenants.move(conn, number)["state"] == "done"
    assert tenants.stored(tenant) == {1: (41, 40)} and left_behind(tenants) == []


def test_a_lost_slot_ends_the_move(servers):
    """Invalidated by max_slot_wal_keep_size, while the target did not read."""
    tenant = servers.fresh(0)
    with servers.connect() as conn, psycopg.connect(servers.cluster.shard_dsn(0), autocommit=True) as source:
        number = plan(conn, tenant, 1)
        stop_at(servers, number, "move_verified")
        with psycopg.connect(servers.cluster.shard_dsn(1), autocommit=True) as target:
            target.execute(f"ALTER SUBSCRIPTION shardmap_move_{number} DISABLE")
        source.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'")
        source.execute("ALTER SYSTEM SET wal_keep_size = 0")
        source.execute("SELECT pg_reload_conf()")
        lost = "SELECT wal_status FROM pg_replication_slots WHERE NOT active"
        wait_until(lambda: source.execute("SHOW max_slot_wal_keep_size").fetchone() == ("1MB",))
        wait_until(lambda: source.execute(lost).fetchall())
        for _ in range(5):
            source.execute("SELECT pg_switch_wal() FROM pg_logical_emit_message(false, 'test', 'x')")
        source.execute("CHECKPOINT")
        assert source.execute(lost).fetchall() == [("lost",)]
        source.execute("ALTER SYSTEM RESET ALL")
        source.execute("SELECT pg_reload_conf()")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match='replication slot of move .* on shard "shard-0" is lost'):
            run(conn, number)
        conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
        run(conn, number)
        assert servers.move(conn, number)["state"] == "rolled_back"
        number = plan(conn, tenant, 1)
        run(conn, number)
    check(servers, tenant, number)


def test_the_source_has_another_address_for_shards(servers):
    tenant = servers.fresh(0)
    with servers.connect() as conn:
        conn.execute("ALTER USER MAPPING FOR postgres SERVER \"shard-0\" OPTIONS (ADD password 'not-to-be-seen')")
        conn.execute("ALTER SERVER \"shard-0\" OPTIONS (ADD peer_host '127.0.0.1', ADD peer_port '1')")
        number = plan(conn, tenant, 1)
        with pytest.raises(psycopg.Error, match="could not connect to the publisher") as caught:
            run(conn, number)
        assert "not-to-be-seen" not in str(caught.value)
        conn.execute("ALTER SERVER \"shard-0\" OPTIONS (SET peer_port %s)" % repr(str(servers.cluster.shard_server(0).port)))
        run(conn, number)
        check(servers, tenant, number)
        conn.execute("ALTER SERVER \"shard-0\" OPTIONS (DROP peer_host, DROP peer_port)")
        conn.execute("ALTER USER MAPPING FOR postgres SERVER \"shard-0\" OPTIONS (DROP password)")
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="peer_port"):
            conn.execute("ALTER SERVER \"shard-0\" OPTIONS (ADD peer_port 'x')")
    for server in servers.cluster.servers():
        assert "not-to-be-seen" not in server.log.read_text()


CHECKS = {
    "wal_level": ("ALTER SYSTEM SET wal_level = replica", psycopg.errors.ObjectNotInPrerequisiteState, 'shard "shard-0" has wal_level replica'),
    "slots": ("ALTER SYSTEM SET max_replication_slots = 1", psycopg.errors.ConfigurationLimitExceeded, "1 free replication slots"),
}


@pytest.mark.parametrize("setting", CHECKS)
def test_what_a_source_must_have(servers, setting):
    change, error, message = CHECKS[setting]
    tenant, server = servers.fresh(0), servers.cluster.shard_server(0)
    server.psql(change)
    server.stop()
    server.start()
    try:
        with servers.connect() as conn:
            number = plan(conn, tenant, 1)
            with pytest.raises(error, match=message) as caught:
                run(conn, number)
            assert "engine => 'triggers'" in caught.value.diag.message_hint
            assert servers.move(conn, number)["state"] == "planned" and left_behind(servers) == []
            conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
            run(conn, number)
    finally:
        server.psql("ALTER SYSTEM RESET ALL")
        server.stop()
        server.start()


def test_what_a_table_must_have(servers):
    tenant = servers.fresh(0)
    with servers.connect() as conn, psycopg.connect(servers.cluster.shard_dsn(0), autocommit=True) as source:
        number = plan(conn, tenant, 1)
        source.execute("ALTER TABLE entry REPLICA IDENTITY NOTHING")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match='replica identity lacks column "tenant"'):
            run(conn, number)
        source.execute("ALTER TABLE entry REPLICA IDENTITY FULL")
        run(conn, number)
        check(servers, tenant, number)
        source.execute("ALTER TABLE entry REPLICA IDENTITY DEFAULT")
        with pytest.raises(psycopg.errors.InvalidParameterValue, match='no engine "other"'):
            conn.execute("SELECT * FROM shardmap.rebalance(engine => 'other')")


def test_who_may_not_publish_or_subscribe(servers):
    """A user who may all that moves with triggers need."""
    tenant = servers.fresh(0)
    for shard in (0, 1):
        servers.cluster.shard_psql(shard, "CREATE ROLE mover LOGIN PASSWORD 'mover'; GRANT ALL ON account, entry TO mover; "
                                   "GRANT CREATE ON DATABASE shard_%s TO mover" % shard)
    with servers.connect() as conn:
        for shard in (0, 1):
            conn.execute(f"ALTER USER MAPPING FOR postgres SERVER \"shard-{shard}\" OPTIONS (SET user 'mover')")
        number = plan(conn, tenant, 1)
        with servers.connect() as runner, pytest.raises(psycopg.errors.InsufficientPrivilege, match="does not let this user replicate"):
            run(runner, number)
        servers.cluster.shard_psql(0, "ALTER ROLE mover REPLICATION")
        with servers.connect() as runner, pytest.raises(psycopg.errors.InsufficientPrivilege, match="does not let this user subscribe"):
            run(runner, number)
        servers.cluster.shard_psql(1, "ALTER ROLE mover SUPERUSER")
        with servers.connect() as runner, pytest.raises(psycopg.errors.InsufficientPrivilege, match="does not let this user publish"):
            run(runner, number)
        for shard in (0, 1):
            conn.execute(f"ALTER USER MAPPING FOR postgres SERVER \"shard-{shard}\" OPTIONS (SET user 'postgres')")
    with servers.connect() as conn:
        run(conn, number)
    check(servers, tenant, number)


def test_writers_that_do_not_end_are_not_held_off_for_long(servers, crew):
    """Neither by the comparison nor by the flip."""
    tenant, other = servers.fresh(0), servers.fresh(0)
    with servers.connect() as conn, servers.connect() as writer, servers.connect(shardmap__fence_timeout="1s") as runner:
        number = plan(conn, tenant, 1)
        for point in ("move_caught_up", "move_verified"):
            stop_at(servers, number, point)
            writer.execute("BEGIN")
            writer.execute("UPDATE account SET balance = 5 WHERE tenant = %s AND id = 1", (other,))
            before = conn.execute("SELECT fences FROM shardmap.move WHERE id = %s", (number,)).fetchone()[0]
            thread = Running(lambda: run(runner, number))
            wait_until(lambda: conn.execute("SELECT fences FROM shardmap.move WHERE id = %s", (number,)).fetchone()[0] >= before + 2)
            conn.execute("UPDATE account SET balance = 6 WHERE tenant = %s AND id = 2", (other,))
            assert conn.execute("SELECT shard_for(%s)", (tenant,)).fetchone() == ("shard-0",)
            if point == "move_caught_up":
                conn.execute("SELECT shardmap.pause_move(%s)", (number,))
                thread.end()
                conn.execute("SELECT shardmap.resume_move(%s)", (number,))
            writer.execute("COMMIT")
        thread.end()
    check(servers, tenant, number)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ring", "modulo"])
def test_a_shard_joins_and_another_leaves_under_load(servers, strategy):
    fleet = Fleet(servers, f"logical_{strategy}", list(KEYS)[2:], strategy=strategy, **STRATEGIES[strategy])
    with fleet.connect() as conn:
        fleet.fill(conn)
        with Load(fleet) as load:
            assert fleet.add_shard(conn) == "joining"
            for change in ("SELECT 1", f"SELECT shardmap.drain_shard('{fleet.name}-0')"):
                conn.execute(change)
                assert conn.execute("SELECT count(*) > 0 FROM shardmap.rebalance(%s, engine => 'logical') WHERE steps ~ 'logical'",
                                    (fleet.name,)).fetchone() == (True,)
                conn.execute(f"CALL shardmap.run_moves('{fleet.name}')")
                fleet.check(conn)
            assert load.failures == []
        fleet.check(conn)
        load.check(conn)
        assert conn.execute("SELECT DISTINCT engine, state, rows_copied = rows_planned FROM shardmap.moves WHERE keyspace = %s",
                            (fleet.name,)).fetchall() == [("logical", "done", True)]
    assert left_behind(servers) == []


@pytest.mark.soak
@pytest.mark.parametrize("order", ["integer", "text"])
def test_ranges_move_under_load(servers, order):
    keys = {"integer": ["int4", "int8"], "text": list(KEYS)}[order]
    fleet = Fleet(servers, f"logical_{order}", keys, strategy="range", range_order=order)
    with fleet.connect() as conn:
        middle, cut = {"integer": ("31", "45"), "text": ("k", "kéy-3")}[order]
        conn.execute("SELECT shardmap.set_range(%s, NULL, %s, %s), shardmap.set_range(%s, %s, NULL, %s)",
                     (fleet.name, middle, f"{fleet.name}-0", fleet.name, middle, f"{fleet.name}-1"))
        fleet.fill(conn)
        with Load(fleet) as load:
            for lower, upper, shard in ((cut, None, 2), (None, cut, 2), (None, None, 0)):
                assert conn.execute("SELECT sum(rows) > 0 FROM shardmap.move_range(%s, %s, %s, %s, engine => 'logical')",
                                    (lower, upper, f"{fleet.name}-{shard}", fleet.name)).fetchone() == (True,)
                conn.execute(f"CALL shardmap.run_moves('{fleet.name}')")
                fleet.check(conn)
            assert load.failures == []
        load.check(conn)
    assert left_behind(servers) == []

"""What the sampler says of real replicas that are well, paused, cut off, stopped, frozen, or somebody else's."""

from datetime import timedelta

import psycopg
import pytest
from replicas_place import ASIDE, caught_up, eventually, lag, pause_when_even, standing

ALL = [f"shard-{shard}-replica-{replica}" for shard in range(2) for replica in range(2)]
ZERO = timedelta(0)


def write(cluster, shard):
    cluster.shard_psql(shard, "INSERT INTO written VALUES (now())")


def test_replicas_show_by_themselves_and_idle_ones_are_at_zero(conn):
    for replica in ALL:
        row = caught_up(conn, replica)
        assert (row["receiver"], row["replay_paused"], row["timeline"]) == ("running", False, 1)
        assert row["replay_lsn"] == row["receive_lsn"] and row["round_trip_ms"] > 0
        assert row["system_identifier"] == conn.execute("SELECT system_identifier::text FROM pg_control_system()").fetchone()["system_identifier"]


def test_a_paused_replica_falls_behind_alone(cluster, conn):
    paused, other = "shard-0-replica-0", "shard-0-replica-1"
    server = cluster.replica_server(0, 0)
    # Nothing is written: nothing is missed.
    assert pause_when_even(server, conn, paused)["lag"] == ZERO
    write(cluster, 0)
    first = eventually(lambda: lag(conn, paused), lambda row: row["lag"] and row["lag_bytes"] > 0)
    assert first["replay_lsn"] < first["receive_lsn"]
    # It grows with time, though nothing more is written.
    eventually(lambda: lag(conn, paused), lambda row: row["lag"] > first["lag"] + timedelta(seconds=1))
    assert lag(conn, paused)["lag_bytes"] < first["lag_bytes"] + ASIDE
    caught_up(conn, other)
    server.psql("SELECT pg_wal_replay_resume()")
    caught_up(conn, paused)
    row = conn.execute("SELECT max, p50 FROM shardmap.replica_lag_windows WHERE replica = %s AND \"window\" = '5 minutes'", [paused]).fetchone()
    assert row["max"] >= timedelta(seconds=1) and row["p50"] < row["max"]


def test_a_replica_that_is_not_fed_is_unknown(cluster, conn):
    replica, server = "shard-0-replica-0", cluster.replica_server(0, 0)
    caught_up(conn, replica)
    good = server.psql("SHOW primary_conninfo")
    server.psql("ALTER SYSTEM SET primary_conninfo = 'host=127.0.0.1 port=1'")
    server.psql("SELECT pg_reload_conf()")
    row = standing(conn, replica, "unknown", "WAL receiver is not running")
    assert row["lag"] is None and row["receiver"] == "stopped"
    # It has replayed all that there is: that is no reason to call it up to date.
    assert row["lag_bytes"] < ASIDE
    server.psql(f"ALTER SYSTEM SET primary_conninfo = '{good.replace(chr(39), chr(39) * 2)}'")
    server.psql("SELECT pg_reload_conf()")
    caught_up(conn, replica)


def test_a_stopped_replica_is_unknown_and_found_again(cluster, conn):
    replica, server = "shard-1-replica-0", cluster.replica_server(1, 0)
    caught_up(conn, replica)
    server.kill()
    row = standing(conn, replica, "unknown", "not reachable")
    assert (row["lag"], row["lag_bytes"], row["replay_lsn"]) == (None, None, None)
    server.start()
    caught_up(conn, replica)


def test_a_frozen_replica_does_not_hold_up_the_others(cluster, conn):
    replica, server = "shard-1-replica-0", cluster.replica_server(1, 0)
    caught_up(conn, replica)
    server.pause()
    try:
        standing(conn, replica, "unknown", "no answer in time")
        before = lag(conn, "shard-1-replica-1")["sampled_at"]
        eventually(lambda: lag(conn, "shard-1-replica-1"), lambda row: row["sampled_at"] > before + timedelta(seconds=1))
    finally:
        server.resume()
    caught_up(conn, replica)


def test_a_lost_primary_is_not_zero_lag(cluster, conn):
    caught_up(conn, "shard-1-replica-0")
    cluster.shard_server(1).kill()
    try:
        # The receiver has ended with its primary.
        standing(conn, "shard-1-replica-0", "unknown", "WAL receiver is not running")
    finally:
        cluster.shard_server(1).start()
    caught_up(conn, "shard-1-replica-0")


def test_a_copy_of_something_else_is_invalid(cluster, conn):
    primary = cluster._server("stranger", {})
    primary.create(fresh=True)
    primary.start()
    stranger = cluster._server("stranger-replica", {}, primary)
    try:
        stranger.create()
        stranger.start()
        conn.execute(f"ALTER SERVER \"shard-0-replica-1\" OPTIONS (SET port '{stranger.port}', SET dbname 'postgres')")
        row = standing(conn, "shard-0-replica-1", "invalid", "copy of another server: other system identifier")
        assert row["lag"] is None and row["lag_bytes"] is None
    finally:
        conn.execute(f"ALTER SERVER \"shard-0-replica-1\" OPTIONS (SET port '{cluster.replica_server(0, 1).port}', SET dbname 'shard_0')")
        stranger.remove()
        primary.remove()
    caught_up(conn, "shard-0-replica-1")


def test_a_cascading_replica(cluster, conn):
    upstream = cluster.replica_server(0, 0)
    server = cluster._server("cascade", {}, upstream)
    server.create()
    server.start()
    try:
        conn.execute(f"SELECT shardmap.add_replica('shard-0', 'cascade', port => {server.port}, host => '127.0.0.1')")
        caught_up(conn, "cascade")
        server.psql("SELECT pg_wal_replay_pause()")
        write(cluster, 0)
        eventually(lambda: lag(conn, "cascade"), lambda row: row["lag"] and row["lag_bytes"] > 0)
        caught_up(conn, "shard-0-replica-0")
    finally:
        conn.execute("SELECT shardmap.drop_replica('cascade')")
        server.remove()


@pytest.mark.parametrize("grant,timeline", [("", 1), ("GRANT pg_monitor TO nobody", 1), ("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC", None)])
def test_what_an_ordinary_user_sees_is_enough(cluster, conn, grant, timeline):
    """As on a managed service: no superuser. What he may not see is unknown, not wrong."""
    primary = cluster.shard_server(1)
    primary.psql("DROP ROLE IF EXISTS nobody; CREATE ROLE nobody LOGIN", "shard_1")
    primary.psql(f"{grant};", "shard_1")
    cluster.wait_for_replicas()
    conn.execute("ALTER USER MAPPING FOR postgres SERVER \"shard-1\" OPTIONS (SET user 'nobody')")
    try:
        if timeline is None:
            row = standing(conn, "shard-1-replica-0", "unknown", "timeline may be old; grant pg_monitor to see it")
            assert row["lag"] is None and row["system_identifier"] is None
        else:
            eventually(lambda: cluster.shard_psql(1, "SELECT count(*) FROM pg_stat_activity WHERE usename = 'nobody'"), lambda count: count != "0")
            row = caught_up(conn, "shard-1-replica-0")
            assert (row["timeline"], row["receiver"]) == (1, "running")
    finally:
        primary.psql("GRANT EXECUTE ON FUNCTION pg_control_system() TO PUBLIC", "shard_1")
        conn.execute("ALTER USER MAPPING FOR postgres SERVER \"shard-1\" OPTIONS (SET user 'postgres')")
        eventually(lambda: cluster.shard_psql(1, "SELECT count(*) FROM pg_stat_activity WHERE usename = 'nobody'"), lambda count: count == "0")
    primary.psql("DROP ROLE nobody", "shard_1")
    caught_up(conn, "shard-1-replica-0")


def test_readable_by_all(cluster):
    with psycopg.connect(cluster.dsn(user="ann"), autocommit=True) as ann:
        for view in ("replica_lag", "replica_lag_windows", "replica_lag_history", "replica_state", "alerts"):
            ann.execute(f"TABLE shardmap.{view}")
        assert ann.execute("SELECT count(*) FROM shardmap.replica_lag").fetchone() == (4,)


def test_lag_impact(conn):
    rows = conn.execute("SELECT * FROM shardmap.lag_impact('2 s', '12 s', 8000)").fetchall()
    assert [tuple(row.values()) for row in rows] == [
        ("p90", timedelta(seconds=2), 800, 69_120_000), ("p99", timedelta(seconds=12), 80, 6_912_000)]
    for arguments in ("'2 s', '1 s', 1", "'1 s', '2 s', -1", "'1 s', '2 s', 'NaN'", "'1 s', '2 s', NULL"):
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            conn.execute(f"SELECT * FROM shardmap.lag_impact({arguments})")


def test_failover(cluster, conn):
    """Last: shard-1 has another primary after it."""
    caught_up(conn, "shard-1-replica-1")
    promoted, left = cluster.replica_server(1, 1), "shard-1-replica-0"
    promoted.psql("SELECT pg_promote()")
    standing(conn, "shard-1-replica-1", "invalid", "not a replica: it is not in recovery")
    caught_up(conn, left)
    write(cluster, 1)
    # The shard is where the promoted server is. What follows the former primary holds nothing of what is written now.
    conn.execute(f"ALTER SERVER \"shard-1\" OPTIONS (SET port '{promoted.port}')")
    row = standing(conn, left, "invalid", "on another timeline than the primary")
    assert row["lag"] is None and row["timeline"] == 1
    # One that was made anew follows.
    conn.execute("SELECT shardmap.drop_replica('shard-1-replica-1')")
    server = cluster._server("rebuilt", {}, promoted)
    server.create()
    server.start()
    try:
        conn.execute(f"SELECT shardmap.add_replica('shard-1', 'rebuilt', port => {server.port}, host => '127.0.0.1')")
        assert caught_up(conn, "rebuilt")["timeline"] == 2
    finally:
        conn.execute("SELECT shardmap.drop_replica('rebuilt')")
        server.remove()

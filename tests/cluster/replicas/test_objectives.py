"""Objectives, alerts, rotation and history of real replicas; and the life of the sampler itself."""

import json
import os
import signal
from datetime import timedelta

import psycopg
import pytest
from psycopg import errors
from replicas_place import ASIDE, caught_up, eventually, lag, standing

REPLICA = "shard-0-replica-0"
QUIET = "shard-1-replica-1"  # no test makes it lag
SAMPLERS = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'pg_shardmap sampler' AND datname = current_database()"


def state(conn, replica=REPLICA):
    return conn.execute("SELECT * FROM shardmap.replica_state WHERE replica = %s", [replica]).fetchone()


def sampler(conn):
    return [row["pid"] for row in conn.execute(SAMPLERS).fetchall()]


def windows(conn, replica):
    """Those of an hour and of a day."""
    sql = "SELECT * FROM shardmap.replica_lag_windows WHERE replica = %s AND \"window\" >= '1 h' ORDER BY \"window\""
    return conn.execute(sql, [replica]).fetchall()


def told(listener):
    """What was told so far: alert and rotation before and after."""
    news = [json.loads(note.payload) for note in listener.notifies(timeout=0)]
    assert all(each["replica"] == REPLICA and each["shard"] == "shard-0" for each in news)
    return [(each["was"]["alert"], each["was"]["rotation"], each["alert"], each["rotation"]) for each in news]


def test_a_burning_replica_leaves_and_comes_back(cluster, conn):
    caught_up(conn, REPLICA)
    assert (state(conn)["rotation"], state(conn)["burn_5m"]) == ("in", None)
    with psycopg.connect(cluster.dsn(), autocommit=True) as listener:
        listener.execute("LISTEN shardmap_alerts")
        # Half a second in five minutes burns too fast, six seconds in an hour page.
        conn.execute("SELECT shardmap.set_lag_objective(%s, '300 ms', 0.9999, calm => '4 s')", [REPLICA])
        eventually(lambda: state(conn), lambda row: row["burn_5m"] is not None)
        server = cluster.replica_server(0, 0)
        server.psql("SELECT pg_wal_replay_pause()")
        cluster.shard_psql(0, "INSERT INTO written VALUES (now())")
        row = eventually(lambda: state(conn), lambda row: row["rotation"] != "in")
        if row["rotation"] != "out":  # which a slow test finds
            assert (row["rotation"], row["why"]) == ("out of read-your-writes", "objective missed in the last five minutes")
        assert row["burn_5m"] >= 14.4
        row = eventually(lambda: state(conn), lambda row: row["rotation"] == "out")
        assert row["why"] == "objective burns its error budget" and row["burn_1h"] >= 14.4 and row["budget_left"] < 1
        assert lag(conn, REPLICA)["rotation"] == "out" and state(conn, "shard-0-replica-1")["rotation"] == "in"
        alert, = conn.execute("SELECT * FROM shardmap.alerts WHERE severity <> 'early warning'").fetchall()
        assert (alert["shard"], alert["replica"], alert["severity"]) == ("shard-0", REPLICA, "page")
        server.psql("SELECT pg_wal_replay_resume()")
        caught_up(conn, REPLICA)
        assert state(conn)["rotation"] == "out"
        row = eventually(lambda: state(conn), lambda row: row["rotation"] == "in")
        assert row["why"] == "within its objective again for the calm time"
        news = eventually(lambda: told(listener), lambda news: news and news[-1][3] == "in")
        # Which of alert and rotation turns first is a matter of the budgets; each is told once.
        assert news[-1][1] == "out"
    conn.execute("SELECT shardmap.set_lag_objective(%s, NULL)", [REPLICA])
    eventually(lambda: state(conn), lambda row: row["burn_5m"] is None and row["threshold"] is None)
    assert conn.execute("SELECT * FROM shardmap.alerts WHERE severity <> 'early warning'").fetchall() == []


def test_drain_takes_effect_at_once(conn):
    # Longer between two questions than the test waits.
    conn.execute("ALTER SYSTEM SET shardmap.lag_sample_interval = '1 h'")
    conn.execute("SELECT pg_reload_conf()")
    try:
        conn.execute("SELECT shardmap.drain_replica(%s)", [REPLICA])
        row = eventually(lambda: state(conn), lambda row: row["rotation"] == "drained")
        assert row["why"] == "drained by an administrator"
        conn.execute("SELECT shardmap.drain_replica(%s, false)", [REPLICA])
        row = eventually(lambda: state(conn), lambda row: row["rotation"] == "in")
        assert row["why"] == "brought back by an administrator"
    finally:
        conn.execute("ALTER SYSTEM RESET shardmap.lag_sample_interval")
        conn.execute("SELECT pg_reload_conf()")


def test_objectives_are_checked(cluster, conn):
    for arguments, error in [
        ("'nobody', '1 s'", errors.UndefinedObject), (f"'{REPLICA}', '0'", errors.InvalidParameterValue),
        (f"'{REPLICA}', '-1 s'", errors.InvalidParameterValue), (f"'{REPLICA}', '1 s', 1", errors.InvalidParameterValue),
        (f"'{REPLICA}', '1 s', 0", errors.InvalidParameterValue), (f"'{REPLICA}', '1 s', NULL", errors.InvalidParameterValue),
        (f"'{REPLICA}', '1 s', 'NaN'", errors.InvalidParameterValue), (f"'{REPLICA}', '1 s', calm => '-1 s'", errors.InvalidParameterValue),
    ]:
        with pytest.raises(error):
            conn.execute(f"SELECT shardmap.set_lag_objective({arguments})")
    with psycopg.connect(cluster.dsn(user="ann"), autocommit=True) as ann, pytest.raises(errors.InsufficientPrivilege):
        ann.execute(f"SELECT shardmap.set_lag_objective('{REPLICA}', '1 s')")
    with psycopg.connect(cluster.dsn(user="adm"), autocommit=True) as adm:
        adm.execute(f"SELECT shardmap.set_lag_objective('{REPLICA}', '1 s')")
        adm.execute(f"SELECT shardmap.set_lag_objective('{REPLICA}', NULL)")


def test_minutes_are_kept_and_bring_back_what_was(conn):
    row = eventually(
        lambda: conn.execute("SELECT * FROM shardmap.replica_lag_history WHERE replica = %s", [QUIET]).fetchone(), bool, 180)
    assert row["shard"] == "shard-1" and row["samples"] > 0 and row["unknown_share"] is not None
    # A minute of long ago, an hour and a half, and one of five days, which is past the budgets but kept.
    conn.execute("""INSERT INTO shardmap._lag_minute SELECT %s, date_trunc('minute', now()) - ago, 60, 30, 9000, 9000, 9000, 9050, '{9000}', '{30}', 60000
                      FROM unnest('{10 min, 90 min, 5 days, 8 days}'::interval[]) ago""", [QUIET])
    conn.execute("SELECT shardmap.set_lag_objective(%s, '5 s', 0.9)", [QUIET])
    # An objective that is set now is held against what was.
    row = eventually(lambda: state(conn, QUIET), lambda row: row["burn_1h"])
    assert row["burn_1h"] == pytest.approx(60 / 3600 / 0.1, rel=0.2) and row["burn_6h"] == pytest.approx(120 / 21600 / 0.1, rel=0.2)
    before = sampler(conn)
    conn.execute("SELECT pg_terminate_backend(%s)", before)
    eventually(lambda: sampler(conn), lambda now: now and now != before)
    # What is shown is the former sampler's until the new one has found what was kept.
    hour, day = eventually(lambda: windows(conn, QUIET), lambda windows: all(each["max"] == timedelta(seconds=9.05) for each in windows))
    assert hour["samples"] >= 60 and state(conn, QUIET)["burn_6h"] == pytest.approx(120 / 21600 / 0.1, rel=0.2)
    assert day["samples"] >= 120 and 0 < day["unknown_share"] < 1
    # What is past the retention goes.
    eventually(lambda: conn.execute("SELECT count(*) AS count FROM shardmap.replica_lag_history WHERE minute < now() - interval '7 days'").fetchone(),
               lambda row: row["count"] == 0)
    assert conn.execute("SELECT count(*) AS count FROM shardmap.replica_lag_history WHERE minute < now() - interval '4 days'").fetchone()["count"] == 1
    conn.execute("SELECT shardmap.set_lag_objective(%s, NULL)", [QUIET])
    conn.execute("DELETE FROM shardmap._lag_minute")


def test_lag_is_known_again_after_a_restart(cluster, conn):
    """Where the primary was before is kept, also over a crash."""
    caught_up(conn, REPLICA)
    server = cluster.replica_server(0, 0)
    server.psql("SELECT pg_wal_replay_pause()")
    try:
        cluster.shard_psql(0, "INSERT INTO written VALUES (now())")
        before = eventually(lambda: lag(conn, REPLICA), lambda row: row["lag"] and row["lag"] > timedelta(seconds=1))
        conn.close()
        cluster.coordinator.kill()
        cluster.coordinator.start()
        with psycopg.connect(cluster.dsn(), autocommit=True, row_factory=psycopg.rows.dict_row) as later:
            row = eventually(lambda: lag(later, REPLICA), lambda row: row["state"] == "replica")
            assert row["lag"] > timedelta(seconds=1) and row["lag_bytes"] < before["lag_bytes"] + ASIDE
    finally:
        server.psql("SELECT pg_wal_replay_resume()")


def test_the_server_stops_while_a_replica_hangs(cluster, conn):
    server = cluster.replica_server(0, 0)
    server.pause()
    try:
        standing(conn, REPLICA, "unknown", "no answer in time")
        conn.close()
        cluster.coordinator.restart()
    finally:
        server.resume()
    with psycopg.connect(cluster.dsn(), autocommit=True, row_factory=psycopg.rows.dict_row) as conn:
        caught_up(conn, REPLICA)


def test_a_crash_of_a_session_leaves_a_sampler(cluster, conn):
    with psycopg.connect(cluster.dsn(), autocommit=True) as victim:
        before = sampler(conn)
        os.kill(victim.info.backend_pid, signal.SIGKILL)
        # The server starts anew, and with it the sampler.
        with pytest.raises(psycopg.OperationalError):
            eventually(lambda: conn.execute("SELECT 1").fetchone(), lambda _: False)

    def look():
        try:
            with psycopg.connect(cluster.dsn(), autocommit=True, row_factory=psycopg.rows.dict_row) as conn:
                return sampler(conn) and lag(conn, REPLICA)["state"] == "replica" and sampler(conn)
        except psycopg.OperationalError:
            return None
    assert eventually(look, bool) != before


def test_only_databases_with_replicas_have_a_sampler(cluster, conn):
    assert len(sampler(conn)) == 1
    cluster.new_database("plain")
    try:
        with psycopg.connect(cluster.dsn("plain"), autocommit=True, row_factory=psycopg.rows.dict_row) as plain:
            assert sampler(plain) == []
            cluster.register_replicas("plain")
            eventually(lambda: sampler(plain), bool)
            caught_up(plain, "shard-1-replica-1")
            for shard in range(2):
                for replica in range(2):
                    plain.execute("SELECT shardmap.drop_replica(%s)", [cluster.replica_name(shard, replica)])
            eventually(lambda: sampler(plain), lambda pids: pids == [])
            cluster.register_replicas("plain")
            eventually(lambda: sampler(plain), bool)
            plain.execute("DROP EXTENSION pg_shardmap CASCADE")
            eventually(lambda: sampler(plain), lambda pids: pids == [])
    finally:
        cluster.drop_database("plain")
    # A database that goes takes its sampler along, and none is started for it.
    cluster.new_database("gone")
    cluster.register_replicas("gone")
    with psycopg.connect(cluster.dsn("gone"), autocommit=True, row_factory=psycopg.rows.dict_row) as gone:
        eventually(lambda: sampler(gone), bool)
    cluster.drop_database("gone")
    assert len(sampler(conn)) == 1

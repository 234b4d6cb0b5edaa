"""shardmap.stat_reads: who has answered reads, and why not a replica."""

import time

import psycopg
import pytest
from patience import Running
from places import wait_until
from psycopg import errors
from test_reads import raise_value, value


@pytest.fixture
def counts(conn):
    conn.execute("SELECT shardmap.reset_stat_reads()")
    def look(shard=0):
        rows = conn.execute("SELECT role, sum(reads)::int, sum(waited)::int, sum(waited_in_vain)::int, sum(lost)::int,"
                            " sum(fallbacks)::int, sum(share) FROM shardmap.stat_reads WHERE shard = %s GROUP BY role", [f"shard-{shard}"])
        names = ("reads", "waited", "in_vain", "lost", "fallbacks", "share")
        return {role: dict(zip(names, numbers)) for role, *numbers in rows}
    return look


def test_reads_are_counted_where_they_are_answered(place, conn, counts):
    key = place.keys[0][0]
    for _ in range(6):
        value(conn, key)
    with place.connect(read_preference="primary") as plain:
        for _ in range(2):
            value(plain, key)
    seen = counts()
    assert (seen["replica"]["reads"], seen["primary"]["reads"]) == (6, 2)
    assert (seen["replica"]["share"], seen["primary"]["share"]) == (0.75, 0.25)
    assert seen["primary"]["fallbacks"] == 0 and seen["replica"]["lost"] == 0
    assert counts(1)["replica"]["reads"] == 0 and counts(1)["replica"]["share"] is None
    # Writes and what locks rows are no reads; a fan-out is one for each shard.
    raise_value(conn, key)
    conn.execute("SELECT v FROM kv WHERE k = %s FOR UPDATE", [key])
    assert counts()["primary"]["reads"] == 2
    conn.execute("SELECT count(*) FROM kv")
    assert sum(role["reads"] for role in counts().values()) == 9 and counts(1)["replica"]["reads"] == 1


def test_what_a_transaction_may_not_ask_of_replicas_is_no_fallback(place, conn, counts):
    key = place.keys[0][1]
    with conn.transaction():
        raise_value(conn, key)
        value(conn, key)
    assert (counts()["primary"]["reads"], counts()["primary"]["fallbacks"]) == (1, 0)


def test_waits_and_fallbacks(place, conn, counts):
    key = place.keys[0][2]
    conn.execute("SET shardmap.catchup_timeout = 30")
    with place.paused(0, 0, 1):
        raise_value(conn, key)
        value(conn, key)
        first = counts()
        assert (first["replica"]["in_vain"], first["primary"]["fallbacks"], first["primary"]["reads"]) == (1, 1, 1)
        conn.execute("SET shardmap.catchup_timeout = 0")
        value(conn, key)
        assert counts()["primary"]["fallbacks"] == 2 and counts()["replica"]["reads"] == 0
    waited = conn.execute("SELECT sum(waited_ms) FROM shardmap.stat_reads").fetchone()[0]
    assert waited >= 30


def test_a_wait_that_was_worth_it(place, counts):
    key = place.keys[0][3]
    with place.connect(catchup_timeout=60_000) as writer:
        with place.paused(0, 0, 1):
            new, asked = raise_value(writer, key), place.questions(0)
            reading = Running(lambda: value(writer, key))
            wait_until(lambda: place.questions(0) > asked + 2)
        assert reading.end() == new
    assert (counts()["replica"]["waited"], counts()["replica"]["reads"], counts()["primary"]["fallbacks"]) == (1, 1, 0)


def test_lost_replicas(place, conn, counts):
    key = place.keys[0][4]
    value(conn, key)
    # The sampler must not notice before the session does.
    conn.execute("ALTER SYSTEM SET shardmap.lag_sample_interval = '1 h'")
    conn.execute("SELECT pg_reload_conf()")
    try:
        sampled = lambda: conn.execute("SELECT max(sampled_at) FROM shardmap.replica_lag").fetchone()[0]
        wait_until(lambda: sampled() == (time.sleep(1), sampled())[1])
        for number in (0, 1):
            place.replica(0, number).kill()
        value(conn, key)
        seen = counts()
        assert (seen["replica"]["lost"], seen["primary"]["reads"], seen["primary"]["fallbacks"]) == (2, 1, 1)
    finally:
        conn.execute("ALTER SYSTEM RESET shardmap.lag_sample_interval")
        conn.execute("SELECT pg_reload_conf()")


def test_who_may(place, conn, counts):
    place.cluster.psql("CREATE ROLE reader LOGIN")
    with psycopg.connect(place.cluster.dsn(user="reader"), autocommit=True) as reader:
        assert len(reader.execute("TABLE shardmap.stat_reads").fetchall()) == 6
        with pytest.raises(errors.InsufficientPrivilege):
            reader.execute("SELECT shardmap.reset_stat_reads()")
    value(conn, place.keys[1][0])
    assert counts(1)["replica"]["reads"] == 1
    conn.execute("SELECT shardmap.reset_stat_reads()")
    wait_until(lambda: counts(1)["replica"]["reads"] == 0)
    place.cluster.psql("DROP ROLE reader")

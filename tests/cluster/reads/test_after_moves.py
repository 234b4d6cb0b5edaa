"""Replicas that lag while rows move: no read, however little it asks for, misses rows that have moved or sees them twice."""

import pytest
from places import role_of, wait_until
from psycopg import errors

ROWS = 20
WAYS = [{"consistency": "eventual"}, {"consistency": "session"}, {"consistency": "eventual", "read_preference": "nearest"}]


@pytest.fixture(scope="module")
def table(site):
    site.settle()
    site.cluster.psql(f"CREATE TABLE parcel (k int, id int, v int NOT NULL DEFAULT 0, PRIMARY KEY (k, id));"
                      f"SELECT shardmap.distribute_table('parcel', 'k');"
                      f"INSERT INTO parcel SELECT k, i FROM generate_series(1001, 1040) k, generate_series(1, {ROWS}) i")
    with site.connect(read_preference="primary") as conn:
        keys = [key for key, in conn.execute("SELECT k FROM generate_series(1001, 1040) k WHERE shard_for(k) = 'shard-0'")]
    site.settle()
    yield iter(keys)
    site.settle()
    site.cluster.psql("SELECT shardmap.undistribute_table('parcel'); DROP TABLE parcel")


@pytest.fixture
def mover(place):
    with place.connect(read_preference="primary", cleanup_delay=0) as conn:
        yield conn


def plan(mover, key):
    return mover.execute("SELECT DISTINCT move FROM shardmap.move_key(%s, 'shard-1')", [key]).fetchone()[0]


def run_to(mover, number, point):
    mover.execute(f"SET shardmap.crash_point = '{point}=error'")
    with pytest.raises(errors.Error, match="crash point"):
        mover.execute(f"CALL shardmap.run_move({number})")
    mover.execute("RESET shardmap.crash_point")


def check_reads(place, sessions, key, total):
    """Also by sessions that were there before."""
    fresh = [place.connect(catchup_timeout=0, **way) for way in WAYS]
    try:
        for conn in (*sessions, *fresh):
            assert conn.execute("SELECT count(*), sum(v) FROM parcel WHERE k = %s", [key]).fetchone() == (ROWS, total)
            assert conn.execute("SELECT count(*), sum(v) FROM parcel WHERE k = %s OR k = %s", [key, -key]).fetchone() == (ROWS, total)
            assert conn.execute("SELECT count(*), count(DISTINCT (k, id)) FROM parcel").fetchone() == (40 * ROWS, 40 * ROWS)
    finally:
        for conn in fresh:
            conn.close()


@pytest.fixture
def sessions(place):
    found = [place.connect(catchup_timeout=0, **way) for way in WAYS]
    for conn in found:
        conn.execute("SELECT count(*) FROM parcel")
    yield found
    for conn in found:
        conn.close()


def test_the_target_lags(place, table, mover, sessions):
    key = next(table)
    number = plan(mover, key)
    with place.paused(1, 0, 1):
        run_to(mover, number, "move_flipped")
        check_reads(place, sessions, key, 0)
        mover.execute(f"CALL shardmap.run_move({number})")
        check_reads(place, sessions, key, 0)
        with place.connect(read_preference="replica", consistency="eventual", catchup_timeout=0) as conn:
            with pytest.raises(errors.ObjectNotInPrerequisiteState, match="no replica of shard"):
                conn.execute("SELECT FROM parcel WHERE k = %s", [key])
    with place.connect(consistency="eventual") as conn:
        wait_until(lambda: role_of(conn, f"SELECT FROM parcel WHERE k = {key}") == "replica")
    check_reads(place, sessions, key, 0)


def test_the_source_lags(place, table, mover, sessions):
    """Its replicas keep the rows when nobody hides them any more."""
    key = next(table)
    number = plan(mover, key)
    with place.paused(0, 0, 1):
        run_to(mover, number, "move_flipped")
        check_reads(place, sessions, key, 0)
        mover.execute(f"CALL shardmap.run_move({number})")
        check_reads(place, sessions, key, 0)


@pytest.mark.parametrize("lagging", [0, 1])
def test_on_the_way_back(place, table, mover, sessions, lagging):
    key = next(table)
    number = plan(mover, key)
    run_to(mover, number, "move_flipped")
    with place.paused(lagging, 0, 1):
        mover.execute("UPDATE parcel SET v = 1 WHERE k = %s", [key])
        mover.execute("SELECT shardmap.rollback_move(%s)", [number])
        run_to(mover, number, "move_rollback")
        assert mover.execute("SELECT shard_for(%s)", [key]).fetchone() == ("shard-0",)
        for conn in sessions if lagging == 0 else ():
            assert conn.execute("SELECT sum(v) FROM parcel WHERE k = %s", [key]).fetchone() == (ROWS,)
        mover.execute(f"CALL shardmap.run_move({number})")
        if lagging == 0:
            check_reads(place, sessions, key, ROWS)
        for conn in sessions:
            assert conn.execute("SELECT count(*) FROM parcel").fetchone() == (40 * ROWS,)

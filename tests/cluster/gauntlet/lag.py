"""A replica of the target that does not follow: a move that is told to wait for replicas waits, and goes on when it has caught up.

What always holds: when the move is over and the replica has replayed all, it has the rows that its primary has.
"""

import contextlib

from patience import wait_until
from server import Server, free_port

from .arena import NAMES
from .drive import PATIENCE, Run

SETTINGS = {"shardmap__move_max_replica_lag": "500ms"}


@contextlib.contextmanager
def replica_of(arena, shard):
    primary = arena.server(shard)
    server = Server(f"{shard}-replica", arena.cluster.directory / f"{shard}-replica", arena.cluster.pg, free_port(), arena.cluster.sockets,
                    {"cluster_name": f"{shard}-replica"}, primary)
    try:
        server.create()
        server.start()
        arena.psql(f"SELECT shardmap.add_replica('{shard}', '{shard}-replica', host => '127.0.0.1', port => {server.port})")
        yield server
        arena.psql(f"SELECT shardmap.drop_replica('{shard}-replica')")
    finally:
        server.remove()


def lagging_replica(drive, _):
    arena = drive.arena
    drive.ensure_planned()
    move = drive.under_way()
    with replica_of(arena, move["target"]) as replica:
        wait_until(lambda: arena.psql("SELECT bool_and(lag IS NOT NULL) FROM shardmap.replica_lag") == "t", lambda: "the lag is not known", PATIENCE)
        replica.psql("SELECT pg_wal_replay_pause()")
        # Else all rows may be copied before it is behind.
        wait_until(lambda: arena.psql("SELECT bool_or(lag > '500ms') FROM shardmap.replica_lag") == "t", lambda: "the replica does not lag", PATIENCE)
        run = Run(arena, drive.call(), **SETTINGS)
        run.start()
        wait_until(lambda: "lags" in (drive.under_way()["last_error"] or ""),
                   lambda: "the move does not wait for the replica", PATIENCE)
        drive.kills += 1
        copied = drive.under_way()["rows_copied"]
        arena.crew.work_on()
        assert drive.under_way()["rows_copied"] == copied < move["rows_planned"], "the move has gone on"
        replica.psql("SELECT pg_wal_replay_resume()")
        run.join(PATIENCE)
        assert not run.is_alive() and run.error is None, f"the move does not go on: {run.error}"
        compare(arena, arena.number(move["target"]), replica, arena.hot[0])


def compare(arena, shard, replica, tenant):
    """What nobody writes any more is the same on both."""
    database = arena.cluster.shard_database(shard, arena.name)
    ask = "".join(f"SELECT '{table}', count(*) FROM {table} WHERE tenant = {tenant};" for table in NAMES if table in ("account", "counter"))
    ask += f"SELECT count(*), sum(value) FROM item WHERE tenant = {tenant} AND writer = 0;"
    wanted = arena.server(f"shard-{shard}").psql(ask, database)
    wait_until(lambda: replica.psql(ask, database) == wanted,
               lambda: f"the replica has {replica.psql(ask, database)} instead of {wanted}", PATIENCE)

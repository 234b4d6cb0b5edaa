"""What moves are planned, given an arena: each returns the moves' numbers, none if there is nothing to move. Called again, it plans
others: most by turns there and back."""

from .arena import NAMES


def hot_key(arena, engine="triggers"):
    """The hottest tenant goes to the next shard."""
    tenant = arena.hot[0]
    target = (arena.number(arena.owner(tenant)) + 1) % arena.shards
    with arena.connect() as conn:
        return conn.execute("SELECT move FROM shardmap.move_key(%s, %s, %s, engine => %s)",
                            [tenant, f"shard-{target}", arena.keyspace, engine]).fetchall()


def hot_key_logical(arena):
    return hot_key(arena, "logical")


def rebalanced(arena, change, engine="triggers"):
    with arena.connect() as conn:
        conn.execute(change)
        return conn.execute("SELECT move FROM shardmap.rebalance(%s, engine => %s)", [arena.keyspace, engine]).fetchall()


def one_more_one_less(arena, engine="triggers"):
    """A shard joins; the next time it is emptied, then joins again."""
    spare, arena.turn = len(arena.cluster.shard_servers) - 1, arena.turn + 1
    if arena.shards == spare:
        arena.add_shard(spare)
        return rebalanced(arena, "SELECT 1", engine)
    return rebalanced(arena, f"SELECT shardmap.drain_shard('shard-{spare}', {arena.turn % 2 == 0})", engine)


def one_more_one_less_logical(arena):
    return one_more_one_less(arena, "logical")


def one_less_one_more(arena):
    """The first shard is emptied; the next time it takes part again."""
    arena.turn += 1
    return rebalanced(arena, f"SELECT shardmap.drain_shard('shard-0', {arena.turn % 2 == 1})")


def range_there_and_back(arena):
    """A part of the first shard's range, whose bounds are none of the map."""
    arena.turn += 1
    with arena.connect() as conn:
        return conn.execute("SELECT move FROM shardmap.move_range('11', '41', %s, %s)", [f"shard-{arena.turn % 2}", arena.keyspace]).fetchall()


def split_and_merge(arena):
    """The largest shard is split, then the smallest emptied, then that takes part again."""
    arena.turn += 1
    with arena.connect() as conn:
        sizes = sorted(sum(arena.on_shard(number, f"SELECT count(*) FROM {table}")[0][0] for table in NAMES) for number in range(arena.shards))
        if arena.turn % 3 == 1:
            return conn.execute("SELECT move FROM shardmap.split_hot(%s, max_rows => %s)", [arena.keyspace, sizes[-1] - 1]).fetchall()
        if arena.turn % 3 == 2:
            return conn.execute("SELECT move FROM shardmap.merge_cold(%s, min_rows => %s)", [arena.keyspace, sizes[0] + sizes[1]]).fetchall()
    draining = arena.psql(f"SELECT min(name) FROM shardmap.shard WHERE keyspace = '{arena.keyspace}' AND state = 'draining'")
    return rebalanced(arena, f"SELECT shardmap.drain_shard('{draining}', false)")

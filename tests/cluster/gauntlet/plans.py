"""What moves are planned, given an arena: each returns the moves' numbers, none if there is nothing to move. Called again, it plans
others: most by turns there and back."""


def hot_key(arena):
    """The hottest tenant goes to the next shard."""
    tenant = arena.hot[0]
    target = (arena.number(arena.owner(tenant)) + 1) % arena.shards
    with arena.connect() as conn:
        return conn.execute("SELECT move FROM shardmap.move_key(%s, %s, %s)", [tenant, f"shard-{target}", arena.keyspace]).fetchall()

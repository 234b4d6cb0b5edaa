"""Two administrators at once: one waits for the other, and neither's change is lost in silence."""

import psycopg
import pytest


def test_two_weights(sessions, conn):
    version = conn.execute("SELECT version FROM shardmap.keyspace WHERE name = 'main'").fetchone()[0]
    first, second = sessions(), sessions()
    first.run("BEGIN")
    first.run("SELECT shardmap.set_shard_weight('shard-0', 2)")
    second.start("SELECT shardmap.set_shard_weight('shard-1', 3)")
    first.run("COMMIT")
    second.end()
    weights = conn.execute("SELECT weight, cardinality(tokens) FROM shardmap.shard ORDER BY number LIMIT 2").fetchall()
    assert weights == [(2.0, 200), (3.0, 300)]
    assert conn.execute("SELECT version FROM shardmap.keyspace WHERE name = 'main'").fetchone()[0] == version + 2
    for shard in (0, 1):
        conn.execute("SELECT shardmap.set_shard_weight(%s, 1)", (f"shard-{shard}",))


def test_compare_and_swap_of_a_range(sessions, conn):
    """Of two who saw the same version, one is told, and nothing of his change is done."""
    conn.execute("SELECT shardmap.create_keyspace('swap', 'range', range_order => 'integer')")
    conn.execute("SELECT shardmap.add_shard('swap-0', host, port::int, dbname, keyspace => 'swap') FROM shardmap.shards"
                 " WHERE name = 'shard-0'")
    version = conn.execute("SELECT shardmap.set_range('swap', NULL, NULL, 'swap-0')").fetchone()[0]
    first, second = sessions(), sessions()
    first.run("BEGIN")
    first.run("SELECT shardmap.split_range('swap', '10', %s)", (version,))
    second.start("SELECT shardmap.split_range('swap', '20', %s)", (version,))
    first.run("COMMIT")
    with pytest.raises(psycopg.errors.SerializationFailure):
        second.end()
    bounds = conn.execute("SELECT lower FROM shardmap.key_range WHERE keyspace = 'swap' ORDER BY lower NULLS FIRST")
    assert bounds.fetchall() == [(None,), ("10",)]

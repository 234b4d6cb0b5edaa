"""While rows are on two shards, every statement sees and changes those of the owner only, whatever the key's type."""

import psycopg
import pytest
from tenants import plan, run

KEYS = {"key_int2": "smallint", "key_int8": "bigint", "key_text": "text", "key_c": 'text COLLATE "C"', "key_varchar": "varchar(10)",
        "key_char": "char(5)", "key_numeric": "numeric", "key_domain": "tenant_number", "key_uuid": "uuid"}
HELD = [name for name in KEYS if name != "key_uuid"]


@pytest.fixture(scope="module")
def moving(tenants):
    """A tenant whose rows are on shards 0 and 1."""
    tenant = tenants.fresh(0)
    with tenants.connect() as conn:
        conn.execute("CREATE DOMAIN tenant_number AS int CHECK (VALUE > 0)")
        for shard in range(3):
            tenants.cluster.shard_psql(shard, "CREATE DOMAIN tenant_number AS int CHECK (VALUE > 0)")
        for name, kind in KEYS.items():
            conn.execute(f"CREATE TABLE {name} (k {kind}, id int, v int NOT NULL DEFAULT 0, PRIMARY KEY (k, id))")
            conn.execute(f"SELECT shardmap.distribute_table('{name}', 'k')")
            if name != "key_uuid":
                conn.execute(f"INSERT INTO {name} SELECT t::text::{kind.split(' ')[0]}, i FROM generate_series(1, 120) t, generate_series(1, 3) i")
        number = plan(conn, tenant, 1)
        with tenants.connect(shardmap__crash_point="move_verified=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
            run(runner, number)
        yield tenant, number
        run(conn, number)
        for name in KEYS:
            conn.execute(f"DROP TABLE {name}")


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("routing", ["on", "off"])
def test_each_row_is_there_once(tenants, moving, name, routing):
    tenant, _ = moving
    assert tenants.on_shard(1, f"SELECT count(*) FROM {name} WHERE k = '{tenant}'") == [(3,)], "it was copied"
    with tenants.connect(shardmap__enable_routing=routing) as conn:
        def answer(sql):
            return conn.execute(sql).fetchall()
        assert answer(f"SELECT count(*), count(DISTINCT (k, id)) FROM {name}") == [(360, 360)]
        assert answer(f"SELECT count(*) FROM {name} WHERE k = '{tenant}'") == [(3,)]
        assert answer(f"SELECT k::text, count(*) FROM {name} GROUP BY k HAVING count(*) <> 3") == []
        assert answer(f"SELECT count(*) FROM {name} a JOIN {name} b USING (k, id)") == [(360,)]
        assert answer(f"SELECT count(*) FROM {name} a LEFT JOIN {name} b ON b.k = a.k AND b.id = a.id + 2") == [(360,)]
        assert answer(f"SELECT sum(n) FROM (SELECT count(*) AS n FROM {name}_0 UNION ALL SELECT count(*) FROM {name}_1 "
                      f"UNION ALL SELECT count(*) FROM {name}_2) x") == [(360,)]
        assert len(answer(f"SELECT * FROM {name} ORDER BY id LIMIT 1000")) == 360
        assert len(answer(f"SELECT * FROM {name} FOR UPDATE")) == 360


def test_statements_on_all_rows_change_each_once(tenants, moving):
    tenant, _ = moving
    with tenants.connect() as conn:
        for name in HELD:
            assert conn.execute(f"UPDATE {name} SET v = v + 1").rowcount == 360
            assert conn.execute(f"UPDATE {name} SET v = v + 1 WHERE random() >= 0").rowcount == 360
            assert tenants.on_shard(0, f"SELECT sum(v) FROM {name} WHERE k = '{tenant}'") == [(6,)]
            assert tenants.on_shard(1, f"SELECT sum(v) FROM {name} WHERE k = '{tenant}'") == [(0,)]
            assert conn.execute(f"DELETE FROM {name} WHERE id = 3 RETURNING v").fetchall() == [(2,)] * 120
            assert conn.execute(f"INSERT INTO {name} SELECT k, 3, 2 FROM {name} WHERE id = 1").rowcount == 120


def test_the_condition_goes_to_the_shard(tenants, moving):
    with tenants.connect() as conn:
        plan_of_all = "\n".join(row[0] for row in conn.execute("EXPLAIN (VERBOSE, COSTS OFF) SELECT count(*) FROM key_int8"))
    assert plan_of_all.count("k <> ") == 1 and "Filter" not in plan_of_all

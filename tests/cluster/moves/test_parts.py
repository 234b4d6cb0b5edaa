"""What belongs to a part, by every key type: one condition, on the shards, in this server's plans, and in the map."""

import hashlib

import pytest

# Values as SQL of one number i, from 1 to 60.
KEYS = {"int2": "i::int2", "int4": "i - 30", "int8": "i * 100000000000::int8", "text": "'kéy-' || i", "varchar": "('k' || i)::varchar",
        "bpchar": "('k' || i)::char(9)", "uuid": "md5(i::text)::uuid", "numeric": "i / 4.0", "date": "date '1969-12-01' + i",
        "timestamp": "timestamp '1969-12-31 23:59:59.5' + i * interval '0.25 s'",
        "timestamptz": "timestamptz '1970-01-01 00:00:07+01' + i * interval '1 h'", "bytea": "decode(md5(i::text), 'hex')",
        "domained": "i::positive"}
TYPES = {"bpchar": "char(9)", "varchar": "varchar(20)", "domained": "positive"}
PARTS = {
    "arcs": ("'{[5,1000000000),[3000000000,4294967296)}'", "NULL", "NULL", "NULL", "NULL"),
    "remainders": ("NULL", "12", "'{0,7,11}'", "NULL", "NULL"),
    "range": ("NULL", "NULL", "NULL", "'2'", "'6'"),
}
PINNED = "INSERT INTO shardmap.move (kind, keyspace, arcs, modulus, remainders, lower, upper, except_keys, source, target) " \
         "VALUES (%s, 'main', {}, {}, {}, {}, {}, %s, 'shard-0', 'shard-1') RETURNING id"


@pytest.fixture(scope="module")
def keyed(tenants):
    with tenants.connect(client_min_messages="error") as conn:
        conn.execute("CREATE DOMAIN positive AS int CHECK (VALUE > 0)")
        for shard in range(3):
            tenants.cluster.shard_psql(shard, "CREATE DOMAIN positive AS int CHECK (VALUE > 0)")
        for name, value in KEYS.items():
            conn.execute(f"CREATE TABLE part_{name} (k {TYPES.get(name, name)} PRIMARY KEY, v int)")
            conn.execute(f"SELECT shardmap.distribute_table('part_{name}', 'k')")
            conn.execute(f"INSERT INTO part_{name} SELECT {value}, i FROM generate_series(1, 60) i")
        yield
        for name in KEYS:
            conn.execute(f"DROP TABLE part_{name}")
        conn.execute("DROP DOMAIN positive")


def is_member(kind, canonical):
    """By other means than the condition's."""
    token = int(hashlib.md5(canonical.encode()).hexdigest(), 16)
    return {"arcs": 5 <= token % 2**32 < 1_000_000_000 or token % 2**32 >= 3_000_000_000, "remainders": token % 12 in (0, 7, 11),
            "range": b"2" <= canonical.encode() < b"6"}[kind]


def visible(conn, name):
    return {row[0] for row in conn.execute(f"SELECT v FROM part_{name}")}


def test_pins_within_a_moving_part_are_refused(tenants, conn):
    keys = iter(range(1000, 2000))
    within, without = [next(k for k in keys if is_member("arcs", str(k)) is wanted) for wanted in (True, False)]
    number = conn.execute(PINNED.format(*PARTS["arcs"]), ("arcs", [])).fetchone()[0]
    try:
        for sql in (f"SELECT shardmap.pin_key({within}, 'shard-2')", f"SELECT shardmap.move_key({within}, 'shard-2')"):
            with pytest.raises(Exception, match=f"move {number} of keyspace") as error:
                conn.execute(sql)
            assert "It moves 2 arcs of the ring (53.4" in error.value.diag.message_detail
        conn.execute(f"SELECT shardmap.pin_key({without}, 'shard-2'), shardmap.unpin_key({without})")
    finally:
        conn.execute("DELETE FROM shardmap.move WHERE id = %s", (number,))


@pytest.mark.parametrize("kind", PARTS)
def test_rows_of_a_moving_part_are_no_finding(tenants, conn, kind):
    tenant = next(t for t in iter(tenants.fresh, None) if is_member(kind, str(t)))
    tenants.on_shard(1, "INSERT INTO entry VALUES (77, %s, 1) RETURNING 1", tenant)
    misplaced = "SELECT sum(misplaced) FROM shardmap.verify('entry') WHERE finding IN ('clean', 'misplaced')"
    assert conn.execute(misplaced).fetchone() == (1,)
    number = conn.execute(PINNED.format(*PARTS[kind]), (kind, [])).fetchone()[0]
    try:
        assert conn.execute(misplaced).fetchone() == (0,)
        conn.execute("UPDATE shardmap.move SET except_keys = %s WHERE id = %s", ([str(tenant)], number))
        assert conn.execute(misplaced).fetchone() == (1,)
    finally:
        conn.execute("DELETE FROM shardmap.move WHERE id = %s", (number,))
        tenants.on_shard(1, "DELETE FROM entry WHERE id = 77 RETURNING 1")


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("name", KEYS)
def test_a_part_is_hidden_without_its_pinned_keys(tenants, keyed, name, kind):
    with tenants.connect() as conn:
        rows = conn.execute(f"SELECT v, shardmap.canonical_key(k), shard_for(k) FROM part_{name}").fetchall()
        here = [canonical for _, canonical, shard in rows if shard == "shard-1" and is_member(kind, canonical)]
        excepted = here[:2] + ["no value", "007", "1.50", "99999999999999999999999"]
        number = conn.execute(PINNED.format(*PARTS[kind]), (kind, excepted)).fetchone()[0]
        try:
            conn.execute("INSERT INTO shardmap.move_table (move, position, relation, key_columns, key_types, columns) "
                         "VALUES (%s, 1, %s::regclass, '{}', '{}', '{}')", (number, f"part_{name}"))
            conn.execute("SELECT shardmap._hide_rows(%s, 'shard-1')", (number,))
            want = {v for v, canonical, _ in rows if canonical not in here[2:]}
            assert visible(conn, name) == want
            assert conn.execute(f"SELECT count(*) FROM part_{name}").fetchone() == (len(want),)
            plan = "\n".join(row[0] for row in conn.execute(f"EXPLAIN (VERBOSE, COSTS OFF) SELECT count(*) FROM part_{name}"))
            # postgres_fdw sends no value of a type that is not built in.
            is_sent = name != "domained"
            assert ("Filter" not in plan) is is_sent and plan.count("SELECT count(*)") == (3 if is_sent else 2), plan
            plan = "\n".join(row[0] for row in conn.execute(f"EXPLAIN (VERBOSE, COSTS OFF) SELECT k FROM part_{name}_1 ORDER BY k LIMIT 3"))
            assert ("Filter" not in plan and "ORDER BY k ASC NULLS LAST LIMIT 3" in plan) is is_sent, plan
            # The same on the shard.
            condition = conn.execute("SELECT shardmap._move_condition(m, %s::regclass, 't.') FROM shardmap.move m WHERE id = %s",
                                     (f"part_{name}", number)).fetchone()[0]
            hidden = {row[0] for row in tenants.on_shard(1, f"SELECT v FROM part_{name} t WHERE {condition}")}
            assert hidden == {v for v, canonical, _ in rows if canonical in here[2:]}
            for canonical in (here + ["no value"])[:9]:
                assert conn.execute("SELECT shardmap._part_has_key(m, %s) FROM shardmap.move m WHERE id = %s",
                                    (canonical, number)).fetchone() == (is_member(kind, canonical),)
        finally:
            conn.execute("SELECT shardmap._hide_rows(%s, NULL)", (number,))
            conn.execute("DELETE FROM shardmap.move_table WHERE move = %s", (number,))
            conn.execute("DELETE FROM shardmap.move WHERE id = %s", (number,))


PAIRS = [
    ("arcs", ("'{[0,10)}'", "NULL", "NULL", "NULL", "NULL"), ("'{[10,11)}'", "NULL", "NULL", "NULL", "NULL"), False),
    ("arcs", ("'{[0,10),[20,30)}'", "NULL", "NULL", "NULL", "NULL"), ("'{[29,40)}'", "NULL", "NULL", "NULL", "NULL"), True),
    ("remainders", ("NULL", "4", "'{1}'", "NULL", "NULL"), ("NULL", "6", "'{2,4}'", "NULL", "NULL"), False),
    ("remainders", ("NULL", "4", "'{1}'", "NULL", "NULL"), ("NULL", "6", "'{3}'", "NULL", "NULL"), True),
    ("range", ("NULL", "NULL", "NULL", "NULL", "'k'"), ("NULL", "NULL", "NULL", "'k'", "NULL"), False),
    ("range", ("NULL", "NULL", "NULL", "'a'", "'l'"), ("NULL", "NULL", "NULL", "'k'", "'kk'"), True),
]


@pytest.mark.parametrize(("kind", "first", "second", "overlap"), PAIRS)
def test_parts_overlap(tenants, kind, first, second, overlap):
    with tenants.connect() as conn, conn.transaction(force_rollback=True):
        one, other = [conn.execute(PINNED.format(*part), (kind, [])).fetchone()[0] for part in (first, second)]
        assert conn.execute("SELECT shardmap._parts_overlap(a, b), shardmap._parts_overlap(b, a) FROM shardmap.move a, shardmap.move b "
                            "WHERE a.id = %s AND b.id = %s", (one, other)).fetchone() == (overlap, overlap)

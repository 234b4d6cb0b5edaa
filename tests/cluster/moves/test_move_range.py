"""A range goes to another shard: all rows of its keys, by numbers or by the bytes of any text, and nothing else."""

import psycopg
import pytest
from fleet import COUNT, KEYS, Fleet, Load

POINTS = ("move_hidden", "move_logging", "move_batch:2", "move_copied", "move_caught_up", "move_verified", "move_fenced", "move_flip", "move_flipped",
          "move_cleaning:1", "move_done")


@pytest.fixture(scope="module", params=["integer", "text"])
def fleet(request, tenants):
    order = request.param
    keys = {"integer": ["int4", "int8"], "text": list(KEYS)}[order]
    fleet = Fleet(tenants, f"ranges_{order}", keys, strategy="range", range_order=order)
    fleet.order = order
    with fleet.connect() as conn:
        middle = {"integer": "31", "text": "k"}[order]
        conn.execute("SELECT shardmap.set_range(%s, NULL, %s, %s), shardmap.set_range(%s, %s, NULL, %s)",
                     (fleet.name, middle, f"{fleet.name}-0", fleet.name, middle, f"{fleet.name}-1"))
        fleet.fill(conn, 'COLLATE "sv-x-icu"' if order == "text" else "")
    return fleet


@pytest.fixture
def conn(fleet):
    with fleet.connect() as conn:
        yield conn


def ranges(fleet, conn):
    return conn.execute("SELECT lower, upper, right(shard, 1)::int FROM shardmap.key_range WHERE keyspace = %s ORDER BY lower NULLS FIRST",
                        (fleet.name,)).fetchall()


def plan(fleet, conn, lower, upper, shard):
    return conn.execute("SELECT array_agg(DISTINCT move ORDER BY move), sum(rows) FROM shardmap.move_range(%s, %s, %s, %s)",
                        (lower, upper, f"{fleet.name}-{shard}", fleet.name)).fetchone()


def within(fleet, conn, lower, upper):
    """Rows of a range, by what this server knows of keys."""
    condition = {"integer": "(shardmap.canonical_key(k))::int8 >= %s::int8 AND (shardmap.canonical_key(k))::int8 < %s::int8",
                 "text": "convert_to(shardmap.canonical_key(k), 'UTF8') >= convert_to(%s, 'UTF8') "
                         "AND convert_to(shardmap.canonical_key(k), 'UTF8') < convert_to(%s, 'UTF8')"}[fleet.order]
    return sum(conn.execute(f"SELECT count(*) FROM {table} WHERE {condition}", (lower, upper)).fetchone()[0] for table in fleet.tables)


def test_ranges_move_under_load(fleet, conn):
    cuts = {"integer": ("11", "45", "20000000000"), "text": ("2", "kéy-3", "Ä")}[fleet.order]
    cuts = sorted(cuts, key=int if fleet.order == "integer" else str.encode)
    rows = within(fleet, conn, cuts[0], cuts[1])
    assert 0 < rows < COUNT * 4 * len(fleet.tables)
    with Load(fleet) as load:
        # From both shards: one move each.
        numbers, planned = plan(fleet, conn, cuts[0], cuts[1], 2)
        assert planned == rows and len(numbers) in (1, 2)
        conn.execute(f"CALL shardmap.run_moves('{fleet.name}')")
        assert any(row == (cuts[0], cuts[1], 2) for row in ranges(fleet, conn)) or len(numbers) == 2
        assert sum(fleet.on_shard(2, f"SELECT count(*) FROM {table}")[0][0] for table in fleet.tables) == rows
        fleet.check(conn)
        # Up to the end, and back.
        for shard in (0, 1):
            numbers, _ = plan(fleet, conn, cuts[1], None, shard)
            conn.execute(f"CALL shardmap.run_moves('{fleet.name}')")
            assert {row[2] for row in ranges(fleet, conn) if row[1] is None} == {shard}
            fleet.check(conn)
        assert load.failures == []
    load.check(conn)
    assert conn.execute("SELECT * FROM shardmap.move_range(%s, NULL, %s, %s)", (cuts[1], f"{fleet.name}-1", fleet.name)).fetchall() == []


def test_it_goes_on_from_every_point(fleet, conn):
    whole = conn.execute("SELECT move FROM shardmap.move_range(NULL, NULL, %s, %s)", (f"{fleet.name}-0", fleet.name)).fetchall()
    assert whole
    conn.execute(f"CALL shardmap.run_moves('{fleet.name}')")
    (number,), rows = plan(fleet, conn, {"integer": "10", "text": "k"}[fleet.order], None, 2)
    before = {table: conn.execute(f"SELECT count(*), sum(hashtextextended({table}::text, 0)::numeric) FROM {table}").fetchone() for table in fleet.tables}
    broken = 0
    for point in POINTS:
        with fleet.connect(**{"shardmap__crash_point": f"{point}=error"}) as runner:
            try:
                runner.execute(f"CALL shardmap.run_move({number})")
            except psycopg.Error as error:
                assert "crash point" in str(error)
                broken += 1
        for table, want in before.items():
            assert conn.execute(f"SELECT count(*), sum(hashtextextended({table}::text, 0)::numeric) FROM {table}").fetchone() == want, point
    assert broken >= len(POINTS) - 1
    conn.execute(f"CALL shardmap.run_move({number})")
    assert rows > 0 and sum(fleet.on_shard(2, f"SELECT count(*) FROM {table}")[0][0] for table in fleet.tables) == rows
    fleet.check(conn)


def test_a_range_that_is_given_up_stays(fleet, conn):
    before = ranges(fleet, conn)
    (number,), _ = plan(fleet, conn, {"integer": "10", "text": "k"}[fleet.order], None, 1)
    with fleet.connect(**{"shardmap__crash_point": "move_verified=error"}) as runner, pytest.raises(psycopg.Error, match="crash point"):
        runner.execute(f"CALL shardmap.run_move({number})")
    for sql in (f"SELECT shardmap.set_range('{fleet.name}', {{}}, NULL, '{fleet.name}-0', 1)", f"SELECT shardmap.move_range(NULL, NULL, '{fleet.name}-0', '{fleet.name}')"):
        with pytest.raises(psycopg.Error, match="is under way|was expected|overlaps"):
            conn.execute(sql.format({"integer": "'10'", "text": "'k'"}[fleet.order]))
    conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
    conn.execute(f"CALL shardmap.run_move({number})")
    assert conn.execute("SELECT state FROM shardmap.moves WHERE id = %s", (number,)).fetchone() == ("rolled_back",)
    assert ranges(fleet, conn) == before
    fleet.check(conn)


def test_a_dry_run_enters_nothing(fleet, conn):
    count = conn.execute("SELECT count(*) FROM shardmap.moves").fetchone()
    rows = conn.execute("SELECT move, part, rows, bytes > 0, expected, steps FROM shardmap.move_range(NULL, NULL, %s, %s, dry_run => true)",
                        (f"{fleet.name}-1", fleet.name)).fetchall()
    assert rows and {row[0] for row in rows} == {None} and all(row[1].startswith("range [") for row in rows)
    assert conn.execute("SELECT count(*) FROM shardmap.moves").fetchone() == count
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="holds no key"):
        conn.execute("SELECT * FROM shardmap.move_range('5', '5', %s, %s)", (f"{fleet.name}-1", fleet.name))

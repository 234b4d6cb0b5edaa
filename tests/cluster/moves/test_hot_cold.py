"""Shards that bear too much give a part to others; those that bear too little give all; on rings, by remainder, by range."""

import psycopg
import pytest
from psycopg import errors

TABLES = ("account", "entry")
SPACES = {"ring": "'ring'", "modulo": "'modulo'", "integers": "'range', range_order => 'integer'", "texts": "'range', range_order => 'text'"}
FINGERPRINT = "SELECT count(*), sum(hashtextextended(a::text, 0)) FROM account a UNION ALL SELECT count(*), sum(hashtextextended(e::text, 0)) FROM entry e"


class Space:
    """A keyspace of two shards with rows, and a third one that has none."""

    def __init__(self, cluster, kind):
        self.cluster, self.kind, self.name = cluster, kind, f"hot_{kind}"
        cluster.new_database(self.name, shards=3)
        self.conn = psycopg.connect(cluster.dsn(self.name), autocommit=True, options="-c shardmap.fanout_policy=allow"
                                    " -c shardmap.cleanup_delay=0 -c client_min_messages=notice")
        self.notices = []
        self.conn.add_notice_handler(lambda notice: self.notices.append((notice.message_primary, notice.message_hint)))
        self.sql("SELECT shardmap.drop_shard(name) FROM shardmap.shard")
        self.sql(f"SELECT shardmap.create_keyspace('{kind}', {SPACES[kind]})")
        for shard in (0, 1):
            self.add(shard)
        if kind in ("integers", "texts"):
            self.sql(f"SELECT shardmap.set_range('{kind}', NULL, '500', 'shard-0'), shardmap.set_range('{kind}', '500', NULL, 'shard-1')")
        self.sql("CREATE TABLE account (tenant int, id int, note text, PRIMARY KEY (tenant, id))")
        self.sql("CREATE TABLE entry (id int, tenant int, PRIMARY KEY (id, tenant))")
        for table in TABLES:
            self.sql(f"SELECT shardmap.distribute_table('{table}', 'tenant', '{kind}')")
        self.sql("INSERT INTO account SELECT t, i, repeat('x', t % 7) FROM generate_series(100, 699) t, generate_series(1, 3) i")
        self.sql("INSERT INTO entry SELECT i, t FROM generate_series(100, 699) t, generate_series(1, 2) i")
        self.add(2)

    def sql(self, text, *params):
        done = self.conn.execute(text, params or None)
        return done.fetchall() if done.description else None

    def add(self, shard):
        self.sql(f"SELECT shardmap.add_shard('shard-{shard}', host => '127.0.0.1', port => {self.cluster.shard_server(shard).port},"
                 f" dbname => '{self.cluster.shard_database(shard, self.name)}', keyspace => '{self.kind}')")

    def rows(self):
        """Stored on each shard, with the shards' statistics brought up to date."""
        found = {}
        for name, number in self.sql("SELECT name, right(name, 1)::int FROM shardmap.shard ORDER BY 1"):
            with psycopg.connect(self.cluster.shard_dsn(number, self.name), autocommit=True) as shard:
                shard.execute("ANALYZE account, entry")
                found[name] = sum(shard.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES)
        return found

    def run_moves(self):
        for number, in self.sql("SELECT id FROM shardmap.move WHERE state NOT IN ('done', 'rolled_back') ORDER BY id"):
            self.sql(f"CALL shardmap.run_move({number})")

    def is_settled(self):
        states = {state for state, in self.sql("SELECT state FROM shardmap.move")}
        misplaced = self.sql("SELECT table_name, misplaced FROM (SELECT 'account' AS table_name, v.misplaced FROM shardmap.verify('account') v"
                             " UNION ALL SELECT 'entry', v.misplaced FROM shardmap.verify('entry') v) x WHERE misplaced > 0")
        return states <= {"done"} and not misplaced


@pytest.fixture(scope="module", params=SPACES)
def space(request, tenants):
    space = Space(tenants.cluster, request.param)
    yield space
    space.conn.close()
    tenants.cluster.drop_database(space.name, 3)


def test_the_hot_give_half_and_the_cold_give_all(space):
    before, fingerprint = space.rows(), space.sql(FINGERPRINT)
    hot, rows = max(before.items(), key=lambda item: item[1])
    split = f"SELECT source, target, rows, part FROM shardmap.split_hot('{space.kind}', max_rows => {rows - 1}, dry_run => %s)"
    plan = space.sql(split, True)
    assert {row[:2] for row in plan} == {(hot, "shard-2")}
    assert 0.35 * rows < sum(row[2] for row in plan) < 0.65 * rows
    assert space.sql("SELECT count(*) FROM shardmap.move") == [(0,)]
    # What is planned is what a dry run says, and what is wanted then.
    assert space.sql(split, False) == plan
    space.run_moves()
    after = space.rows()
    assert after[hot] == rows - sum(row[2] for row in plan) and after["shard-2"] == sum(row[2] for row in plan)
    assert space.is_settled() and space.sql(FINGERPRINT) == fingerprint
    assert space.sql("SELECT state FROM shardmap.shard WHERE name = 'shard-2'") == [("active",)]
    assert space.sql(f"SELECT shardmap._wanted_keyspace('{space.kind}')") == [(None,)]
    space.notices.clear()
    assert space.sql(split, False) == []
    assert space.notices[-1] == (f'nothing to move in keyspace "{space.kind}"', "See shardmap.add_shard.")

    cold, rows = min(after.items(), key=lambda item: item[1])
    merge = f"SELECT source, target, rows, part FROM shardmap.merge_cold('{space.kind}', min_rows => {rows + 1}, dry_run => %s)"
    plan = space.sql(merge, True)
    assert {row[0] for row in plan} == {cold} and sum(row[2] for row in plan) == rows
    assert space.sql("SELECT count(*) FROM shardmap.shard WHERE state = 'draining'") == [(0,)]
    assert space.sql(merge, False) == plan
    with pytest.raises(errors.ObjectInUse, match="move .* is under way"):
        space.sql(merge, False)
    space.run_moves()
    assert space.is_settled() and space.sql(FINGERPRINT) == fingerprint
    assert space.rows()[cold] == 0
    assert space.sql(f"SELECT shardmap._wanted_keyspace('{space.kind}')") == [(None,)]
    space.sql("SELECT shardmap.drop_shard(%s)", cold)
    assert space.sql(FINGERPRINT) == fingerprint


def test_load_is_statements_a_second(space):
    owner, = space.sql(f"SELECT s.name FROM shardmap.shard s WHERE s.name = shard_for(123, '{space.kind}')")[0]
    space.sql("SELECT shardmap.reset_stat_routing()")
    for _ in range(20):
        space.sql("SELECT FROM account WHERE tenant = 123")
    plan = space.sql(f"SELECT source, target FROM shardmap.split_hot('{space.kind}', max_load => 0.0001, dry_run => true)")
    assert {source for source, _ in plan} == {owner} and owner not in {target for _, target in plan}


@pytest.mark.parametrize("plan", ["split_hot('{space}', max_load => 0.0001, engine => 'logical')",
                                  "merge_cold('{space}', min_rows => 1000000, engine => 'logical')"])
def test_the_engine_is_that_of_its_moves(space, plan):
    space.sql("SELECT FROM account WHERE tenant = 123")
    with space.conn.transaction(force_rollback=True):
        assert space.sql("SELECT move IS NOT NULL FROM shardmap." + plan.format(space=space.kind))[0] == (True,)
        assert space.sql("SELECT DISTINCT engine FROM shardmap.move WHERE state = 'planned'") == [("logical",)]


@pytest.mark.parametrize("call, error, message", [
    ("split_hot({space}, max_rows => 1, engine => 'nosuch')", errors.InvalidParameterValue, 'there is no engine "nosuch"'),
    ("merge_cold({space}, min_rows => 1, engine => 'nosuch')", errors.InvalidParameterValue, 'there is no engine "nosuch"'),
    ("split_hot({space})", errors.InvalidParameterValue, "a limit of rows, bytes or load is required"),
    ("split_hot({space}, max_bytes => 0)", errors.InvalidParameterValue, "a limit of rows, bytes or load is required"),
    ("merge_cold({space})", errors.InvalidParameterValue, "a limit of rows, bytes or load is required"),
    ("split_hot({space}, max_rows => 1, shard => 'nosuch')", errors.UndefinedObject, 'has no shard "nosuch"'),
    ("split_hot('nosuch', max_rows => 1)", errors.UndefinedObject, 'keyspace "nosuch" does not exist'),
])
def test_what_is_refused(space, call, error, message):
    with pytest.raises(error, match=message):
        space.sql("SELECT shardmap." + call.format(space=f"'{space.kind}'"))


def test_one_key_cannot_be_divided(space):
    """By range; on a ring and by remainder nobody looks at the keys."""
    if space.kind not in ("integers", "texts"):
        pytest.skip("not a keyspace of ranges")
    space.sql("DELETE FROM account WHERE tenant <> 123")
    space.sql("DELETE FROM entry WHERE tenant <> 123")
    space.rows()
    space.notices.clear()
    owner, = space.sql(f"SELECT shard_for(123, '{space.kind}')")[0]
    assert space.sql(f"SELECT * FROM shardmap.split_hot('{space.kind}', max_rows => 1)") == []
    assert space.notices[0] == (f'shard "{owner}" cannot be divided', "shardmap.move_key gives one key to a shard of its own choosing.")

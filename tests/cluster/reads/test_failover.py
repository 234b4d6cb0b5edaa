"""A failover while sessions and the sampler stay connected to the former primary, which lives on: as when an address comes to
lead to another server. Nobody writes to the former one, and tokens of before are good up to where the logs parted.

Shard 0 is watched by a superuser, who may read the history file of a timeline; shard 1 by a user with pg_monitor, who may not.
"""

import contextlib

import psycopg
import pytest
from places import Place, make_cluster, role_of, wait_until
from proxy import Proxy
from psycopg import errors
from test_reads import raise_value, value

WATCHER = "CREATE ROLE watcher LOGIN; GRANT pg_monitor, pg_read_all_data, pg_write_all_data TO watcher"
LOST = "on a newer timeline, which may lack what the token stands for"


class Failover:
    """`before`: a session of before. `early`, `late`: tokens of the old timelines, of what all replicas had, and of what was
    written after their promotion. `news`: who are primaries now."""

    def __init__(self, place, proxies):
        self.place, self.cluster, self.proxies = place, place.cluster, proxies
        self.keys = [keys[0] for keys in place.keys]
        self.olds = [self.cluster.shard_server(shard) for shard in range(2)]
        self.news = [place.replica(shard, 0) for shard in range(2)]
        self.before = place.connect()
        place.settle()
        self.values = [raise_value(self.before, key) for key in self.keys]
        self.early = self.before.execute("SELECT shardmap.write_token()").fetchone()[0]
        self.cluster.wait_for_replicas()
        for shard in range(2):
            self.promote(shard)
        for shard, old in enumerate(self.olds):
            old.psql("CREATE TABLE lost (a int)", f"shard_{shard}")
        # The servers are reached as ever, by new connections too.
        with place.connect() as conn:
            self.late = conn.execute("SELECT shardmap.current_token()").fetchone()[0]
        for proxy, new in zip(proxies, self.news):
            proxy.target = ("127.0.0.1", new.port)

    def promote(self, shard):
        new, left = self.news[shard], self.place.replica(shard, 1)
        left.psql(f"ALTER SYSTEM SET primary_conninfo = 'host=127.0.0.1 port={new.port} user=postgres'")
        left.psql("SELECT pg_reload_conf()")
        wait_until(lambda: new.psql("SELECT count(*) FROM pg_stat_replication") == "1")
        new.psql("SELECT pg_promote()")

    def lag(self, conn, shard):
        return conn.execute("SELECT state, timeline FROM shardmap.replica_lag WHERE replica = %s", [f"shard-{shard}-replica-1"]).fetchone()

    def verdict(self, conn, shard, token):
        found = conn.execute("SELECT considered FROM shardmap.choose_replica(%s, token => %s)", [f"shard-{shard}", token]).fetchone()[0]
        return next(line.split(": ", 1)[1] for line in found if line.startswith(f"shard-{shard}-replica-1: "))


@pytest.fixture(scope="module")
def failover():
    with make_cluster() as cluster, contextlib.ExitStack() as stack:
        place = Place(cluster)
        cluster.shard_server(1).psql(WATCHER)
        cluster.psql("ALTER USER MAPPING FOR postgres SERVER \"shard-1\" OPTIONS (SET user 'watcher')")
        proxies = [stack.enter_context(Proxy(port=cluster.shard_server(shard).port)) for shard in range(2)]
        for shard, proxy in enumerate(proxies):
            cluster.psql(f"ALTER SERVER \"shard-{shard}\" OPTIONS (SET port '{proxy.port}')")
        failover = Failover(place, proxies)
        try:
            yield failover
        finally:
            failover.before.close()


@pytest.fixture
def conn(failover):
    """A session that takes the sampler's word, once that has found the new primaries."""
    with failover.place.connect(consistency="token", catchup_timeout=0) as conn:
        for shard in range(2):
            wait_until(lambda: failover.lag(conn, shard) == ("replica", 2), 60)
        yield conn


def test_the_sampler_leaves_a_former_primary(failover, conn):
    """It has been connected to it all the time; its connection is still there, or the proxy would have ended it."""
    assert all(old.psql("SELECT pg_is_in_recovery()") == "f" for old in failover.olds)
    with failover.place.connect() as other:
        assert {role_of(other, f"SELECT v FROM kv WHERE k = {key}") for key in failover.keys} == {"replica"}
    assert conn.execute("SELECT count(*) FROM kv").fetchone() == (40,)


def test_a_session_of_before_writes_to_the_new_primary(failover, conn):
    for shard, key in enumerate(failover.keys):
        was = int(failover.news[shard].psql(f"SELECT v FROM kv WHERE k = {key}", f"shard_{shard}"))
        assert raise_value(failover.before, key) == was + 1
        assert int(failover.news[shard].psql(f"SELECT v FROM kv WHERE k = {key}", f"shard_{shard}")) == was + 1
        assert int(failover.olds[shard].psql(f"SELECT v FROM kv WHERE k = {key}", f"shard_{shard}")) == failover.values[shard]


def test_tokens_of_before_are_good_up_to_the_fork(failover, conn):
    for shard, key in enumerate(failover.keys):
        # The token of the session counts too.
        conn.execute("RESET shardmap.read_token")
        wait_until(lambda: failover.verdict(conn, shard, failover.early) == "would do")
        conn.execute(f"SET shardmap.read_token = '{failover.early}'")
        assert role_of(conn, f"SELECT v FROM kv WHERE k = {key}") == "replica"
        assert value(conn, key) >= failover.values[shard]
        assert failover.verdict(conn, shard, failover.late) == LOST
        conn.execute(f"SET shardmap.read_token = '{failover.late}'")
        assert role_of(conn, f"SELECT v FROM kv WHERE k = {key}") == "primary"


def test_a_reader_of_before_does_not_read_from_the_former_primary(failover, conn):
    """His connection leads there still, or again."""
    with failover.place.connect(read_preference="prefer_replica", consistency="token") as reader:
        for shard, (proxy, key) in enumerate(zip(failover.proxies, failover.keys)):
            proxy.target = ("127.0.0.1", failover.olds[shard].port)
            with pytest.raises(errors.ObjectNotInPrerequisiteState, match="its server is a former primary"):
                reader.execute("SELECT v FROM kv WHERE k = %s FOR UPDATE", [key])
            proxy.target = ("127.0.0.1", failover.news[shard].port)
        with failover.place.connect() as writer:
            new = [raise_value(writer, key) for key in failover.keys]
            token = writer.execute("SELECT shardmap.write_token()").fetchone()[0]
        reader.execute(f"SET shardmap.read_token = '{token}'; SET shardmap.max_lag = 0")  # no replica will do
        for value_of_new, key in zip(new, failover.keys):
            assert role_of(reader, f"SELECT v FROM kv WHERE k = {key}") == "primary"
            assert value(reader, key) == value_of_new


def test_forks_outlive_the_sampler(failover, conn):
    wait_until(lambda: conn.execute("SELECT count(DISTINCT shard) FROM shardmap._fork").fetchone() == (2,))
    restart_sampler(conn)
    for shard in range(2):
        wait_until(lambda: failover.verdict(conn, shard, failover.early) == "would do", 60)
        assert failover.verdict(conn, shard, failover.late) == LOST
    # What is not known any more is not relied on; a history file tells it again.
    conn.execute("DELETE FROM shardmap._fork")
    restart_sampler(conn)
    wait_until(lambda: failover.verdict(conn, 0, failover.early) == "would do", 60)
    wait_until(lambda: failover.verdict(conn, 1, failover.early) == LOST, 60)
    assert failover.verdict(conn, 0, failover.late) == LOST


def restart_sampler(conn):
    sql = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'pg_shardmap sampler' AND datname = current_database()"
    before = conn.execute(sql).fetchone()
    # What is shown stays the former sampler's until the new one has asked.
    shown = conn.execute("SELECT max(sampled_at) FROM shardmap.replica_lag").fetchone()[0]
    conn.execute("SELECT pg_terminate_backend(%s)", before)
    wait_until(lambda: conn.execute(sql).fetchone() not in (None, before), 60)
    wait_until(lambda: conn.execute("SELECT min(sampled_at) FROM shardmap.replica_lag").fetchone()[0] > shown, 60)
    with contextlib.suppress(psycopg.Error):
        conn.execute("ROLLBACK")

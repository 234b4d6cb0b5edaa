"""A bank on three shards, each a server of its own: accounts on the shards, a local table, and what must be true of them.

Accounts are numbered 1 to 300; `keys(n)` are those of shard n. Money is moved and never made, so that the sum over all
shards is the same whatever failed, once nothing is prepared any more.
"""

import contextlib

import psycopg
from cluster import Cluster
from patience import crashing, wait_until

SHARDS = 3
ACCOUNTS = 300
SETUP = f"""
CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL);
INSERT INTO account SELECT i, 1000 FROM generate_series(1, {ACCOUNTS}) i;
SELECT shardmap.distribute_table('account', 'id');
CREATE TABLE journal (id bigserial PRIMARY KEY, note text);
"""
SUM = 1000 * ACCOUNTS
ADD = "UPDATE account SET balance = balance + %s WHERE id = %s"
COORDINATOR = {"shardmap.resolve_interval": "1", "shardmap.fanout_policy": "allow"}


class Ledger:
    """The cluster and what tests ask of it."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.coordinator = cluster.coordinator
        cluster.psql(SETUP)
        owners = [line.split("|") for line in cluster.psql(
            f"SELECT i, right(shard_for(i), 1) FROM generate_series(1, {ACCOUNTS}) i").splitlines()]
        self._keys = {n: [int(i) for i, owner in owners if int(owner) == n] for n in range(SHARDS)}

    def keys(self, shard):
        return self._keys[shard]

    def connect(self, user="postgres", **settings):
        options = " ".join(f"-c {name.replace('__', '.')}={value}" for name, value in settings.items())
        return psycopg.connect(self.cluster.dsn(user=user), autocommit=True, options=options)

    def on_shard(self, number, sql, *params):
        with psycopg.connect(self.cluster.shard_dsn(number), autocommit=True) as conn:
            return conn.execute(sql, params or None).fetchall()

    def prepared(self):
        """The ids of what is prepared on the shards."""
        return [gid for n in range(SHARDS) for (gid,) in self.on_shard(n, "SELECT gid FROM pg_prepared_xacts")]

    def balances(self, *ids):
        """As the shards themselves say."""
        found = {}
        for n in range(SHARDS):
            found.update(self.on_shard(n, "SELECT id, balance FROM account WHERE id = ANY (%s)", list(ids)))
        return [found[i] for i in ids]

    def records(self):
        return int(self.cluster.psql("SELECT count(*) FROM shardmap.transactions"))

    def settle(self):
        """Waits until nothing is prepared, nor recorded; then no lock may be left and the sum must be right."""
        wait_until(lambda: not self.prepared() and self.records() == 0,
                   lambda: f"prepared {self.prepared()}, {self.records()} records, {self.in_doubt()}")
        total = 0
        for n in range(SHARDS):
            locks = self.on_shard(n, "SELECT l.mode FROM pg_locks l JOIN pg_class c ON c.oid = l.relation"
                                     " LEFT JOIN pg_stat_activity a ON a.pid = l.pid WHERE c.relname = 'account'"
                                     " AND l.pid IS DISTINCT FROM pg_backend_pid() AND a.backend_type IS DISTINCT FROM 'autovacuum worker'")
            assert not locks, f"shard {n} keeps locks: {locks}"
            total += self.on_shard(n, "SELECT sum(balance) FROM account")[0][0]
        assert total == SUM

    def in_doubt(self):
        return self.cluster.psql("SELECT * FROM shardmap.in_doubt")

    def wait_for_coordinator(self):
        def answers():
            with contextlib.suppress(psycopg.OperationalError), self.connect() as conn:
                return conn.execute("SELECT 1").fetchone() == (1,)
        wait_until(answers, self.coordinator.log_tail)

    def crashing(self):
        """A session is killed in here."""
        return crashing(self.coordinator)

    @contextlib.contextmanager
    def configured(self, **settings):
        """The coordinator has these settings meanwhile; no resolver of before is at work."""
        settings = {name.replace("__", "."): value for name, value in settings.items()}
        self.coordinator.reload(**settings)
        resolvers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_shardmap resolver'"
        wait_until(lambda: self.coordinator.psql(resolvers) == "0")
        try:
            yield
        finally:
            self.coordinator.reload(**dict.fromkeys(settings))


def transfer(conn, *ids, amount=10):
    """Moves money from the first account to each of the others, within a transaction."""
    conn.execute(ADD, (-amount * (len(ids) - 1), ids[0]))
    for each in ids[1:]:
        conn.execute(ADD, (amount, each))


@contextlib.contextmanager
def open_ledger():
    with Cluster(shards=SHARDS, layout="servers", coordinator_settings=COORDINATOR) as cluster:
        yield Ledger(cluster)

"""One database of the cluster with shards of its own, filled: where a scenario takes place.

What always holds: what is asked of `on_shard` goes to the shard itself, past the coordinator, which may be wrong. Tenants are
numbered from 1; the first hundredth of `ranked` are the hot ones, and have rows enough for several batches.
"""

import random
import time

import psycopg
from proxy import Proxy
from server import ServerError

from .clients import ACCOUNTS
from .ledger import Stored

TABLES = """
CREATE TABLE account (tenant int, id int, balance bigint NOT NULL, PRIMARY KEY (tenant, id));
CREATE TABLE counter (tenant int PRIMARY KEY, ops bigint NOT NULL, bare bigint NOT NULL);
CREATE TABLE op (tenant int, writer int, number int, PRIMARY KEY (tenant, writer, number));
CREATE TABLE item (tenant int, writer int, id int, value bigint NOT NULL, note text, PRIMARY KEY (tenant, writer, id));
"""
NAMES = ("account", "counter", "op", "item")
OLD = 0  # the writer of the items that are there before
SPACES = {"ring": "main", "modulo": "parts", "range": "places"}


class Arena:
    """`strategy`: ring, modulo or range; `shards`: how many take part at first, of all that the cluster has; `proxied`: the
    coordinator reaches them through proxies, which can cut its connections."""

    def __init__(self, cluster, name, strategy="ring", shards=3, tenants=200, hot_items=400, seed="1",
                 proxied=False):
        self.cluster, self.name, self.keyspace, self.strategy = cluster, name, SPACES[strategy], strategy
        self.shards, self.tenants, self.hot_items = shards, tenants, hot_items
        self.ranked = list(range(1, tenants + 1))
        random.Random(f"{seed}/ranks").shuffle(self.ranked)
        self.hot = self.ranked[:max(1, tenants // 100)]
        self.dsn, self.proxies, self.turn = cluster.dsn(name), {}, 0
        self.proxied, self.crew, self.around = proxied, None, None

    def create(self):
        self.cluster.new_database(self.name, shards=0)
        if self.strategy != "ring":
            order = ", range_order => 'integer'" if self.strategy == "range" else ""
            self.psql(f"SELECT shardmap.create_keyspace('{self.keyspace}', '{self.strategy}'{order})")
        for number in range(self.shards):
            self.add_shard(number)
        if self.strategy == "range":
            step = self.tenants // self.shards + 1
            self.psql("".join(f"SELECT shardmap.set_range('{self.keyspace}', '{n * step}', '{(n + 1) * step}', 'shard-{n}');\n"
                              for n in range(self.shards)))
        self.psql(TABLES + "".join(f"SELECT shardmap.distribute_table('{table}', 'tenant', '{self.keyspace}');\n" for table in NAMES))
        self.fill()
        return self

    def add_shard(self, number):
        """Its database, and its place among the shards; where the keyspace has rows it joins without owning any."""
        database = self.cluster.shard_database(number, self.name)
        self.cluster.shard_server(number).psql(f'CREATE DATABASE "{database}"')
        port = self.cluster.shard_server(number).port
        if self.proxied:
            self.proxies[number] = Proxy(port=port)
            port = self.proxies[number].__enter__().port
        self.psql(f"SELECT shardmap.add_shard('shard-{number}', host => '127.0.0.1', port => {port}, "
                  f"dbname => '{database}', keyspace => '{self.keyspace}')")
        self.shards = max(self.shards, number + 1)

    def fill(self):
        hot = ", ".join(map(str, self.hot))
        self.psql(f"""
            INSERT INTO account SELECT t, i, 1000 FROM generate_series(1, {self.tenants}) t, generate_series(1, {ACCOUNTS}) i;
            INSERT INTO counter SELECT t, 0, 0 FROM generate_series(1, {self.tenants}) t;
            INSERT INTO item SELECT t, {OLD}, i, i, repeat('old ', 20) FROM unnest(ARRAY[{hot}]) t, generate_series(1, {self.hot_items}) i;
            """)

    def destroy(self):
        for proxy in self.proxies.values():
            proxy.__exit__()
        self.wait()
        self.cluster.drop_database(self.name, self.shards)

    def psql(self, sql):
        return self.cluster.psql(sql, self.name)

    def connect(self, **settings):
        settings = {"shardmap__fanout_policy": "allow", **settings}
        options = " ".join(f"-c {name.replace('__', '.')}={value}" for name, value in settings.items())
        return psycopg.connect(self.dsn, autocommit=True, options=options)

    def on_shard(self, number, sql, params=None):
        with psycopg.connect(self.cluster.shard_dsn(number, self.name), autocommit=True) as conn:
            cursor = conn.execute(sql, params)
            return cursor.fetchall() if cursor.description else []

    def server(self, shard):
        """The server of a shard, by its name."""
        return self.cluster.shard_server(self.number(shard))

    def proxy(self, shard):
        return self.proxies[self.number(shard)]

    @staticmethod
    def number(shard):
        return int(shard.removeprefix("shard-"))

    def owner(self, tenant):
        return self.owners([tenant])[tenant]

    def owners(self, tenants=None):
        """The shard of each tenant, by the map."""
        with self.connect() as conn:
            return dict(conn.execute("SELECT t, shardmap.owner_of(t::text, %s) FROM unnest(%s::int[]) t",
                                     [self.keyspace, tenants or self.ranked]))

    def moves(self):
        with self.connect() as conn:
            conn.row_factory = psycopg.rows.dict_row
            return conn.execute("SELECT * FROM shardmap.moves ORDER BY id").fetchall()

    def stored(self):
        """What all shards hold, asked of each by itself."""
        stored = Stored()
        for shard in range(self.shards):
            stored.ops.update(self.on_shard(shard, "SELECT tenant, writer, number FROM op"))
            for tenant, ops, bare in self.on_shard(shard, "SELECT tenant, ops, bare FROM counter"):
                stored.counters.setdefault(tenant, []).append((ops, bare))
            for tenant, writer, number, value in self.on_shard(shard, "SELECT tenant, writer, id, value FROM item"):
                stored.items.setdefault((tenant, writer, number), []).append(value)
        return stored

    def wait(self):
        """Until all servers take connections: one that was killed, or whose session was, recovers."""
        for server in (self.cluster.coordinator, *self.cluster.shard_servers[:self.shards]):
            server.start()
            retried(lambda server=server: server.psql("SELECT 1"))


def retried(function, seconds=60):
    """Its value, when it no longer fails for want of a server."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return function()
        except (psycopg.OperationalError, ServerError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)

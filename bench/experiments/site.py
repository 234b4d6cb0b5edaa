"""N logical shards: databases of the cluster's one shard server, with the rows on them, and the routers' connections."""

import psycopg

from shardlog import ShardLog

from .data import TABLES
from .routers import ROUTERS


class Site:
    """`with Site(cluster, "name", 8, data, ("objects",)) as site`: databases that go again afterwards."""

    def __init__(self, cluster, name, shards, data, tables=tuple(TABLES)):
        self.cluster, self.name, self.shards, self.data, self.tables = cluster, name, shards, data, tables
        self.log = ShardLog(cluster, name, shards)
        self.routers = []

    def __enter__(self):
        try:
            self.cluster.new_database(self.name, shards=self.shards, strategy="modulo")
            with psycopg.connect(self.cluster.dsn(self.name), autocommit=True) as conn:
                for table in self.tables:
                    self._load(conn, table)
            self._settle()
            addresses = self.cluster.dsn(self.name), self._shard_dsns()
            for router in ROUTERS:
                self.routers.append(router(*addresses))
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_):
        for router in self.routers:
            router.close()
        self.cluster.drop_database(self.name, self.shards)

    def _shard_dsns(self):
        return [self.cluster.shard_dsn(number, self.name) for number in range(self.shards)]

    def _load(self, conn, table):
        key, definition = TABLES[table]
        conn.execute(definition)
        with conn.cursor().copy(f"COPY {table} FROM STDIN") as copy:
            for row in self.data.rows(table):
                copy.write_row(row)
        conn.execute("SELECT shardmap.distribute_table(%s, %s, 'modulo')", (table, key))

    def _settle(self):
        """Statistics and visibility maps as after a while of service, nothing left to write."""
        tables = ", ".join(self.tables)
        for number in range(self.shards):
            self.cluster.shard_psql(number, f"VACUUM (ANALYZE) {tables}", self.name)
        self.cluster.psql(f"ANALYZE {tables}", self.name)
        for server in self.log.servers:
            server.psql("CHECKPOINT")

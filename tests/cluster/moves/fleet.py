"""A keyspace of its own on databases of the tenants' servers, with tables of several key types that are used meanwhile."""

import random
import threading

import psycopg

WORDS = "kéy-", "Ärger ", "zoë/", "ключ ", "k"
KEYS = {"int4": "i", "int8": "i * 1000000007::int8", "text": "(array['kéy-', 'Ärger ', 'zoë/', 'ключ ', 'k'])[i % 5 + 1] || i", "uuid": "md5(i::text)::uuid"}
COUNT = 60
SETTINGS = {"shardmap.move_batch_rows": "60", "shardmap.fence_timeout": "5s"}


class Fleet:
    """Shards 0, 1, .. of a keyspace; the tables; what is known of their rows."""

    def __init__(self, tenants, name, tables, shards=3, **options):
        self.tenants, self.name, self.size = tenants, name, 0
        self.tables = {f"{name}_{key}": key for key in tables}
        arguments = "".join(f", {option} => '{value}'" for option, value in options.items())
        with self.connect() as conn:
            conn.execute(f"SELECT shardmap.create_keyspace('{name}'{arguments})")
            for _ in range(shards):
                self.add_shard(conn)

    def connect(self, **settings):
        conn = self.tenants.connect(client_min_messages="warning", **settings)
        for name, value in SETTINGS.items():
            conn.execute(f"SET {name} = '{value}'")
        return conn

    def add_shard(self, conn):
        server = self.tenants.cluster.shard_server(self.size % 3)
        database = f"{self.name}_{self.size}"
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as there:
            there.execute(f"CREATE DATABASE {database}")
        state = conn.execute("SELECT shardmap.add_shard(%s, host => '127.0.0.1', port => %s, dbname => %s, keyspace => %s)",
                             (f"{self.name}-{self.size}", server.port, database, self.name)).fetchone()[0]
        self.size += 1
        return state

    def on_shard(self, number, sql):
        with psycopg.connect(self.tenants.cluster.shard_server(number % 3).dsn(f"{self.name}_{number}"), autocommit=True) as conn:
            return conn.execute(sql).fetchall()

    def fill(self, conn, collation=""):
        for table, key in self.tables.items():
            kind = f"text {collation}" if key == "text" else key
            conn.execute(f"CREATE TABLE {table} (k {kind}, id int, n bigint NOT NULL DEFAULT 0, note text, PRIMARY KEY (id, k))")
            conn.execute(f"SELECT shardmap.distribute_table('{table}', 'k', '{self.name}')")
            conn.execute(f"INSERT INTO {table} SELECT {KEYS[key]}, j, 0, 'note ' || i FROM generate_series(1, {COUNT}) i, generate_series(1, 4) j")

    def check(self, conn):
        """Every row is where its owner is, and nothing is left of the moves."""
        for table in self.tables:
            found = conn.execute(f"SELECT shard, finding, detail FROM shardmap.verify('{table}') WHERE finding <> 'clean'").fetchall()
            assert found == [], found
            assert conn.execute(f"SELECT count(*), count(DISTINCT (k, id)) FROM {table}").fetchone() == (COUNT * 4, COUNT * 4)
        assert conn.execute("SELECT count(*) FROM shardmap.hidden_rows h JOIN shardmap.moves m ON m.id = h.move WHERE m.keyspace = %s",
                            (self.name,)).fetchone() == (0,)
        for number in range(self.size):
            assert self.on_shard(number, "SELECT nspname FROM pg_namespace WHERE nspname ~ '^shardmap_move'") == []


class Load:
    """Writers that count up, and readers to whom counts and sums must never waver."""

    def __init__(self, fleet):
        self.fleet, self.over, self.failures, self.rounds = fleet, threading.Event(), [], {}
        self.added = {table: {} for table in fleet.tables}
        self.lock = threading.Lock()
        works = [lambda: self.write(1), lambda: self.write(2)] + [lambda table=table: self.read(table) for table in fleet.tables]
        self.threads = [threading.Thread(target=self.guard, args=(work,)) for work in works]

    def guard(self, work):
        try:
            work()
        except Exception as error:  # pylint: disable=broad-except
            self.failures.append(error)

    def write(self, seed):
        pick = random.Random(seed)
        with self.fleet.connect() as conn:
            keys = {table: [row[0] for row in conn.execute(f"SELECT DISTINCT k FROM {table}")] for table in self.fleet.tables}
            while not self.over.wait(0.01):
                table = pick.choice(list(keys))
                key, number = pick.choice(keys[table]), pick.randint(1, 4)
                done = conn.execute(f"UPDATE {table} SET n = n + 1 WHERE k = %s AND id = %s", (key, number)).rowcount
                assert done == 1, (table, key, number, done)
                with self.lock:
                    self.added[table][key, number] = self.added[table].get((key, number), 0) + 1

    def read(self, table):
        sql = f"SELECT count(*), sum(id), sum(hashtextextended(k::text || id || note, 0)::numeric), count(DISTINCT k) FROM {table}"
        with self.fleet.connect() as conn:
            want = conn.execute(sql).fetchall()
            while not self.over.wait(0.02):
                got = conn.execute(sql).fetchall()
                assert got == want, f"{table}: {got} instead of {want}"
                self.rounds[table] = self.rounds.get(table, 0) + 1

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind, *_):
        self.over.set()
        for thread in self.threads:
            thread.join()
        if kind is None:
            assert self.failures == []

    def check(self, conn):
        assert set(self.rounds) == set(self.fleet.tables) and any(self.added.values())
        for table in self.fleet.tables:
            stored = {(k, number): n for k, number, n in conn.execute(f"SELECT k, id, n FROM {table} WHERE n <> 0")}
            assert stored == self.added[table], table

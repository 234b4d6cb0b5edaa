"""What a test asks of a coordinator, and which shards were asked for the answer.

A `Database` is one coordinator database with shard databases of its own. Its shards write every statement that reaches
them into their server's log; `asked` reads there which shards a call reached, and with what SQL. `check` runs a statement
in every way that matters (`WAYS`: literals or parameters, in text or binary, prepared or not, custom or generic plan,
with routing and without) and compares the answer and the shards asked each time. Next: conftest.py.
"""

from dataclasses import dataclass

import psycopg
from shardlog import ShardLog


@dataclass(frozen=True)
class Way:
    """One way of running a statement."""

    name: str
    settings: tuple = ()
    literals: bool = False
    prepare: bool = False
    binary: bool = False
    routing: bool = True

    def run(self, conn, sql, params):
        if self.literals:
            return psycopg.ClientCursor(conn).execute(sql, params)
        return conn.execute(sql, params, prepare=self.prepare, binary=self.binary)


def ways():
    custom, generic = (("plan_cache_mode", f"force_{kind}_plan") for kind in ("custom", "generic"))
    for routing in (True, False):
        suffix = "" if routing else ", routing off"
        common = () if routing else (("shardmap.enable_routing", "off"),)
        for name, setting, options in (
                ("literals", None, {"literals": True}), ("parameters", None, {}),
                ("prepared, custom", custom, {"prepare": True}), ("prepared, generic", generic, {"prepare": True}),
                ("prepared, binary, generic", generic, {"prepare": True, "binary": True})):
            settings = common + ((setting,) if setting else ())
            yield Way(name + suffix, settings, routing=routing, **options)


WAYS = tuple(ways())


class Database:
    """A coordinator database and its shards, numbered from 0."""

    def __init__(self, cluster, name):
        self.cluster, self.name = cluster, name
        self.users = []
        self._log = ShardLog(cluster, name)
        self._ways = {}
        self._owners = {}

    def connect(self, user="postgres", dbname=None, **settings):
        """A session; fan-outs are allowed unless `settings` (shardmap__fanout_policy="error") say otherwise."""
        settings = {"shardmap__fanout_policy": "allow", **settings}
        options = " ".join(f"-c {name.replace('__', '.')}={value}" for name, value in settings.items() if value)
        return psycopg.connect(self.cluster.dsn(dbname or self.name, user), autocommit=True, options=options)

    def psql(self, sql, user="postgres"):
        return self.cluster.psql(sql, self.name, user)

    def add_user(self, name):
        """An ordinary user who may reach the shards, where he is the superuser postgres."""
        self.users.append(name)
        self.psql(f"CREATE ROLE {name} LOGIN;" + "".join(
            f"CREATE USER MAPPING FOR {name} SERVER \"shard-{number}\""
            " OPTIONS (user 'postgres', password_required 'false');" for number in range(self.cluster.shards)))

    def shard(self, number):
        """A session on the shard itself."""
        return psycopg.connect(self.cluster.shard_dsn(number, self.name), autocommit=True)

    def shard_rows(self, sql):
        """What each shard answers by itself: number of the shard, rows."""
        found = {}
        for number in range(self.cluster.shards):
            with self.shard(number) as conn:
                found[number] = conn.execute(sql).fetchall()
        return found

    def owner(self, key, key_type="text"):
        """Number of the shard that owns the key."""
        if (key, key_type) not in self._owners:
            with self.connect() as conn:
                name = conn.execute(f"SELECT shard_for(%s::{key_type})", (str(key),)).fetchone()[0]
            self._owners[key, key_type] = int(name.removeprefix("shard-"))
        return self._owners[key, key_type]

    def owners(self, *keys, key_type="text"):
        return {self.owner(key, key_type) for key in keys}

    def apart(self, count=2, key_type="text", candidates=range(1, 60)):
        """Keys of `count` different shards, as text."""
        found = {}
        for key in candidates:
            found.setdefault(self.owner(str(key), key_type), str(key))
            if len(found) == count:
                return list(found.values())
        raise AssertionError(f"no {count} keys on different shards")

    def asked(self, call):
        """The result of `call()`, and the statements that each shard of this database got meanwhile: {number: [sql]}."""
        return self._log.asked(call)

    def way(self, way):
        """The session in which statements are run in that way."""
        if way not in self._ways:
            self._ways[way] = self.connect(**{name.replace(".", "__"): value for name, value in way.settings})
        return self._ways[way]

    def check(self, sql, params=None, rows=None, shards=None, native=True, plan=None):
        """Runs the statement in every way: it yields `rows` and asks `shards` (numbers; None: not looked at).

        `native` False: without routing more shards may be asked. `plan` "custom" or "generic": the shards are looked at
        for such plans only, the answer always.
        """
        for way in WAYS:
            cursor, found = self.asked(lambda: way.run(self.way(way), sql, params))
            if rows is not None:
                assert sorted(cursor.fetchall(), key=repr) == sorted(rows, key=repr), f"{way.name}: {sql} {params}"
            looked_at = plan is None or (plan == "generic") == ("generic" in way.name)
            if shards is not None and looked_at and (native or way.routing):
                assert set(found) == set(shards), f"{way.name}: {sql} {params} sent {found}"

    def close(self):
        for conn in self._ways.values():
            conn.close()

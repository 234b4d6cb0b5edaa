#!/usr/bin/env python3
"""A whole cluster on this machine: a coordinator, its shards and their streaming replicas.

As a program it is behind `make cluster` and `make cluster-down`. As a module it serves the tests:

    with Cluster(shards=4) as cluster:
        cluster.psql("SELECT shard_for('k')")
        cluster.shard_server(2).kill()

Layouts: `databases` puts all shards into databases of one second server, `servers` gives each shard a server. The
library is preloaded in the coordinator alone; nothing is installed on a shard. The folder holds cluster.json (what the
cluster is), env (to be sourced by a shell) and a folder for each server. A cluster is complete or is made anew: the
"ready" of cluster.json is written last. Next: server.py.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

from server import TOOLS, Server, ServerError, as_run_user, free_port, give_to_run_user

SOCKET_PATH_LIMIT = 80  # of 107 bytes, the rest is for .s.PGSQL.12345.lock


class Cluster:
    """Servers of one cluster. `directory` None means a new temporary folder, deleted by `destroy`."""

    def __init__(self, directory=None, pg=None, shards=4, replicas=0, layout="databases", extension=True,
                 coordinator_settings=None, shard_settings=None):
        if layout not in ("databases", "servers"):
            raise ServerError(f"LAYOUT={layout} is neither databases nor servers")
        self.pg = int(pg or os.environ.get("PG") or 16)
        self.shards, self.replicas, self.layout, self.extension = int(shards), int(replicas), layout, extension
        self.database = "app"
        self.directory = pathlib.Path(directory or tempfile.mkdtemp(prefix="shardmap-", dir="/tmp")).resolve()
        self.temporary = directory is None
        self._make_folders()
        preload = {"shared_preload_libraries": "pg_shardmap"} if extension else {}
        self.coordinator = self._server("coordinator", {**preload, **(coordinator_settings or {})})
        names = ["shards"] if layout == "databases" else [f"shard-{i}" for i in range(self.shards)]
        self.shard_servers = [self._server(name, shard_settings) for name in names]
        self.replica_servers = [
            [self._server(f"{primary.name}-replica-{r}", shard_settings, primary) for r in range(self.replicas)]
            for primary in self.shard_servers]

    def _make_folders(self):
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o755)
        reach = subprocess.run(["test", "-x", str(self.directory)], check=False, **as_run_user())
        if reach.returncode:
            raise ServerError(f"the servers' user cannot reach {self.directory}; choose another DIR, /tmp/cluster say")
        self.sockets = self.directory / "sockets"
        if len(str(self.sockets)) > SOCKET_PATH_LIMIT:
            self.sockets = pathlib.Path(tempfile.mkdtemp(prefix="shardmap-", dir="/tmp"))
        self.sockets.mkdir(exist_ok=True)
        give_to_run_user(self.sockets)

    def _server(self, name, settings, primary=None):
        settings = {"cluster_name": name, **(settings or {})}
        return Server(name, self.directory / name, self.pg, free_port(), self.sockets, settings, primary)

    def servers(self):
        """All servers: the coordinator, the shards' primaries, their replicas."""
        return [self.coordinator, *self.shard_servers, *self.replicas_of_all()]

    def replicas_of_all(self):
        return [replica for group in self.replica_servers for replica in group]

    def shard_server(self, shard):
        return self.shard_servers[0 if self.layout == "databases" else shard]

    def replica_server(self, shard, replica=0):
        return self.replica_servers[0 if self.layout == "databases" else shard][replica]

    def dsn(self, dbname=None, user="postgres"):
        return self.coordinator.dsn(dbname or self.database, user)

    def shard_database(self, shard, database=None):
        return f"shard_{shard}" if database in (None, self.database) else f"{database}_shard_{shard}"

    def shard_dsn(self, shard, database=None, user="postgres"):
        return self.shard_server(shard).dsn(self.shard_database(shard, database), user)

    def replica_dsn(self, shard, replica=0, database=None, user="postgres"):
        return self.replica_server(shard, replica).dsn(self.shard_database(shard, database), user)

    def psql(self, sql, dbname=None, user="postgres"):
        return self.coordinator.psql(sql, dbname or self.database, user)

    def shard_psql(self, shard, sql, database=None, user="postgres"):
        return self.shard_server(shard).psql(sql, self.shard_database(shard, database), user)

    def start(self):
        """Makes the cluster if it is new, and starts every server that does not run."""
        if self._state().get("ready"):
            self._parallel(Server.start, [self.coordinator, *self.shard_servers])
            self._parallel(Server.start, self.replicas_of_all())
            return self
        self._write_state(ready=False)
        self._parallel(self._create, [self.coordinator, *self.shard_servers])
        self.new_database(self.database)
        self._parallel(self._create, self.replicas_of_all())
        self.register_replicas()
        self._write_env()
        self._write_state(ready=True)
        return self

    def _create(self, server):
        server.create()
        for attempt in range(5):
            try:
                server.start()
                return
            except ServerError as error:
                if "could not bind" not in str(error) or attempt == 4:
                    raise
                server.port = free_port()  # somebody took the port in the meantime
                server.configure()

    def new_database(self, name, options="", shards=None, strategy=None):
        """An empty coordinator database with empty shard databases of its own, registered as shard-0, shard-1, ...

        `options`: of CREATE DATABASE, for all of them. There are as many as the cluster has shards, or `shards`; they are
        in keyspace main, or in a keyspace of that `strategy`, which is its name as well.
        """
        count, by_server = self.shards if shards is None else shards, {}
        for shard in range(count):
            by_server.setdefault(self.shard_server(shard), []).append(self.shard_database(shard, name))
        by_server.setdefault(self.coordinator, []).append(name)
        self._parallel(lambda item: item[0].psql("".join(f'CREATE DATABASE "{each}" {options};\n' for each in item[1])),
                       by_server.items())
        if self.extension:
            keyspace = f"SELECT shardmap.create_keyspace('{strategy}', strategy => '{strategy}');\n" if strategy else ""
            self.psql("CREATE EXTENSION pg_shardmap CASCADE;\n" + keyspace + "".join(
                f"SELECT shardmap.add_shard('shard-{shard}', host => '127.0.0.1', port => {self.shard_server(shard).port}, "
                f"dbname => '{self.shard_database(shard, name)}', keyspace => '{strategy or 'main'}');\n"
                for shard in range(count)), name)
        return self.dsn(name)

    def replica_name(self, shard, replica=0):
        """The name under which a replica is registered."""
        return f"shard-{shard}-replica-{replica}"

    def register_replicas(self, name=None):
        """Makes the replicas of every shard known to the coordinator database."""
        if not self.extension or not self.replicas:
            return
        self.wait_for_replicas()
        self.psql("".join(
            f"SELECT shardmap.add_replica('shard-{shard}', '{self.replica_name(shard, replica)}', host => '127.0.0.1', "
            f"port => {self.replica_server(shard, replica).port});\n"
            for shard in range(self.shards) for replica in range(self.replicas)), name)

    def drop_database(self, name, shards=None):
        self.coordinator.psql(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        for shard in range(self.shards if shards is None else shards):
            database = self.shard_database(shard, name)
            self.shard_server(shard).psql(f'DROP DATABASE IF EXISTS "{database}" WITH (FORCE)')

    def wait_for_replicas(self, timeout=60):
        """Waits until every replica has applied what its primary had written when this was called."""
        for group, primary in zip(self.replica_servers, self.shard_servers):
            wanted = primary.psql("SELECT pg_current_wal_lsn()") if group else None
            for replica in group:
                deadline = time.monotonic() + timeout
                while replica.psql(f"SELECT pg_last_wal_replay_lsn() >= '{wanted}'") != "t":
                    if time.monotonic() > deadline:
                        raise ServerError(f"{replica.name} lags after {timeout} s:\n{replica.log_tail()}")
                    time.sleep(0.05)

    def stop(self, mode="fast"):
        self._parallel(lambda server: server.stop(mode), self.servers())

    def destroy(self):
        """Stops all servers and deletes their folders."""
        self._parallel(Server.remove, self.servers())
        shutil.rmtree(self.sockets, ignore_errors=True)
        for file in ("env", "cluster.json"):
            (self.directory / file).unlink(missing_ok=True)
        if self.temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self):
        try:
            return self.start()
        except BaseException:
            self.destroy()
            raise

    def __exit__(self, *_):
        self.destroy()

    @staticmethod
    def _parallel(function, items):
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(function, list(items)))

    def shape(self):
        return {"pg": self.pg, "shards": self.shards, "replicas": self.replicas, "layout": self.layout,
                "extension": self.extension}

    def _state(self):
        return read_state(self.directory)

    def _write_state(self, ready):
        state = {"ready": ready, "shape": self.shape(), "sockets": str(self.sockets),
                 "servers": {server.name: {"port": server.port, "settings": server.settings}
                             for server in self.servers()}}
        part = self.directory / "cluster.json.part"
        part.write_text(json.dumps(state, indent=2) + "\n")
        part.rename(self.directory / "cluster.json")

    @classmethod
    def attach(cls, directory):
        """The cluster that an earlier run made in `directory`, with its ports."""
        state = read_state(directory)
        if not state:
            raise ServerError(f"there is no cluster in {directory}")
        cluster = cls(directory, **state["shape"])
        cluster.sockets = pathlib.Path(state["sockets"])
        for server in cluster.servers():
            known = state["servers"][server.name]
            server.port, server.settings, server.sockets = known["port"], known["settings"], state["sockets"]
        return cluster

    def _write_env(self):
        values = {"PGHOST": "127.0.0.1", "PGPORT": self.coordinator.port, "PGUSER": "postgres",
                  "PGDATABASE": self.database, "SHARDS": self.shards}
        for shard in range(self.shards):
            values[f"SHARD_{shard}_DSN"] = self.shard_dsn(shard)
            for replica in range(self.replicas):
                values[f"SHARD_{shard}_REPLICA_{replica}_DSN"] = self.replica_dsn(shard, replica)
        lines = [f"export {name}={shlex.quote(str(value))}\n" for name, value in values.items()]
        lines.append(f"export PATH={shlex.quote(str(TOOLS / f'pg{self.pg}' / 'bin'))}:$PATH\n")
        (self.directory / "env").write_text("".join(lines))


def read_state(directory):
    try:
        return json.loads((pathlib.Path(directory) / "cluster.json").read_text())
    except OSError:
        return {}


def up(args):
    begin = time.monotonic()
    directory = pathlib.Path(args.dir).resolve()
    state = read_state(directory)
    wanted = {"pg": args.pg, "shards": args.shards, "replicas": args.replicas, "layout": args.layout,
              "extension": not args.no_extension}
    if state.get("ready"):
        if state["shape"] != wanted:
            raise ServerError(f"{args.dir} holds another cluster: {state['shape']}.\n"
                              f"Give another DIR, or remove it: scripts/cluster.py destroy --dir {args.dir}")
        print(f"==> starting the cluster that is in {args.dir} (its data is kept)", flush=True)
        cluster = Cluster.attach(directory).start()
    else:
        if state:
            print(f"    {args.dir} holds a cluster that was not finished; making it anew", flush=True)
            Cluster.attach(directory).destroy()
        print(f"==> starting a coordinator and {args.shards} shards in {args.dir} (usually 3 to 15 s)", flush=True)
        cluster = Cluster(directory, **wanted).start()
    print(f"    up in {time.monotonic() - begin:.1f} s; coordinator on port {cluster.coordinator.port}")
    print(f"    use it:   . {args.dir}/env; psql")
    print(f"    stop it:  make cluster-down DIR={args.dir}")


def down(args):
    cluster = Cluster.attach(args.dir)
    running = [server.name for server in cluster.servers() if server.pid()]
    cluster.stop()
    print(f"==> stopped in {args.dir}: {', '.join(running) or 'nothing, no server of it ran'}")


def destroy(args):
    Cluster.attach(args.dir).destroy()
    print(f"==> removed the cluster in {args.dir}")


def main():
    parser = argparse.ArgumentParser(description="Clusters on this machine.")
    commands = parser.add_subparsers(required=True)
    for name, function in (("up", up), ("down", down), ("destroy", destroy)):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("--dir", default=str(TOOLS / "cluster"))
        if function is up:
            command.add_argument("--pg", type=int, default=16)
            command.add_argument("--shards", type=int, default=8)
            command.add_argument("--replicas", type=int, default=0)
            command.add_argument("--layout", choices=("databases", "servers"), default="databases")
            command.add_argument("--no-extension", action="store_true")
    args = parser.parse_args()
    try:
        args.function(args)
    except ServerError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

"""A real PgBouncer for tests and benchmarks, where scripts/peers.sh could get one."""

import contextlib
import subprocess
import time

import psycopg
from server import ROOT, TOOLS, as_run_user, free_port, give_to_run_user

PROGRAM = TOOLS / "peers" / "bin" / "pgbouncer"
INI = """
[databases]
{databases}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
logfile = {folder}/log
{settings}
"""


def is_there():
    return PROGRAM.exists()


def fetch():
    """Gets it if it is not there; whether it is then."""
    if not is_there():
        subprocess.run([str(ROOT / "scripts" / "peers.sh"), "pgbouncer"], check=False)
    return is_there()


@contextlib.contextmanager
def pgbouncer(folder, databases, dbname, user="postgres", **settings):
    """Its port, while it runs: lines of `databases` as its [databases] wants them, one of which is `dbname`."""
    port = free_port()
    folder.mkdir(exist_ok=True)
    give_to_run_user(folder)
    lines = {"databases": "\n".join(databases), "settings": "\n".join(f"{name} = {value}" for name, value in settings.items())}
    (folder / "ini").write_text(INI.format(port=port, folder=folder, **lines))
    process = subprocess.Popen([str(PROGRAM), "--quiet", str(folder / "ini")], stderr=subprocess.DEVNULL, **as_run_user())
    try:
        wait_for(f"host=127.0.0.1 port={port} dbname={dbname} user={user}", process)
        yield port
    finally:
        process.terminate()
        process.wait()


def wait_for(dsn, process):
    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(dsn).close()
            return
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)

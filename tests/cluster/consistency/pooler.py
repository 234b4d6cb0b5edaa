"""A real PgBouncer in transaction mode in front of the coordinator, where scripts/peers.sh could get one."""

import contextlib
import subprocess
import time

import psycopg
from server import TOOLS, as_run_user, free_port, give_to_run_user

PROGRAM = TOOLS / "peers" / "bin" / "pgbouncer"
SETTINGS = """
[databases]
app = host=127.0.0.1 port={target} dbname=app user=postgres pool_size={size}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
server_reset_query_always = 0
ignore_startup_parameters = options,extra_float_digits
logfile = {folder}/log
"""


def is_there():
    return PROGRAM.exists()


@contextlib.contextmanager
def pgbouncer(cluster, size=3):
    """Its connection string, while it runs. Its sessions with the coordinator are `size`, whoever comes."""
    folder, port = cluster.directory / "pgbouncer", free_port()
    folder.mkdir(exist_ok=True)
    give_to_run_user(folder)
    (folder / "ini").write_text(SETTINGS.format(target=cluster.coordinator.port, port=port, folder=folder, size=size))
    process = subprocess.Popen([str(PROGRAM), "--quiet", str(folder / "ini")], stderr=subprocess.DEVNULL, **as_run_user())
    try:
        dsn = f"host=127.0.0.1 port={port} dbname=app user=postgres"
        wait_for(dsn, process)
        yield dsn
    finally:
        process.terminate()
        process.wait()


def wait_for(dsn, process):
    deadline = time.monotonic() + 10
    while True:
        try:
            psycopg.connect(dsn).close()
            return
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)

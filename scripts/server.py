"""One Postgres server of ours: made from the version's template, started, stopped, killed, asked.

Always true: a server has a data folder, a port of 127.0.0.1 and a socket folder of its own, and is signalled only by
the pid of the postmaster whose working directory is that data folder. Root runs it as the user shardmap, since
Postgres refuses root; anyone else runs it as himself. Next: cluster.py.
"""

import os
import pathlib
import pwd
import random
import shutil
import signal
import socket
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = (ROOT / ".tools").resolve()  # may be a link to a folder that the servers' user can reach
RUN_USER = "shardmap" if os.geteuid() == 0 else None

# Fast and small: these servers are thrown away. fsync off does not weaken a test that kills a server, only one that
# kills the machine.
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_connections": "200",
    "max_prepared_transactions": "64",
    "max_wal_senders": "10",
    "wal_keep_size": "256MB",
    "log_line_prefix": "%m [%p] %q%a %d ",
    "lc_messages": "C",
}


# States of a process that does not run any more, though its parent may not have noticed.
ENDED = ("", "Z", "X")


class ServerError(Exception):
    """A server could not be made, started or asked; the message says why and where its log is."""


def as_run_user():
    """Arguments for subprocess that make a child run as the servers' user."""
    if RUN_USER is None:
        return {}
    user = pwd.getpwnam(RUN_USER)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def give_to_run_user(path):
    if RUN_USER is not None:
        user = pwd.getpwnam(RUN_USER)
        os.chown(path, user.pw_uid, user.pw_gid)


_given_out = set()


def free_port():
    """A free port of 127.0.0.1, below the range that outgoing connections use, so that a restart finds it free.

    No port is given out twice: its server may be stopped at the moment.
    """
    for _ in range(200):
        port = random.SystemRandom().randrange(20000, 32000)
        if port in _given_out:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                _given_out.add(port)
                return port
            except OSError:
                continue
    raise ServerError("no free port between 20000 and 32000 on 127.0.0.1")


class Server:
    """`home` holds data/ and log; `port` stays the same for the server's life."""

    def __init__(self, name, home, pg, port, sockets, settings=None, primary=None):
        self.name, self.home, self.pg, self.port = name, pathlib.Path(home), int(pg), int(port)
        self.sockets, self.settings, self.primary = str(sockets), dict(settings or {}), primary
        self.data, self.log = self.home / "data", self.home / "log"
        self.bin = TOOLS / f"pg{self.pg}" / "bin"

    def dsn(self, dbname="postgres", user="postgres"):
        """A libpq connection string."""
        return f"host=127.0.0.1 port={self.port} dbname={dbname} user={user}"

    def pid(self):
        """The postmaster's pid, or None if this server does not run. A pid that is another process' by now is None."""
        try:
            pid = int((self.data / "postmaster.pid").read_text().split("\n")[0])
            return pid if os.path.samefile(f"/proc/{pid}/cwd", self.data) else None
        except (OSError, ValueError):
            return None

    def create(self, fresh=False):
        """Copies the version's template, or the running primary, into the data folder and configures it.

        All copies of the template have one system identifier; `fresh` makes a server with its own.
        """
        self.home.mkdir(parents=True, exist_ok=True)
        give_to_run_user(self.home)
        if fresh:
            self._run(str(self.bin / "initdb"), "-D", str(self.data), "--username", "postgres", "--auth", "trust",
                      "--encoding", "UTF8", "--locale", "C.UTF-8", "--no-sync", "--no-instructions")
        elif self.primary is None:
            template = TOOLS / f"pg{self.pg}" / "data"
            if not template.exists():
                raise ServerError(f"there is no {template}; run: make postgres PG={self.pg}")
            self._run("cp", "-a", "--reflink=auto", str(template), str(self.data))
        else:
            self._run(str(self.bin / "pg_basebackup"), "-D", str(self.data), "-d", self.primary.dsn(), "-R",
                      "--checkpoint=fast", "--no-sync")
        self.configure()

    def configure(self, **changes):
        """Writes the settings, with `changes` (None removes one); they hold from the next start or reload."""
        for name, value in changes.items():
            self.settings[name] = value
            if value is None:
                del self.settings[name]
        own = {"port": self.port, "unix_socket_directories": self.sockets}
        lines = [f"{name} = '{str(value).replace(chr(39), chr(39) * 2)}'\n"
                 for name, value in {**SETTINGS, **self.settings, **own}.items()]
        conf = self.data / "postgresql.conf"
        text = conf.read_text().split("# pg_shardmap\n")[0]
        conf.write_text(text + "# pg_shardmap\n" + "".join(lines))

    def start(self, timeout=60):
        """Starts the server and waits until it accepts connections. Does nothing if it runs."""
        if self.pid() is None:
            with open(self.log, "ab") as log:
                process = subprocess.Popen([str(self.bin / "postgres"), "-D", str(self.data)], stdin=subprocess.DEVNULL,
                                           stdout=log, stderr=log, cwd=self.home, start_new_session=True,
                                           **as_run_user())
        else:
            process = None
        deadline = time.monotonic() + timeout
        while not self._accepts():
            if process is not None and process.poll() is not None:
                raise ServerError(f"{self.name} did not start:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} does not accept connections after {timeout} s:\n{self.log_tail()}")
            time.sleep(0.05)
        return self

    def _accepts(self):
        try:
            status = (self.data / "postmaster.pid").read_text().split("\n")
        except OSError:
            return False
        return len(status) > 7 and status[7].strip() in ("ready", "standby") and self.pid() is not None

    def stop(self, mode="fast", timeout=60):
        """Stops the server: mode fast (sessions are ended) or immediate (as in a crash). Does nothing if it is down."""
        self._signal({"fast": signal.SIGINT, "immediate": signal.SIGQUIT, "smart": signal.SIGTERM}[mode], timeout)

    def kill(self):
        """Kills the server and its sessions with SIGKILL, as the loss of its machine would."""
        pid = self.pid()
        if pid is None:
            return
        _freeze(pid)  # so that it starts nothing more while its children are killed
        sessions = children(pid)
        for child in sessions:
            _send(child, signal.SIGKILL)
        self._signal(signal.SIGKILL, 60)
        for child in sessions:
            self._await_end(child, 60)  # until then its shared memory is in use, and no server starts on the folder
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def restart(self, mode="fast"):
        self.stop(mode)
        return self.start()

    def pause(self):
        """Freezes the server and its sessions: to the others it is as if the network were gone."""
        pid = self.pid()
        _freeze(pid)
        for child in children(pid):
            _freeze(child)

    def resume(self):
        pid = self.pid()
        for each in [*children(pid), pid]:
            _send(each, signal.SIGCONT)

    def _signal(self, number, timeout):
        pid = self.pid()
        if pid is None:
            return
        os.kill(pid, number)
        self._await_end(pid, timeout)

    def _await_end(self, pid, timeout):
        deadline = time.monotonic() + timeout
        while _state(pid) not in ENDED:
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} (pid {pid}) does not end after {timeout} s:\n{self.log_tail()}")
            time.sleep(0.02)

    def reload(self, **changes):
        """Changes settings of the running server (None resets one), and waits until all new sessions have them."""
        for name, value in changes.items():
            self.psql(f"ALTER SYSTEM RESET {name}" if value is None else f"ALTER SYSTEM SET {name} = '{value}'")
        began = self.psql("SELECT clock_timestamp()")
        self.psql("SELECT pg_reload_conf()")
        deadline = time.monotonic() + 60
        while self.psql(f"SELECT pg_conf_load_time() > '{began}'") != "t":
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} does not reload its settings after 60 s:\n{self.log_tail()}")
            time.sleep(0.02)

    def psql(self, sql, dbname="postgres", user="postgres"):
        """Runs SQL with psql and returns its unaligned output; ServerError with psql's message if it fails."""
        done = subprocess.run([str(self.bin / "psql"), "-XAtq", "-v", "ON_ERROR_STOP=1", self.dsn(dbname, user)],
                              input=sql, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerError(f"{self.name}: {done.stderr.strip()}\nin: {sql}")
        return done.stdout.rstrip("\n")

    def log_tail(self, lines=15):
        try:
            return "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-lines:]) + f"({self.log})"
        except OSError:
            return "(no log)"

    def remove(self):
        """Kills the server and deletes its folder."""
        self.stop("immediate")
        shutil.rmtree(self.home, ignore_errors=True)

    def _run(self, *command):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.home, **as_run_user())
        if done.returncode:
            raise ServerError(f"{self.name}: {' '.join(command)}\n{done.stderr.strip()}")


def children(pid):
    """The pids of a process' direct children; a postmaster's are all its sessions and workers."""
    try:
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _state(pid):
    """The process' state as the kernel names it, "" if there is none."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def _freeze(pid):
    """Stops the process, and waits until it stands still: it may be in the middle of starting another."""
    _send(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while _state(pid) not in (*ENDED, "T", "t"):
        if time.monotonic() > deadline:
            raise ServerError(f"process {pid} cannot be stopped")
        time.sleep(0.001)


def _send(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass

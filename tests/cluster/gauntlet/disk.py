"""A disk that is full: a small file system of its own (tmpfs), in which a shard keeps a table. Only root may mount one."""

import contextlib
import os
import subprocess
import tempfile

from server import give_to_run_user

SIZE = 8 << 20
ROOM = 600 << 10  # that is left when it is full: what is there can still be changed


class Disk:
    """A tablespace "small" of all servers, one folder each on one file system."""

    def __init__(self, folder):
        self.folder = folder
        self.filler = os.path.join(folder, "filler")

    @staticmethod
    def move_in(table):
        """SQL, for the shard that shall keep the table there."""
        return f"ALTER TABLE {table} SET TABLESPACE small; ALTER INDEX {table}_pkey SET TABLESPACE small"

    def fill(self):
        free = os.statvfs(self.folder)
        with open(self.filler, "wb") as file:
            file.write(bytes(max(0, free.f_bavail * free.f_frsize - ROOM)))

    def make_room(self):
        os.unlink(self.filler)


@contextlib.contextmanager
def small_disk(arena):
    folder = arena.cluster.directory / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], check=True)
    try:
        give_to_run_user(folder)
        for server in arena.cluster.shard_servers:
            place = folder / server.name
            place.mkdir()
            give_to_run_user(place)
            server.psql(f"CREATE TABLESPACE small LOCATION '{place}'")
        yield Disk(str(folder))
        for server in arena.cluster.shard_servers:
            server.psql("DROP TABLESPACE small")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def has_small_disks():
    """None if a file system can be mounted here, else why not."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            subprocess.run(["umount", folder], check=True)
    return done.stderr.strip() or None if done.returncode else None

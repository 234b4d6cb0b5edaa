"""A table is distributed, or taken back, while others write: no row is lost, doubled, or left behind."""

import threading

import psycopg
import pytest
from patience import wait_until

SETUP = """
    CREATE TABLE busy (id bigint PRIMARY KEY, v text);
    CREATE SEQUENCE ids;
    CREATE TABLE one (k int PRIMARY KEY, v int);
    INSERT INTO one SELECT k, 0 FROM generate_series(1, 20) k;
"""


class Writer(threading.Thread):
    """Inserts rows one by one, each committed by itself, until it is told to stop."""

    def __init__(self, db, prepare):
        super().__init__()
        self.conn, self.prepare = db.connect(), prepare
        self.done, self.failed, self.stopped = [], None, threading.Event()

    def run(self):
        try:
            while not self.stopped.is_set():
                sql = "INSERT INTO busy VALUES (nextval('ids'), %s) RETURNING id"
                self.done.append(self.conn.execute(sql, ("x",), prepare=self.prepare).fetchone()[0])
        except psycopg.Error as error:
            self.failed = error


@pytest.mark.parametrize("prepare", [False, True])
def test_writers_lose_nothing_while_a_table_is_distributed_and_brought_back(db, conn, prepare):
    conn.execute("TRUNCATE busy")
    writers = [Writer(db, prepare) for _ in range(3)]
    for writer in writers:
        writer.start()
    for step in ("distribute_table('busy', 'id')", "undistribute_table('busy')", "distribute_table('busy', 'id')"):
        seen = sum(len(writer.done) for writer in writers)
        wait_until(lambda: sum(len(writer.done) for writer in writers) >= seen + 50 or any(w.failed for w in writers))
        conn.execute(f"SELECT shardmap.{step}")
    for writer in writers:
        writer.stopped.set()
    for writer in writers:
        writer.join()
        assert writer.failed is None
    written = sorted(row for writer in writers for row in writer.done)
    assert [row for (row,) in conn.execute("SELECT id FROM busy ORDER BY id")] == written
    conn.execute("SELECT shardmap.undistribute_table('busy')")
    assert [row for (row,) in conn.execute("SELECT id FROM busy ORDER BY id")] == written


STEPS = ["distribute_table('one', 'k')", "undistribute_table('one')"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_it_waits_for_a_writer(sessions, conn, step, end):
    conn.execute("SELECT shardmap.undistribute_table('one') WHERE EXISTS (SELECT FROM shardmap.tables"
                 " WHERE table_name = 'one'::regclass)")
    if step.startswith("un"):
        conn.execute(f"SELECT shardmap.{STEPS[0]}")
    conn.execute("DELETE FROM one WHERE k > 20; UPDATE one SET v = 0")
    writer, changer = sessions(), sessions()
    writer.run("BEGIN")
    writer.run("INSERT INTO one VALUES (21, 1); UPDATE one SET v = 5 WHERE k = 3; DELETE FROM one WHERE k = 4")
    changer.start(f"SELECT shardmap.{step}")
    writer.run(end)
    changer.end()
    wanted = {k: 0 for k in range(1, 21)}
    if end == "COMMIT":
        wanted |= {21: 1, 3: 5}
        del wanted[4]
    assert dict(writer.run("SELECT k, v FROM one")) == wanted
    conn.execute("INSERT INTO one VALUES (4, 0) ON CONFLICT DO NOTHING")


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_writer_waits_for_it(sessions, conn, end):
    conn.execute("SELECT shardmap.undistribute_table('one') WHERE EXISTS (SELECT FROM shardmap.tables"
                 " WHERE table_name = 'one'::regclass)")
    conn.execute("DELETE FROM one WHERE k > 20")
    writer, changer = sessions(), sessions()
    for step in STEPS:
        number = 30 + STEPS.index(step)
        changer.run("BEGIN")
        changer.run(f"SELECT shardmap.{step}")
        writer.start("INSERT INTO one VALUES (%s, 1) RETURNING k", (number,))
        changer.run(end)
        assert writer.end() == [(number,)]
        assert writer.run("SELECT count(*) FROM one WHERE k = %s", (number,)) == [(1,)]
        if end == "ROLLBACK":
            break  # it is no logical table then

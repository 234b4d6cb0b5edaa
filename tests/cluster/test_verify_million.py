"""One row corrupted, one missing and one doubled among a million: named, at one go, with as little memory as for a few.

What it takes is printed (pytest -s).
"""

import time

import pytest

ROWS = 1_000_000
SETUP = """
CREATE TABLE big (k int, id int, v text, n numeric, PRIMARY KEY (k, id));
SELECT shardmap.distribute_table('big', 'k');
"""
FILL = f"INSERT INTO big SELECT i / 4, i, 'row ' || i, nullif(i % 5, 0) FROM generate_series(1, {ROWS}) i"
FAULTS = """
ALTER TABLE big DROP CONSTRAINT big_pkey;
UPDATE big SET v = v || ' ' WHERE id = 123457;
DELETE FROM big WHERE id = 654321;
INSERT INTO big SELECT * FROM big WHERE id = 777777;
"""
SHARDS_SESSIONS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND starts_with(application_name, 'pg_shardmap ')"


def peak(pid):
    """Most private memory that a process had, in MB: its high water without what it shares now."""
    values = dict(line.split(":") for line in open(f"/proc/{pid}/status", encoding="ascii") if line.startswith(("VmHWM", "Rss")))
    kilobytes = {name: int(value.split()[0]) for name, value in values.items()}
    return (kilobytes["VmHWM"] - kilobytes["RssShmem"] - kilobytes["RssFile"]) / 1024


@pytest.mark.soak
def test_three_bad_rows_among_a_million(db, conn):
    for number in (0, 1):
        with db.shard(number) as shard:
            shard.execute(FILL)
    with db.shard(1) as shard:
        shard.execute(FAULTS)
    with conn.transaction():
        begin = time.monotonic()
        found = conn.execute("SELECT finding, key, row_id, source_rows, target_rows FROM shardmap._compare_shards('big', 'shard-0', 'shard-1')"
                             " WHERE finding <> 'bucket' ORDER BY row_id").fetchall()
        took = time.monotonic() - begin
        here = peak(conn.info.backend_pid)
        there = []
        for number in (0, 1):
            with db.shard(number) as shard:
                there += [peak(pid) for pid, in shard.execute(SHARDS_SESSIONS).fetchall()]
    assert sorted(found) == [("changed", str(123457 // 4), f"({123457 // 4},123457)", 1, 1),
                             ("doubled", str(777777 // 4), f"({777777 // 4},777777)", 1, 2),
                             ("missing", str(654321 // 4), f"({654321 // 4},654321)", 1, 0)]
    print(f"{took:.1f} s; private memory: here {here:.0f} MB, shards {', '.join(f'{each:.0f}' for each in there)} MB")
    # A million texts of these rows are 40 MB and more; sorting spills beyond 64 MB (work_mem there).
    assert len(there) == 2 and here < 60 and max(there) < 160

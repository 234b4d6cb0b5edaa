"""shardmap.copy_rows_to_shards(): each row of a local table to the shard that owns it."""

import pytest
from psycopg import errors
from remote_place import rows


@pytest.fixture
def source(place, conn):
    definition = ('(k text, n int, f float8, ts timestamptz, iv interval, b bytea, arr text[], "we ird""" text,'
                  " gen int GENERATED ALWAYS AS (n + 1) STORED)")
    conn.execute("DROP TABLE IF EXISTS public.source")
    conn.execute(f"CREATE TABLE public.source {definition}")
    for number in range(3):
        with place.shard(number) as shard:
            shard.execute(f"CREATE TABLE public.copied {definition}")
    yield "public.source"
    conn.execute("DROP TABLE public.source")


COLUMNS = ["k", "n", "f", "ts", "iv", "b", "arr", 'we ird"']


def copy(conn, key="k", columns=None):
    return dict(conn.execute("SELECT * FROM shardmap.copy_rows_to_shards('public.source', 'public', 'copied', %s,"
                             " 'main', %s)", (key, columns or COLUMNS)).fetchall())


def fill(conn, count):
    conn.execute("INSERT INTO public.source SELECT 'k' || i, i, i / 3.0, '2024-01-01 00:00Z'::timestamptz + i * interval"
                 " '1 hour', i * interval '1 minute', decode(md5(i::text), 'hex'), ARRAY[i::text, NULL, 'a,\"b'],"
                 " repeat('x', i %% 50) FROM generate_series(1, %s) AS i", (count,))


CHECKSUM = "SELECT md5(string_agg(x, '|' ORDER BY x COLLATE \"C\")) FROM (SELECT c::text AS x FROM {} AS c) AS s"


def all_rows(place):
    found = []
    for number in range(3):
        with place.shard(number) as shard:
            shard.execute("SET TimeZone = 'UTC'")
            found += [row for (row,) in shard.execute("SELECT c::text FROM public.copied AS c")]
    return sorted(found)


def test_copy_moves_every_value(place, conn, source):
    nasty = ["", "\\", "\\N", "\\.", "tab\there", "line\nfeed", "cr\rhere", "\b\f\v", "é\U0001f600", "'\"", None]
    for at, value in enumerate(nasty):
        conn.execute("INSERT INTO public.source (k, n, \"we ird\"\"\") VALUES (%s, %s, %s)", (f"k\t{at}\\", at, value))
    conn.execute("INSERT INTO public.source (k, f) VALUES ('nan', 'NaN'), ('inf', '-Infinity'), ('third', 1.0/3)")
    fill(conn, 3000)
    conn.execute("SET datestyle = 'German'; SET extra_float_digits = -3; SET intervalstyle = 'sql_standard';"
                 " SET bytea_output = 'escape'; SET TimeZone = 'Asia/Kolkata'")
    with conn.transaction():
        counts = copy(conn)
        assert all_rows(place) == []
    assert set(counts) == {"shard-0", "shard-1", "shard-2"} and sum(counts.values()) == 3000 + len(nasty) + 3
    conn.execute("RESET ALL; SET TimeZone = 'UTC'")
    assert all_rows(place) == sorted(row for (row,) in conn.execute("SELECT s::text FROM public.source AS s"))
    for number in range(3):
        with place.shard(number) as shard:
            found = [k for (k,) in shard.execute("SELECT k FROM public.copied")]
        owners = conn.execute("SELECT DISTINCT shardmap.owner_of(k, 'main') FROM unnest(%s::text[]) AS k", (found,))
        assert owners.fetchall() == [(f"shard-{number}",)]
    assert conn.execute("SHOW datestyle").fetchone()[0] == "ISO, MDY"


def test_copy_gives_the_sessions_settings_back(conn, source):
    conn.execute("SET datestyle = 'German'; SET row_security = on")
    fill(conn, 10)
    copy(conn)
    assert conn.execute("SHOW datestyle").fetchone()[0] == "German, DMY"
    assert conn.execute("SHOW row_security").fetchone()[0] == "on"
    conn.execute("RESET ALL")


def test_copy_of_nothing(conn, source):
    assert copy(conn) == {}


def test_copy_is_all_or_nothing(place, conn, source):
    fill(conn, 5000)
    with place.shard(2) as shard:
        shard.execute("ALTER TABLE public.copied ADD CHECK (n <> 4000)")
        owner = conn.execute("SELECT shardmap.owner_of('k4000'::text, 'main')").fetchone()[0]
        if owner != "shard-2":
            shard.execute("ALTER TABLE public.copied ADD CHECK (n < 4500)")
    with pytest.raises(errors.CheckViolation) as caught:
        copy(conn)
    assert 'shard "shard-2"' in caught.value.diag.context and "COPY copied, line" in caught.value.diag.context
    assert all_rows(place) == []
    assert rows(conn, "SELECT 1", "shard-2") == [["1"]]
    with place.shard(2) as shard:
        shard.execute("DROP TABLE public.copied")
    with pytest.raises(errors.UndefinedTable):
        copy(conn)
    with place.shard(2) as shard:
        shard.execute("CREATE TABLE public.copied (k text)")


def test_copy_sees_a_trigger_that_drops_rows(place, conn, source):
    fill(conn, 500)
    with place.shard(1) as shard:
        shard.execute("CREATE OR REPLACE FUNCTION public.drop_it() RETURNS trigger LANGUAGE plpgsql AS"
                      " 'BEGIN IF NEW.n % 2 = 0 THEN RETURN NEW; END IF; RETURN NULL; END';"
                      " CREATE TRIGGER drop_it BEFORE INSERT ON public.copied FOR EACH ROW EXECUTE FUNCTION public.drop_it()")
    with pytest.raises(errors.DataCorrupted, match="was sent"):
        copy(conn)
    assert all_rows(place) == []


def test_copy_refusals(conn, source):
    conn.execute("INSERT INTO public.source (k) VALUES (NULL)")
    with pytest.raises(errors.NotNullViolation):
        copy(conn)
    conn.execute("DELETE FROM public.source")
    with pytest.raises(errors.UndefinedColumn):
        copy(conn, key="nope")
    conn.execute("CREATE OR REPLACE VIEW public.source_view AS SELECT 1 AS k")
    with pytest.raises(errors.WrongObjectType):
        conn.execute("SELECT shardmap.copy_rows_to_shards('public.source_view', 'public', 'copied', 'k', 'main', '{k}')")
    conn.execute("DROP VIEW public.source_view")


def test_copy_can_be_cancelled(place, conn, source):
    fill(conn, 200000)
    conn.execute("SET statement_timeout = '200ms'")
    with pytest.raises(errors.QueryCanceled):
        copy(conn)
    conn.execute("RESET statement_timeout")
    assert rows(conn, "SELECT 1") == [["1"]]
    for number in range(3):
        place.wait_for_shard(0, number, like="COPY%")
    assert all_rows(place) == []


def test_copy_into_a_shard_that_waits(place, conn, source):
    """A shard that does not read makes the reader wait, and the wait can be cancelled."""
    fill(conn, 100000)
    with place.shard(1) as other:
        other.execute("BEGIN; LOCK TABLE public.copied")
        conn.execute("SET statement_timeout = '1s'")
        with pytest.raises(errors.QueryCanceled):
            copy(conn)
        conn.execute("RESET statement_timeout")
        other.execute("ROLLBACK")
    assert all_rows(place) == []


def test_copy_with_more_than_one_copy_a_shard(place, conn, source):
    conn.execute("INSERT INTO public.source (k, n, \"we ird\"\"\") SELECT 'k' || i, i, repeat(md5(i::text), 1000)"
                 " FROM generate_series(1, 4000) AS i")
    counts = copy(conn)
    assert sum(counts.values()) == 4000
    totals = [rows(conn, "SELECT count(*), sum(n) FROM public.copied", f"shard-{number}")[0] for number in range(3)]
    assert sum(int(total[1]) for total in totals) == 4000 * 4001 // 2

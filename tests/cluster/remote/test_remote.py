"""Statements for one shard: values, transactions, errors."""

import psycopg
import pytest
from patience import PATIENCE
from psycopg import errors
from remote_place import address, execute, keys, rows, run_in_thread, server


def test_values_come_as_text(conn):
    assert rows(conn, "SELECT 1, NULL, $$q\"'{},\\ é$$, 0.1::float8, true, DATE '2024-02-03', ''") == [
        ["1", None, "q\"'{},\\ é", "0.1", "t", "2024-02-03", ""]]
    assert rows(conn, "SELECT WHERE false") == []
    assert rows(conn, "SELECT") == [[]]
    assert rows(conn, "SELECT 1; SELECT 2") == [["2"]]
    assert rows(conn, "") == []


def test_tags(conn):
    assert execute(conn, "INSERT INTO public.t VALUES (1), (2)") == "INSERT 0 2"
    assert execute(conn, "DELETE FROM public.t") == "DELETE 2"


def test_session_settings_do_not_change_values(conn):
    conn.execute("SET datestyle = German; SET intervalstyle = sql_standard; SET extra_float_digits = -5;"
                 " SET standard_conforming_strings = off; SET search_path = public")
    statement = "SELECT DATE '2024-02-03', INTERVAL '1 day 2 hours', 0.1::float4::float8, '\\n'"
    assert rows(conn, statement) == [["2024-02-03", "1 day 02:00:00", "0.10000000149011612", "\\n"]]
    assert rows(conn, "SHOW search_path") == [["pg_catalog"]]


def test_many_rows_in_select_list(conn):
    count = conn.execute("SELECT count(*) FROM (SELECT shardmap.remote_rows('shard-0',"
                         " 'SELECT i, repeat(''x'', 100) FROM pg_catalog.generate_series(1, 100000) AS i')) AS s")
    assert count.fetchone()[0] == 100000


# Transactions

def test_commit_and_rollback(place, conn):
    with conn.transaction():
        execute(conn, "INSERT INTO public.t VALUES (1)")
        execute(conn, "INSERT INTO public.t VALUES (1)", "shard-1")
        assert rows(conn, "SELECT a FROM public.t") == [["1"]]
        assert keys(place) == []
    assert keys(place, 0) == keys(place, 1) == [1]
    with conn.transaction(force_rollback=True):
        execute(conn, "INSERT INTO public.t VALUES (2)")
    assert keys(place) == [1]


def test_not_transactional_commits_at_once(place, conn):
    with conn.transaction(force_rollback=True):
        execute(conn, "INSERT INTO public.t VALUES (1)", transactional=False)
        assert keys(place) == [1]
    assert keys(place) == [1]


def test_savepoints(place, conn):
    with conn.transaction():
        execute(conn, "INSERT INTO public.t VALUES (1)")
        with conn.transaction(force_rollback=True):
            execute(conn, "INSERT INTO public.t VALUES (2)")
            # First use of this shard inside the savepoint.
            execute(conn, "INSERT INTO public.t VALUES (2)", "shard-1")
        with conn.transaction():
            execute(conn, "INSERT INTO public.t VALUES (3)")
            with conn.transaction():
                execute(conn, "INSERT INTO public.t VALUES (4)", "shard-1")
            with pytest.raises(errors.UniqueViolation), conn.transaction():
                execute(conn, "INSERT INTO public.t VALUES (1)")
            assert rows(conn, "SELECT a FROM public.t ORDER BY a") == [["1"], ["3"]]
        execute(conn, "INSERT INTO public.t VALUES (5)", "shard-1")
    assert keys(place, 0) == [1, 3]
    assert keys(place, 1) == [4, 5]


def test_savepoint_below_one_that_was_rolled_back(place, conn):
    with conn.transaction():
        with conn.transaction():
            with conn.transaction():
                execute(conn, "INSERT INTO public.t VALUES (1)")
            with conn.transaction(force_rollback=True):
                execute(conn, "INSERT INTO public.t VALUES (2)")
        with conn.transaction(force_rollback=True):
            with conn.transaction():
                execute(conn, "INSERT INTO public.t VALUES (3)")
    assert keys(place) == [1]


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_isolation_level_is_carried_over(conn, level):
    with conn.transaction():
        conn.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        assert rows(conn, "SHOW transaction_isolation") == [[level]]


def test_read_committed_sees_new_rows_and_repeatable_read_does_not(place, conn):
    for level, sees in (("READ COMMITTED", 1), ("REPEATABLE READ", 0)):
        with conn.transaction():
            conn.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            before = len(rows(conn, "SELECT a FROM public.t"))
            with place.shard() as shard:
                shard.execute("INSERT INTO public.t SELECT coalesce(max(a), 0) + 1 FROM public.t")
            assert len(rows(conn, "SELECT a FROM public.t")) - before == sees


def test_read_only_is_carried_over(conn):
    with pytest.raises(errors.ReadOnlySqlTransaction), conn.transaction():
        conn.execute("SET TRANSACTION READ ONLY")
        execute(conn, "INSERT INTO public.t VALUES (1)")


@pytest.mark.parametrize("mode", ["DEFERRABLE", "NOT DEFERRABLE"])
def test_deferrable_is_carried_over(conn, mode):
    with conn.transaction():
        conn.execute(f"SET TRANSACTION ISOLATION LEVEL SERIALIZABLE, READ ONLY, {mode}")
        assert rows(conn, "SHOW transaction_deferrable") == [["on" if mode == "DEFERRABLE" else "off"]]
    with conn.transaction():  # means nothing there
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY, DEFERRABLE")
        assert rows(conn, "SHOW transaction_deferrable") == [["off"]]


def test_deferrable_waits_for_a_safe_snapshot(place, conn):
    """Another transaction that writes may still make it unsafe; a timeout ends the wait."""
    with place.shard() as other:
        other.execute("BEGIN ISOLATION LEVEL SERIALIZABLE; INSERT INTO public.t VALUES (1)")
        with pytest.raises(errors.QueryCanceled), conn.transaction():
            conn.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE, READ ONLY, DEFERRABLE")
            conn.execute("SET LOCAL statement_timeout = '300ms'")
            rows(conn, "SELECT a FROM public.t")
        other.execute("COMMIT")
    with conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE, READ ONLY, DEFERRABLE")
        assert rows(conn, "SELECT a FROM public.t") == [["1"]]


def test_prepare_transaction_is_refused(place, conn):
    conn.execute("BEGIN")
    execute(conn, "INSERT INTO public.t VALUES (1)")
    with pytest.raises(errors.FeatureNotSupported):
        conn.execute("PREPARE TRANSACTION 'x'")
    assert keys(place) == []
    assert execute(conn, "SELECT 1") == "SELECT 1"


@pytest.mark.parametrize("statement, transactional", [("COMMIT", True), ("ROLLBACK", True), ("BEGIN", False)])
def test_transaction_control_is_refused(place, conn, statement, transactional):
    with pytest.raises(errors.InvalidTransactionTermination):
        execute(conn, f"INSERT INTO public.t VALUES (1); {statement}", transactional=transactional)
    assert rows(conn, "SELECT 1", transactional=transactional) == [["1"]]


DEFERRED = ("CREATE TABLE public.d (a int); CREATE FUNCTION public.no() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN RAISE EXCEPTION ''not here''; END';"
            " CREATE CONSTRAINT TRIGGER no AFTER INSERT ON public.d DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION public.no()")


def test_commit_that_fails_on_a_shard(place, conn):
    with place.shard(1) as shard:
        shard.execute("DROP TABLE IF EXISTS public.d; DROP FUNCTION IF EXISTS public.no()")
        shard.execute(DEFERRED)
    # The first shard to commit fails: everything is rolled back, with the shard's own error.
    with pytest.raises(errors.RaiseException, match="not here"), conn.transaction():
        execute(conn, "INSERT INTO public.d VALUES (1)", "shard-1")
        execute(conn, "INSERT INTO public.t VALUES (1)", "shard-0")
    assert keys(place, 0) == []
    # In one phase, where the second fails, the error says who has committed.
    conn.execute("SET shardmap.multi_shard_commit = one_phase")
    with pytest.raises(errors.TransactionResolutionUnknown) as caught, conn.transaction():
        execute(conn, "INSERT INTO public.t VALUES (1)", "shard-0")
        execute(conn, "INSERT INTO public.d VALUES (1)", "shard-1")
        execute(conn, "INSERT INTO public.t VALUES (1)", "shard-2")
    assert 'Committed: "shard-0". Failed: "shard-1": not here' in caught.value.diag.message_detail
    assert (keys(place, 0), keys(place, 2)) == ([1], [])
    assert rows(conn, "SELECT 1", "shard-1") == [["1"]]


def test_cancel_during_commit(place, conn):
    """The shard's COMMIT in one phase is cancelled there, and its outcome is waited for."""
    conn.execute("SET shardmap.multi_shard_commit = one_phase")
    with place.shard(1) as shard:
        shard.execute("DROP TABLE IF EXISTS public.d; DROP FUNCTION IF EXISTS public.no()")
        shard.execute(DEFERRED.replace("RAISE EXCEPTION ''not here''", "PERFORM pg_catalog.pg_sleep(3600)"))
    conn.execute("BEGIN")
    execute(conn, "INSERT INTO public.d VALUES (1)", "shard-1")
    execute(conn, "INSERT INTO public.t VALUES (1)", "shard-0")
    thread, caught = run_in_thread(lambda: conn.execute("COMMIT"))
    place.wait_for_shard(1, 1, like="COMMIT")
    conn.cancel_safe()
    thread.join(PATIENCE)
    assert isinstance(caught[0], errors.QueryCanceled) and 'shard "shard-1"' in caught[0].diag.context
    assert keys(place, 0) == [] and rows(conn, "SELECT a FROM public.d", "shard-1") == []
    with place.shard(1) as shard:
        shard.execute("DROP TABLE public.d; DROP FUNCTION public.no()")


def test_errors_keep_their_fields(conn):
    with pytest.raises(errors.UniqueViolation) as caught, conn.transaction():
        execute(conn, "INSERT INTO public.t VALUES (1), (1)")
    diag = caught.value.diag
    assert diag.message_detail == "Key (a)=(1) already exists."
    assert (diag.schema_name, diag.table_name, diag.constraint_name) == ("public", "t", "t_pkey")
    assert diag.context == 'shard "shard-0"'
    with pytest.raises(psycopg.Error) as caught:
        execute(conn, "DO $$BEGIN RAISE 'own' USING ERRCODE = 'ZZ9X1', HINT = 'h', DETAIL = 'd %s'; END$$")
    diag = caught.value.diag
    assert (diag.sqlstate, diag.message_primary, diag.message_hint) == ("ZZ9X1", "own", "h")
    assert diag.message_detail == "d %s"
    assert diag.context.endswith('at RAISE\nshard "shard-0"')


def test_errors_are_caught_in_plpgsql(place, conn):
    conn.execute("DO $$ BEGIN PERFORM shardmap.remote_execute('shard-0', 'INSERT INTO public.t VALUES (1)');"
                 " BEGIN PERFORM shardmap.remote_execute('shard-0', 'INSERT INTO public.t VALUES (1)');"
                 " EXCEPTION WHEN unique_violation THEN NULL; END;"
                 " PERFORM shardmap.remote_execute('shard-0', 'INSERT INTO public.t VALUES (2)'); END $$")
    assert keys(place) == [1, 2]


def test_notices_are_passed_on(conn):
    notices = []
    conn.add_notice_handler(lambda n: notices.append((n.severity, n.message_primary)))
    execute(conn, "DO $$BEGIN RAISE WARNING 'careful'; RAISE NOTICE 'by the way'; END$$")
    assert notices == [("WARNING", "careful"), ("NOTICE", "by the way")]


def test_copy_by_text_is_refused(conn):
    for statement in ("COPY public.t FROM STDIN", "COPY public.t TO STDOUT"):
        with pytest.raises(errors.FeatureNotSupported):
            execute(conn, statement)
        assert rows(conn, "SELECT 1") == [["1"]]


def test_unknown_shards(conn):
    with pytest.raises(errors.UndefinedObject, match='shard "nope" does not exist'):
        execute(conn, "SELECT 1", "nope")
    with pytest.raises(errors.UndefinedObject, match='keyspace "nope" does not exist'):
        conn.execute("SELECT * FROM shardmap.run_on_shards('SELECT 1', 'nope')")


def test_names_are_quoted(place, conn):
    with server(conn, 'we ird"; x', **address(place), options="-c work_mem=123kB") as name:
        assert rows(conn, "SHOW work_mem", name) == [["123kB"]]
        with pytest.raises(errors.DivisionByZero) as caught:
            rows(conn, "SELECT 1/0", name)
        assert caught.value.diag.context == 'shard "we ird"; x"'


def test_no_connection(place, conn):
    with server(conn, "nowhere", host="127.0.0.1", port=1):
        with pytest.raises(errors.SqlclientUnableToEstablishSqlconnection) as caught:
            rows(conn, "SELECT 1", "nowhere")
        diag = caught.value.diag
        assert diag.message_primary == 'could not connect to shard "nowhere"'
        assert "Connection refused" in diag.message_detail and diag.message_hint
    with server(conn, "nodb", **{**address(place), "dbname": "no such db"}):
        with pytest.raises(errors.SqlclientUnableToEstablishSqlconnection, match='database "no such db" does not exist'):
            rows(conn, "SELECT 1", "nodb")

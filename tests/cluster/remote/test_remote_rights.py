"""Who may use a shard, and as whom."""

import contextlib

import psycopg
import pytest
from psycopg import errors
from remote_place import address, rows, server


@contextlib.contextmanager
def admin(place, conn, mapping, granted=True):
    """A session of an ordinary user, who may be an administrator, with a user mapping for shard-0."""
    conn.execute("DROP ROLE IF EXISTS remote_admin; CREATE ROLE remote_admin LOGIN")
    try:
        if granted:
            conn.execute("GRANT shardmap_admin TO remote_admin")
        if mapping is not None:
            conn.execute(f"CREATE USER MAPPING FOR remote_admin SERVER \"shard-0\" OPTIONS ({mapping})")
        with place.connect(user="remote_admin") as session:
            yield session
    finally:
        conn.execute("DROP USER MAPPING IF EXISTS FOR remote_admin SERVER \"shard-0\"; DROP ROLE remote_admin")


def test_ordinary_users_may_not(place, conn):
    with admin(place, conn, "user 'postgres', password_required 'false'", granted=False) as session:
        for call in ("remote_execute('shard-0', '')", "remote_rows('shard-0', '')", "run_on_shards('')",
                     "run_on_each('{shard-0}', '')",
                     "copy_rows_to_shards('pg_class', 'a', 'b', 'c', 'main', '{oid}')"):
            with pytest.raises(errors.InsufficientPrivilege):
                session.execute(f"SELECT shardmap.{call}")


@pytest.mark.parametrize("mapping, detail", [
    ("user 'postgres'", "must give a password"),
    ("user 'postgres', password ''", "must give a password"),
    # The shard trusts everybody here.
    ("user 'postgres', password 'x'", "without asking for the password"),
])
def test_password_rule(place, conn, mapping, detail):
    with admin(place, conn, mapping) as session:
        for _ in range(2):
            with pytest.raises(psycopg.Error) as caught:
                rows(session, "SELECT 1")
            assert caught.value.diag.sqlstate == "2F003"
            assert detail in caught.value.diag.message_detail and caught.value.diag.message_hint


def test_passwordless_where_a_superuser_allows_it(place, conn):
    with admin(place, conn, "user 'postgres', password_required 'false'") as session:
        assert rows(session, "SELECT 1") == [["1"]]


def test_no_mapping(place, conn):
    with admin(place, conn, None) as session:
        with pytest.raises(errors.UndefinedObject, match='"remote_admin" has no user mapping for shard "shard-0"'):
            rows(session, "SELECT 1")


def test_shared_mapping_keeps_the_password_rule(place, conn):
    """The superuser's connection through PUBLIC's mapping does not serve a user who lacks a password."""
    with server(conn, "shared", **address(place)):
        conn.execute("DROP USER MAPPING FOR CURRENT_USER SERVER shared;"
                     " CREATE USER MAPPING FOR PUBLIC SERVER shared OPTIONS (user 'postgres', password 'x')")
        with admin(place, conn, None):
            assert rows(conn, "SELECT 1", "shared") == [["1"]]
            conn.execute("SET ROLE remote_admin")
            with pytest.raises(psycopg.Error) as caught:
                rows(conn, "SELECT 1", "shared")
            assert caught.value.diag.sqlstate == "2F003"
            conn.execute("RESET ROLE")
            assert rows(conn, "SELECT 1", "shared") == [["1"]]


def test_other_servers_are_no_shards(conn):
    conn.execute("CREATE SERVER plain FOREIGN DATA WRAPPER postgres_fdw")
    try:
        with pytest.raises(errors.WrongObjectType, match="is not a shard"):
            rows(conn, "SELECT 1", "plain")
    finally:
        conn.execute("DROP SERVER plain")

"""Moves by logical replication as managed servers allow them: the shards' user is no superuser anywhere. What he needs is enough, and
what he lacks is said before anything is written."""

import contextlib
import os

import psycopg
import psycopg.sql
import pytest
from cluster import Cluster
from patience import wait_until
from tenants import SETTINGS, SHARDS, Tenants, run
from test_moves_logical import LOGICAL, check, left_behind, plan, stop_at
from test_moves_rollback import check as check_rolled_back
from test_moves_rollback import write_after
from test_moves_under_load import check as check_load
from test_moves_under_load import start

pytestmark = pytest.mark.skipif(int(os.environ.get("PG") or 16) < 16, reason="before Postgres 16 only superusers subscribe")
SECRET = "not-to-be-seen"
PASSWORD = f"'{SECRET}\\"
QUOTED = psycopg.sql.quote(PASSWORD).strip()
ASKED = "host all keeper 127.0.0.1/32 scram-sha-256\n"
ROLE = f"""
CREATE ROLE keeper LOGIN REPLICATION PASSWORD {QUOTED};
GRANT CREATE ON DATABASE shard_%s TO keeper;
GRANT CREATE ON SCHEMA public TO keeper;
GRANT pg_create_subscription TO keeper;
"""


def authenticate(server, lines):
    """Lets a server have these lines before those that trust everybody."""
    file = server.data / "pg_hba.conf"
    file.write_text(lines + file.read_text().removeprefix(ASKED))
    server.reload()


def start_cluster(cluster):
    """Tables are made by, and belong to, the user whom the mappings name."""
    for shard in range(SHARDS):
        cluster.shard_psql(shard, ROLE % shard)
        authenticate(cluster.shard_server(shard), ASKED)
        cluster.psql(f"ALTER USER MAPPING FOR postgres SERVER \"shard-{shard}\" OPTIONS (SET user 'keeper', ADD password {QUOTED})")
    # From here on the coordinator's log has every statement that it runs.
    cluster.coordinator.reload(log_statement="all")
    return Tenants(cluster)


@pytest.fixture(scope="module")
def tenants():
    with Cluster(shards=SHARDS, layout="servers", coordinator_settings={**SETTINGS, "shardmap.fence_timeout": "5s"},
                 shard_settings=LOGICAL) as cluster:
        yield start_cluster(cluster)


@pytest.fixture(autouse=True)
def secret(tenants):
    """Whatever happens, nobody reads the password."""
    yield
    for server in tenants.cluster.servers():
        assert SECRET not in server.log.read_text(), server.name
    with tenants.connect() as conn:
        assert SECRET not in str(conn.execute("SELECT m::text FROM shardmap.moves m").fetchall())


def test_the_user_is_no_superuser(tenants):
    for shard in range(SHARDS):
        assert tenants.on_shard(shard, "SELECT rolsuper, rolbypassrls FROM pg_roles WHERE rolname = 'keeper'") == [(False, False)]
        assert set(tenants.on_shard(shard, "SELECT tableowner FROM pg_tables WHERE schemaname = 'public'")) == {("keeper",)}
        with pytest.raises(psycopg.OperationalError, match="no password supplied"):
            psycopg.connect(tenants.cluster.shard_dsn(shard, user="keeper"))


def test_a_key_moves_while_clients_write(tenants, crew):
    tenant = tenants.fresh(0)
    writers, _ = start(crew, tenants, tenant)
    with tenants.connect() as conn:
        for target in (1, 2):
            before = [sum(writer.added.values()) for writer in writers]
            wait_until(lambda before=before: crew.failures or all(sum(writer.added.values()) > one for writer, one in zip(writers, before)))
            number = plan(conn, tenant, target)
            run(conn, number)
            move = tenants.move(conn, number)
            assert move["state"] == "done" and move["last_error"] is None and set(tenants.stored(tenant)) == {target}
            assert left_behind(tenants) == []
        crew.stop()
        check_load(tenants, conn, tenant, writers)


@pytest.mark.parametrize("point", ["move_subscribing", "move_logging", "move_fenced"])
def test_a_move_is_given_up(tenants, point):
    tenant = tenants.fresh(0)
    with tenants.connect() as conn:
        number = plan(conn, tenant, 1)
        stop_at(tenants, number, point)
        conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
        run(conn, number)
        assert tenants.move(conn, number)["state"] == "rolled_back"
    assert tenants.stored(tenant) == {0: (40, 40)} and left_behind(tenants) == []


@pytest.mark.parametrize("point", ["move_unsubscribe", "move_flipped"])
def test_a_move_is_taken_back(tenants, point):
    tenant = tenants.fresh(0)
    with tenants.connect() as conn:
        number = plan(conn, tenant, 1)
        stop_at(tenants, number, point)
        rows = write_after(conn, tenant)
        conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
        run(conn, number)
    check_rolled_back(tenants, tenant, number, rows)
    assert left_behind(tenants) == []


def test_an_error_that_stops_the_subscription_is_got_over(tenants):
    """The run after it enables it again."""
    tenant = tenants.fresh(0)
    with tenants.connect() as conn, psycopg.connect(tenants.cluster.shard_dsn(1), autocommit=True) as target:
        number = plan(conn, tenant, 1)
        stop_at(tenants, number, "move_verified")
        target.execute("INSERT INTO account (tenant, id, balance) VALUES (%s, 77, 5)", (tenant,))
        conn.execute("INSERT INTO account (tenant, id, balance) VALUES (%s, 77, 6)", (tenant,))
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="stopped by an error"):
            run(conn, number)
        target.execute("DELETE FROM account WHERE tenant = %s AND id = 77", (tenant,))
        run(conn, number)
        assert tenants.move(conn, number)["state"] == "done"
    assert tenants.stored(tenant) == {1: (41, 40)} and left_behind(tenants) == []


def test_workers_that_do_not_end_are_ended(tenants):
    """One waits for a lock on the target; the move may end it as the user that it is."""
    tenant = tenants.fresh(0)
    with tenants.connect() as conn, psycopg.connect(tenants.cluster.shard_dsn(1)) as holder:
        number = plan(conn, tenant, 1)
        stop_at(tenants, number, "move_verified")
        holder.execute("LOCK TABLE account IN SHARE MODE")
        conn.execute("UPDATE account SET balance = 1 WHERE tenant = %s AND id = 1", (tenant,))
        conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
        with tenants.connect(shardmap__crash_point="move_unsubscribed=error") as runner, pytest.raises(psycopg.Error, match="crash point"):
            run(runner, number)
        holder.rollback()
        run(conn, number)
        assert tenants.move(conn, number)["state"] == "rolled_back"
    assert tenants.stored(tenant) == {0: (40, 40)} and left_behind(tenants) == []


@contextlib.contextmanager
def changed(tenants, shard, there, back):
    tenants.cluster.shard_psql(shard, there)
    try:
        yield
    finally:
        tenants.cluster.shard_psql(shard, back)


@contextlib.contextmanager
def trusted(tenants):
    """The source asks for no password."""
    authenticate(tenants.cluster.shard_server(0), "")
    try:
        yield
    finally:
        authenticate(tenants.cluster.shard_server(0), ASKED)


@contextlib.contextmanager
def unmapped(tenants):
    """It asks for none, and there is none."""
    with trusted(tenants), tenants.connect() as conn:
        conn.execute("ALTER USER MAPPING FOR postgres SERVER \"shard-0\" OPTIONS (DROP password)")
        try:
            yield
        finally:
            # A superuser's setting: the log is not to have this statement.
            conn.execute("SET log_statement = none")
            conn.execute(f"ALTER USER MAPPING FOR postgres SERVER \"shard-0\" OPTIONS (ADD password {QUOTED})")


OWNERS = "CREATE ROLE owners; GRANT owners TO keeper; GRANT CREATE ON SCHEMA public TO owners; ALTER TABLE account OWNER TO owners"
GIVEN = "ALTER TABLE account OWNER TO other; GRANT ALL ON account TO keeper"
LACKS = {
    "pg_create_subscription": (
        lambda tenants: changed(tenants, 1, "REVOKE pg_create_subscription FROM keeper", "GRANT pg_create_subscription TO keeper"),
        'shard "shard-1" does not let this user subscribe', "GRANT pg_create_subscription"),
    "REPLICATION": (lambda tenants: changed(tenants, 0, "ALTER ROLE keeper NOREPLICATION", "ALTER ROLE keeper REPLICATION"),
        'shard "shard-0" does not let this user replicate', "ALTER ROLE the user of the user mapping REPLICATION"),
    "owner of the source's table": (lambda tenants: changed(tenants, 0, GIVEN, "ALTER TABLE account OWNER TO keeper"),
        'shard "shard-0" does not let this user publish', "owns the tables"),
    "owner of the target's table": (lambda tenants: changed(tenants, 1, GIVEN, "ALTER TABLE account OWNER TO keeper"),
        'shard "shard-1" does not let this user write to table public.account as its owner', "owns the tables"),
    "CREATE on the target": (
        lambda tenants: changed(tenants, 1, "REVOKE CREATE ON DATABASE shard_1 FROM keeper", "GRANT CREATE ON DATABASE shard_1 TO keeper"),
        'shard "shard-1" does not let this user create schemas', "GRANT CREATE ON DATABASE"),
    "a source that asks for the password": (trusted, 'shard "shard-1" cannot subscribe to shard "shard-0"', "pg_hba.conf"),
    "a password": (unmapped, 'shard "shard-1" cannot subscribe to shard "shard-0"', "pg_hba.conf"),
}


@pytest.mark.parametrize("lack", LACKS)
def test_what_the_user_lacks(tenants, lack):
    """The move fails before anything is written, with a hint, and goes on when he has it."""
    without, message, hint = LACKS[lack]
    tenant = tenants.fresh(0)
    for shard in (0, 1):
        if not tenants.on_shard(shard, "SELECT FROM pg_roles WHERE rolname = 'other'"):
            tenants.cluster.shard_psql(shard, "CREATE ROLE other; GRANT CREATE ON SCHEMA public TO other")
    with tenants.connect() as conn:
        number = plan(conn, tenant, 1)
    with without(tenants):
        with tenants.connect() as conn, pytest.raises(psycopg.Error, match=message) as caught:
            run(conn, number)
        said = caught.value.diag
        assert hint in said.message_hint and SECRET not in f"{said.message_primary} {said.message_detail} {said.message_hint} {said.context}"
        with tenants.connect() as conn:
            assert tenants.move(conn, number)["state"] == "planned"
        assert left_behind(tenants) == [] and tenants.stored(tenant) == {0: (40, 40)}
    with tenants.connect() as conn:
        run(conn, number)
    check(tenants, tenant, number)


def test_a_role_that_may_take_the_owners_will_do(tenants):
    tenant = tenants.fresh(0)
    with tenants.connect() as conn:
        number = plan(conn, tenant, 1)
    with changed(tenants, 1, OWNERS, "ALTER TABLE account OWNER TO keeper"), tenants.connect() as conn:
        run(conn, number)
        check(tenants, tenant, number)

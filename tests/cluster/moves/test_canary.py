"""A small part of what is to move goes first, is watched, and is taken back if it does harm; then the rest."""

import itertools
import threading
from collections import Counter

import psycopg
import pytest
from fleet import COUNT, Fleet, Load
from patience import crashing
from waiting import wait_for

NUMBERS = itertools.count(1)
LOOSE = {"max_error_rate": "1", "max_slowdown": "100000", "min_statements": "0", "baseline": "'0.3 s'"}
FOR_EVER = {"bake": "'1 h'", "baseline": "'0'"}


def open_fleet(tenants, **options):
    return Fleet(tenants, f"canary_{next(NUMBERS)}", ["int4"], strategy="ring", vnodes=16, **options)


@pytest.fixture
def fleet(tenants):
    """Rows on three shards, and a fourth that is to get its part of them by several moves."""
    fleet = open_fleet(tenants)
    fleet.table = f"{fleet.name}_int4"
    with fleet.connect() as conn:
        fleet.fill(conn)
        fleet.add_shard(conn)
        conn.execute("SELECT FROM shardmap.rebalance(%s)", (fleet.name,))
        fleet.planned = moves(fleet, conn)
        assert len(fleet.planned) >= 2
    return fleet


@pytest.fixture
def conn(fleet):
    with fleet.connect() as conn:
        yield conn


def moves(fleet, conn):
    return conn.execute("SELECT id, part, source, target, rows_planned FROM shardmap.moves WHERE keyspace = %s AND state = 'planned'",
                        (fleet.name,)).fetchall()


def call(fleet, conn, **options):
    conn.execute(f"CALL shardmap.canary('{fleet.name}'{''.join(f', {name} => {value}' for name, value in options.items())})")


def canary(fleet, conn):
    conn.row_factory = psycopg.rows.dict_row
    try:
        return conn.execute("SELECT * FROM shardmap.canaries WHERE keyspace = %s ORDER BY move DESC LIMIT 1", (fleet.name,)).fetchone()
    finally:
        conn.row_factory = psycopg.rows.tuple_row


class Caller(threading.Thread):
    """Another session that calls; `error` is what it ended with."""

    def __init__(self, fleet, **options):
        super().__init__(daemon=True)
        self.fleet, self.options, self.error = fleet, options, None

    def run(self):
        try:
            with self.fleet.connect() as conn:
                call(self.fleet, conn, **self.options)
        except Exception as error:  # pylint: disable=broad-except
            self.error = error

    def wait_for(self, conn, state):
        """Until the canary is in a state; the call must not have ended before."""
        wait_for(lambda: not self.is_alive() or (canary(self.fleet, conn) or {}).get("state") == state, lambda: canary(self.fleet, conn))
        assert self.is_alive(), self.error

    def end(self):
        self.join(120)
        assert not self.is_alive()
        return self.error


def moved_keys(fleet, conn):
    return [key for (key,) in conn.execute(
        f"SELECT DISTINCT k FROM {fleet.table} WHERE shard_for(k, '{fleet.name}') = '{fleet.name}-3' ORDER BY k")]


def update(fleet, conn, keys):
    """Of the keys for which that could be done."""
    done = Counter()
    for key in keys:
        try:
            conn.execute(f"UPDATE {fleet.table} SET n = n + 1 WHERE k = %s AND id = 1", (key,))
            done[key] += 1
        except psycopg.errors.RaiseException:
            pass
    return done


def updated(rows, done):
    return [(key, id, n + (done[key] if id == 1 else 0), note) for key, id, n, note in rows]


def rows(fleet, conn):
    return conn.execute(f"SELECT k, id, n, note FROM {fleet.table} ORDER BY k, id").fetchall()


def check_taken_back(fleet, conn, want):
    """The map is as before, all rows are there once, and the other moves are what was planned."""
    row = canary(fleet, conn)
    assert (row["state"], row["move_state"]) == ("failed", "rolled_back"), row
    assert moved_keys(fleet, conn) == []
    assert sorted(planned[1:] for planned in moves(fleet, conn)) == sorted(planned[1:] for planned in fleet.planned)
    assert rows(fleet, conn) == want
    fleet.check(conn)
    return row["verdict"]


def check_passed(fleet, conn):
    row = canary(fleet, conn)
    assert (row["state"], row["move_state"]) == ("passed", "done"), row
    assert conn.execute("SELECT DISTINCT state FROM shardmap.moves WHERE keyspace = %s AND state <> 'rolled_back'", (fleet.name,)).fetchall() == [("done",)]
    assert conn.execute("SELECT count(*) FROM shardmap.rebalance(%s)", (fleet.name,)).fetchone() == (0,)
    fleet.check(conn)
    return row


def sabotage(fleet, body):
    """The target does that for each row that a client updates. The mover writes past triggers."""
    with psycopg.connect(fleet.tenants.cluster.shard_server(0).dsn(f"{fleet.name}_3"), autocommit=True) as there:
        there.execute(f"CREATE FUNCTION harm() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body}; RETURN NEW; END $$")
        there.execute(f"CREATE TRIGGER harm BEFORE UPDATE ON {fleet.table} FOR EACH ROW EXECUTE FUNCTION harm()")


def behind_our_back(fleet, sql):
    """Without the triggers that log what clients change."""
    with psycopg.connect(fleet.tenants.cluster.shard_server(0).dsn(f"{fleet.name}_3"), autocommit=True) as there:
        there.execute("SET session_replication_role = replica")
        assert there.execute(sql).rowcount == 1


def test_it_passes_and_the_rest_follows(fleet, conn):
    """Under load: what clients change meanwhile is no difference."""
    with Load(fleet) as load:
        call(fleet, conn, bake="'2 s'", **LOOSE)
    load.check(conn)
    row = check_passed(fleet, conn)
    copied, first = conn.execute("SELECT rows_copied, flipped_at < (SELECT min(started_at) FROM shardmap.moves o WHERE o.id = ANY (%s)) FROM shardmap.moves "
                                 "WHERE id = %s", (row["rest"], row["move"])).fetchone()
    assert 0 < copied < sum(planned[4] for planned in fleet.planned) and first
    assert row["rest"] == [planned[0] for planned in fleet.planned if planned[0] != row["move"]]
    assert row["verifications"] >= 1 and "rows compared" in row["verdict"]


def test_it_passes_by_what_was_counted(fleet, conn):
    conn.execute("SELECT shardmap.reset_stat_routing()")
    update(fleet, conn, range(1, COUNT + 1))
    caller = Caller(fleet, max_error_rate="0", max_slowdown="100000", min_statements=5, **FOR_EVER)
    caller.start()
    caller.wait_for(conn, "baking")
    keys, done = moved_keys(fleet, conn), Counter()
    while (canary(fleet, conn)["target_statements"] or 0) < 10 and caller.is_alive():
        done += update(fleet, conn, keys)
    conn.execute("UPDATE shardmap.canary_run SET bake = '0.1 s' WHERE finished_at IS NULL")
    assert caller.end() is None
    row = check_passed(fleet, conn)
    for measure in ("errors in 0.00 % of", "waits of"):
        assert f'target "{fleet.name}-3": {measure}' in row["verdict"], row
    assert 10 <= row["target_statements"] <= sum(done.values()) + 10 and row["target_errors"] == 0 and row["target_wait_ms"] > 0


@pytest.mark.parametrize("strategy", ["modulo", "range"])
def test_parts_of_all_strategies_are_cut(tenants, strategy):
    options = {"range_order": "integer"} if strategy == "range" else {}
    fleet = Fleet(tenants, f"canary_{strategy}", ["int4"], strategy=strategy, **options)
    with fleet.connect() as conn:
        if strategy == "range":
            for number, (lower, upper) in enumerate([("NULL", "'21'"), ("'21'", "'41'"), ("'41'", "NULL")]):
                conn.execute(f"SELECT shardmap.set_range('{fleet.name}', {lower}, {upper}, '{fleet.name}-{number}')")
        fleet.fill(conn)
        if strategy == "range":
            conn.execute("SELECT FROM shardmap.move_range('1', '39', %s, %s)", (f"{fleet.name}-2", fleet.name))
        else:
            conn.execute("SELECT shardmap.drain_shard(%s)", (f"{fleet.name}-0",))
            conn.execute("SELECT FROM shardmap.rebalance(%s)", (fleet.name,))
        planned = moves(fleet, conn)
        assert len(planned) > 1 and sum(row[4] for row in planned) >= 80
        call(fleet, conn, bake="'0.5 s'", **LOOSE)
        row = check_passed(fleet, conn)
        copied = conn.execute("SELECT rows_copied FROM shardmap.moves WHERE id = %s", (row["move"],)).fetchone()[0]
        assert 0 < copied < min(part[4] for part in planned)
        assert conn.execute("SELECT sum(rows_copied) FROM shardmap.moves WHERE keyspace = %s", (fleet.name,)).fetchone()[0] == sum(p[4] for p in planned)


def test_a_plan_changes_nothing(fleet, conn):
    before = conn.execute("SELECT * FROM shardmap.move ORDER BY id").fetchall()
    cut_from, source, target, count, rest = conn.execute("SELECT cut_from, source, target, rows, rest FROM shardmap.plan_canary(%s)", (fleet.name,)).fetchone()
    whole = {row[0]: row for row in fleet.planned}
    assert (source, target) == whole[cut_from][2:4] and 0 < count <= whole[cut_from][4] and set(rest) >= set(whole) - {cut_from}
    cut_from, count, rest = conn.execute("SELECT cut_from, rows, rest FROM shardmap.plan_canary(%s, 1)", (fleet.name,)).fetchone()
    assert count == whole[cut_from][4] and rest == sorted(set(whole) - {cut_from})
    assert conn.execute("SELECT * FROM shardmap.move ORDER BY id").fetchall() == before


def test_the_move_of_the_least_traffic_goes_first(fleet, conn):
    """By what their sources are asked, whatever else they are asked."""
    owners = dict(conn.execute(f"SELECT DISTINCT ON (s) s, k FROM (SELECT k, shard_for(k, '{fleet.name}') AS s FROM {fleet.table}) x"))
    sources = [source for _, _, source, _, count in fleet.planned if count]
    assert len(sources) >= 2
    for quiet in sources:
        conn.execute("SELECT shardmap.reset_stat_routing()")
        for shard, key in owners.items():
            for _ in range(100 if shard != quiet else 1):
                conn.execute(f"SELECT FROM {fleet.table} WHERE k = {key}")
        assert conn.execute("SELECT source FROM shardmap.plan_canary(%s)", (fleet.name,)).fetchone() == (quiet,)


def test_too_few_statements_are_not_judged(fleet, conn):
    call(fleet, conn, bake="'0.5 s'", baseline="'0.1 s'", min_statements="1000000")
    assert check_passed(fleet, conn)["verdict"].count("not judged: fewer than 1000000 statements") == 4


def test_errors_take_it_back(fleet, conn):
    sabotage(fleet, "RAISE EXCEPTION 'not here'")
    want = rows(fleet, conn)
    caller = Caller(fleet, max_error_rate=0.1, max_slowdown=100000, min_statements=10, **FOR_EVER)
    caller.start()
    caller.wait_for(conn, "baking")
    keys, done = moved_keys(fleet, conn), Counter()
    assert keys
    while caller.is_alive():
        done += update(fleet, conn, keys)
    error = caller.end()
    assert isinstance(error, psycopg.errors.ObjectNotInPrerequisiteState) and f'target "{fleet.name}-3": errors in' in str(error), error
    assert "not begun" in error.diag.message_detail and "shardmap.canary(" in error.diag.message_hint
    assert "errors in" in check_taken_back(fleet, conn, updated(want, done))


def test_slowness_takes_it_back(fleet, conn):
    sabotage(fleet, "PERFORM pg_sleep(1)")
    conn.execute("SELECT shardmap.reset_stat_routing()")
    update(fleet, conn, range(1, COUNT + 1))
    want = rows(fleet, conn)
    caller = Caller(fleet, max_error_rate=1, max_slowdown=3, min_statements=5, **FOR_EVER)
    caller.start()
    caller.wait_for(conn, "baking")
    keys, done = moved_keys(fleet, conn)[:1], Counter()
    while canary(fleet, conn)["state"] == "baking" and caller.is_alive():
        done += update(fleet, conn, keys)
    error = caller.end()
    assert f'target "{fleet.name}-3": waits of' in str(error), error
    assert "waits of" in check_taken_back(fleet, conn, updated(want, done))


def test_a_row_that_was_changed_behind_our_back(fleet, conn):
    """Nobody knows which side is right: it is stopped and said, and goes back once the row is the same again."""
    want = rows(fleet, conn)
    caller = Caller(fleet, bake="'20 s'", baseline="'0'")  # looked at four times at least
    caller.start()
    caller.wait_for(conn, "baking")
    key = moved_keys(fleet, conn)[0]
    behind_our_back(fleet, f"UPDATE {fleet.table} SET note = 'x' WHERE k = {key} AND id = 2")
    error = caller.end()
    assert isinstance(error, psycopg.errors.DataCorrupted), error
    row = canary(fleet, conn)
    assert row["state"] == "taking_back" and row["verdict"] == f"rows of table public.{fleet.table} differ: changed, primary key (2,{key})"
    with pytest.raises(psycopg.errors.ObjectInUse, match="waits for the canary"):
        conn.execute(f"CALL shardmap.run_move({row['rest'][0]})")
    with pytest.raises(psycopg.errors.DataCorrupted):
        call(fleet, conn)
    behind_our_back(fleet, f"UPDATE {fleet.table} SET note = 'note {key}' WHERE k = {key} AND id = 2")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="has failed: rows of table"):
        call(fleet, conn)
    check_taken_back(fleet, conn, want)


def test_after_a_failure_it_is_tried_again(fleet, conn):
    caller = Caller(fleet, **FOR_EVER)
    caller.start()
    caller.wait_for(conn, "baking")
    conn.execute("SELECT shardmap.rollback_move(%s)", (canary(fleet, conn)["move"],))
    assert "its move was rolled back" in str(caller.end())
    check_taken_back(fleet, conn, rows(fleet, conn))
    call(fleet, conn, bake="'0.3 s'", **LOOSE)
    check_passed(fleet, conn)


def test_others_wait_while_it_bakes(fleet, conn):
    caller = Caller(fleet, **FOR_EVER)
    caller.start()
    caller.wait_for(conn, "baking")
    row = canary(fleet, conn)
    with fleet.connect() as second, pytest.raises(psycopg.errors.ObjectInUse, match="being run by another session"):
        call(fleet, second)
    with pytest.raises(psycopg.errors.ObjectInUse, match="waits for the canary") as error:
        conn.execute(f"CALL shardmap.run_moves('{fleet.name}')")
    assert f"move {row['move']}, and is baking" in error.value.diag.message_detail and "end_canary" in error.value.diag.message_hint
    assert caller.is_alive()
    assert conn.execute("SELECT shardmap.end_canary(%s)", (fleet.name,)).fetchone() == (row["move"],)
    assert caller.end() is None
    row = canary(fleet, conn)
    assert (row["state"], row["move_state"], row["verdict"]) == ("ended", "flipped", "given up in state baking")
    conn.execute(f"CALL shardmap.run_moves('{fleet.name}')")
    assert canary(fleet, conn)["move_state"] == "done" and moves(fleet, conn) == []
    fleet.check(conn)
    with pytest.raises(psycopg.errors.UndefinedObject, match="no canary under way"):
        conn.execute("SELECT shardmap.end_canary(%s)", (fleet.name,))


def test_a_move_that_another_session_runs_is_waited_for(fleet, conn):
    """One of the rest, after it has passed, as a worker of start_moves() would."""
    held, rest = fleet.planned[0][0], [number for number, *_ in fleet.planned[1:]]
    caller = Caller(fleet, bake="'0.5 s'", **LOOSE)
    with fleet.connect() as other:
        other.execute("SELECT shardmap._hold_move(%s)", (held,))
        caller.start()
        wait_for(lambda: not caller.is_alive() or conn.execute("SELECT bool_and(state = 'done') FROM shardmap.moves WHERE id = ANY (%s)",
                                                               (rest,)).fetchone()[0], lambda: canary(fleet, conn))
        assert caller.is_alive() and canary(fleet, conn)["state"] == "spreading", caller.error
        other.execute("SELECT shardmap._release_move(%s)", (held,))
    assert caller.end() is None
    check_passed(fleet, conn)


def test_it_is_paused(fleet, conn):
    caller = Caller(fleet, bake="'1 s'", baseline="'1 h'")
    caller.start()
    caller.wait_for(conn, "measuring")
    number = canary(fleet, conn)["move"]
    conn.execute("SELECT shardmap.pause_move(%s)", (number,))
    assert caller.end() is None and canary(fleet, conn)["state"] == "measuring"
    with pytest.raises(psycopg.errors.ObjectInUse, match="waits for the canary"):
        conn.execute("SELECT shardmap.resume_move(%s)", (number,))
        conn.execute(f"CALL shardmap.run_move({number})")
    conn.execute("SELECT shardmap.end_canary(%s)", (fleet.name,))
    conn.execute(f"CALL shardmap.run_moves('{fleet.name}')")
    fleet.check(conn)


def test_it_is_not_cleaned_before_it_is_decided(fleet, conn):
    """Its session is gone: then it stays flipped, whoever runs it, however short shardmap.cleanup_delay is."""
    with fleet.connect(shardmap__crash_point="canary_baking=error") as other, pytest.raises(psycopg.Error, match="crash point"):
        call(fleet, other, **FOR_EVER)
    number = canary(fleet, conn)["move"]
    conn.execute(f"CALL shardmap.run_move({number})")
    assert canary(fleet, conn)["move_state"] == "flipped"
    conn.execute("SELECT shardmap.rollback_move(%s)", (number,))
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="has failed: its move was rolled back"):
        call(fleet, conn)
    check_taken_back(fleet, conn, rows(fleet, conn))


@pytest.mark.soak
@pytest.mark.parametrize("point", ["measuring", "moving", "baking", "baking:2", "spreading:3"])
def test_the_session_is_killed(fleet, point):
    with (crashing(fleet.tenants.cluster.coordinator), fleet.connect(shardmap__crash_point=f"canary_{point}") as runner,
          pytest.raises(psycopg.OperationalError)):
        call(fleet, runner, bake="'1 s'", **LOOSE)
    with fleet.connect() as conn:
        assert canary(fleet, conn)["state"] == point.split(":")[0]
        for key in moved_keys(fleet, conn):  # every kind of change, of which none is a difference
            conn.execute(f"UPDATE {fleet.table} SET note = 'new' WHERE k = {key} AND id = 2")
            conn.execute(f"DELETE FROM {fleet.table} WHERE k = {key} AND id IN (3, 4)")
            conn.execute(f"INSERT INTO {fleet.table} VALUES ({key}, 4), ({key}, 5)")
        want = rows(fleet, conn)
        call(fleet, conn)
        assert rows(fleet, conn) == want
        check_passed(fleet, conn)


@pytest.mark.soak
@pytest.mark.parametrize("point", ["canary_taking_back", "canary_taking_back:2", "move_fenced"])
def test_the_session_is_killed_on_the_way_back(fleet, point):
    with fleet.connect() as conn:
        with fleet.connect(shardmap__crash_point="canary_baking=error") as other, pytest.raises(psycopg.Error, match="crash point"):
            call(fleet, other, **FOR_EVER)
        conn.execute("SELECT shardmap.rollback_move(%s)", (canary(fleet, conn)["move"],))
        update(fleet, conn, range(1, COUNT + 1))
        want = rows(fleet, conn)
    with crashing(fleet.tenants.cluster.coordinator), fleet.connect(shardmap__crash_point=point) as runner, pytest.raises(psycopg.OperationalError):
        call(fleet, runner)
    with fleet.connect() as conn:
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="has failed: its move was rolled back"):
            call(fleet, conn)
        check_taken_back(fleet, conn, want)


def test_what_is_refused(fleet, conn):
    for limit in ("bake => '0'", "share => 0", "share => 1.5", "max_slowdown => 0.5", "max_error_rate => -1", "baseline => '-1 s'", "min_statements => NULL"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="out of range"):
            conn.execute(f"CALL shardmap.canary('{fleet.name}', {limit})")
    with pytest.raises(psycopg.errors.UndefinedObject, match="keyspace .* does not exist"):
        conn.execute("CALL shardmap.canary('nowhere')")
    with fleet.connect(shardmap__crash_point="move_copied=error") as other, pytest.raises(psycopg.Error, match="crash point"):
        other.execute(f"CALL shardmap.run_move({fleet.planned[0][0]})")
    with pytest.raises(psycopg.errors.ObjectInUse, match="is under way"):
        call(fleet, conn)
    for number, *_ in fleet.planned:
        conn.execute("SELECT shardmap.cancel_move(%s)", (number,))
        conn.execute(f"CALL shardmap.run_move({number})")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="has no planned moves") as error:
        call(fleet, conn)
    assert "shardmap.rebalance" in error.value.diag.message_hint
    assert canary(fleet, conn) is None

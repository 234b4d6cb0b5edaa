"""Databases of other encodings than UTF-8: rows are right whatever letters keys have; names beyond ASCII are refused.

A key's owner is that of its text in UTF-8, so that it is the same in databases of every encoding.
"""

import psycopg
import pytest
from asking import Database

KEYS = {"LATIN1": ["é", "è", "ü", "ñandú", "Ä ", "ÿ", "naïve", "a", "½"],
        "EUC_JP": ["日本", "東京", "大阪 ", "かな", "カナ", "a", "京都"],
        "SQL_ASCII": ["é", "日本", "ü", "a"]}


@pytest.fixture(scope="module", params=list(KEYS))
def encoding(request):
    return request.param


@pytest.fixture(scope="module")
def db(shared_cluster, encoding):
    name = f"encoding_{encoding.lower()}"
    shared_cluster.new_database(name, f"TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'")
    database = Database(shared_cluster, name)
    database.psql("CREATE TABLE t (k text PRIMARY KEY, v text); CREATE TABLE c (k char(10) PRIMARY KEY, v int);"
                  "SELECT shardmap.distribute_table('t', 'k'), shardmap.distribute_table('c', 'k')")
    yield database
    database.close()
    shared_cluster.drop_database(name)


@pytest.fixture
def conn(db, encoding):
    with db.connect(client_encoding="UTF8") as conn:
        # A client of SQL_ASCII gets the bytes as they are; psycopg would call them bytes.
        conn.execute("SET client_encoding = 'UTF8'")
        conn.execute("DELETE FROM t; DELETE FROM c")
        yield conn


@pytest.fixture(scope="module")
def utf8(shared_cluster):
    """A database of UTF-8 with shards of the same names: its map is the same."""
    shared_cluster.new_database("encoding_utf8")
    with psycopg.connect(shared_cluster.dsn("encoding_utf8"), autocommit=True) as conn:
        yield conn
    shared_cluster.drop_database("encoding_utf8")


def test_rows_are_found_by_their_keys(db, conn, encoding):
    for number, key in enumerate(KEYS[encoding]):
        conn.execute("INSERT INTO t VALUES (%s, %s)", (key, key))
        conn.execute("INSERT INTO c VALUES (%s, %s)", (key, number))
    for number, key in enumerate(KEYS[encoding]):
        owner = int(conn.execute("SELECT shard_for(%s::text)", (key,)).fetchone()[0].removeprefix("shard-"))
        for routing in ("on", "off"):
            conn.execute(f"SET shardmap.enable_routing = {routing}")
            _, asked = db.asked(lambda: conn.execute("SELECT v FROM t WHERE k = %s", (key,)))
            assert routing == "off" or set(asked) == {owner}
            for prepare in (False, True):
                found = conn.execute("SELECT v FROM t WHERE k = %s", (key,), prepare=prepare).fetchall()
                assert found == [(key,)], key
                found = conn.execute("SELECT v FROM c WHERE k = %s", (key,), prepare=prepare).fetchall()
                assert found == [(number,)], key
            many = conn.execute("SELECT v FROM t WHERE k = ANY (%s)", ([key, "a"],)).fetchall()
            assert {row[0] for row in many} == {key, "a"}
    with conn.cursor().copy("COPY t (k) FROM STDIN") as copy:
        for key in KEYS[encoding]:
            copy.write_row((key + "!",))
    for key in KEYS[encoding]:
        assert conn.execute("SELECT count(*) FROM t WHERE k = %s", (key + "!",)).fetchone() == (1,)
    assert conn.execute("SELECT count(*) FROM t").fetchone() == (2 * len(KEYS[encoding]),)


def test_a_table_with_rows_is_distributed_and_taken_back(db, conn, encoding):
    conn.execute("CREATE TABLE filled (k text PRIMARY KEY)")
    for key in KEYS[encoding]:
        conn.execute("INSERT INTO filled VALUES (%s)", (key,))
    conn.execute("SELECT shardmap.distribute_table('filled', 'k')")
    for key in KEYS[encoding]:
        assert conn.execute("SELECT k FROM filled WHERE k = %s", (key,)).fetchall() == [(key,)]
    conn.execute("SELECT shardmap.undistribute_table('filled')")
    found = conn.execute("SELECT k FROM filled").fetchall()
    assert sorted(found) == sorted((key,) for key in KEYS[encoding])
    conn.execute("DROP TABLE filled")


def test_the_owner_is_the_same_in_every_encoding(db, conn, utf8, encoding):
    sql = """SELECT %(key)s::text, token_for(%(key)s::text), shard_for(%(key)s::text), shard_for(%(key)s::char(10)),
        shardmap.canonical_key(%(key)s::text), ('x' || right(md5(convert_to(%(key)s::text, 'UTF8')), 8))::bit(32)::bigint"""
    for key in KEYS[encoding]:
        here = conn.execute(sql, {"key": key}).fetchone()
        assert here == utf8.execute(sql, {"key": key}).fetchone()
        assert here[1] == here[5] and here[4] == key
        # By the shard's own SQL too.
        with db.shard(0) as shard:
            shard.execute("SET client_encoding = 'UTF8'")
            there = shard.execute("SELECT ('x' || right(md5(convert_to(%s::text, 'UTF8')), 8))::bit(32)::bigint", (key,))
            assert there.fetchone()[0] == here[1]


def test_pins(db, conn, encoding):
    for key in KEYS[encoding]:
        if key.endswith(" "):
            continue  # another key in the table of char(10), which pin_key says
        owner = conn.execute("SELECT shard_for(%s::text)", (key,)).fetchone()[0]
        other = "shard-0" if owner != "shard-0" else "shard-1"
        conn.execute("SELECT shardmap.pin_key(%s::text, %s)", (key, other))
        assert conn.execute("SELECT shard_for(%s::text)", (key,)).fetchone()[0] == other
        exported = conn.execute("SELECT shardmap.export_map()::text").fetchone()[0]
        assert f'"{key}"' in exported
        conn.execute("INSERT INTO t VALUES (%s, 'pinned')", (key,))
        with db.shard(int(other.removeprefix("shard-"))) as shard:
            assert shard.execute("SELECT count(*) FROM t WHERE v = 'pinned'").fetchone() == (1,)
        conn.execute("DELETE FROM t WHERE k = %s", (key,))
        conn.execute("SELECT shardmap.unpin_key(%s::text)", (key,))
        assert conn.execute("SELECT shard_for(%s::text)", (key,)).fetchone()[0] == owner


def test_ranges_go_by_the_bytes_of_utf8(db, conn, encoding):
    keys = sorted(KEYS[encoding], key=lambda key: key.encode())
    middle = keys[len(keys) // 2]
    server = db.cluster.shard_server(0)
    conn.execute("SELECT shardmap.create_keyspace('ranged', 'range', range_order => 'text')")
    for number in range(2):
        conn.execute("SELECT shardmap.add_shard(%s, '127.0.0.1', %s, %s, keyspace => 'ranged')",
                     (f"r{number}", server.port, db.cluster.shard_database(number, db.name)))
    conn.execute("SELECT shardmap.set_range('ranged', NULL, %s, 'r0')", (middle,))
    conn.execute("SELECT shardmap.set_range('ranged', %s, NULL, 'r1')", (middle,))
    for key in keys:
        owner = conn.execute("SELECT shard_for(%s::text, 'ranged')", (key,)).fetchone()[0]
        assert owner == ("r1" if key.encode() >= middle.encode() else "r0")
    conn.execute("CREATE TABLE ranged (k text PRIMARY KEY); SELECT shardmap.distribute_table('ranged', 'k', 'ranged')")
    conn.execute("INSERT INTO ranged VALUES (%s)", (middle,))
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="has rows on shard"):
        conn.execute("SELECT shardmap.set_range('ranged', %s, NULL, 'r0', version) FROM shardmap.key_range"
                     " WHERE keyspace = 'ranged' AND upper IS NULL", (middle,))


@pytest.mark.parametrize("sql", [
    "SELECT shardmap.create_keyspace('{}')", "SELECT shardmap.add_shard('{}', '127.0.0.1', 1, 'x')",
    'CREATE TABLE "x{}" (k int PRIMARY KEY); SELECT shardmap.distribute_table(\'"x{}"\', \'k\')',
    'CREATE TABLE x (k int PRIMARY KEY, "{}" int); SELECT shardmap.distribute_table(\'x\', \'k\')',
    'CREATE SCHEMA "{}"; CREATE TABLE "{}".x (k int PRIMARY KEY); SELECT shardmap.distribute_table(\'"{}".x\', \'k\')'])
def test_names_beyond_ascii_are_refused(conn, encoding, sql):
    letter = KEYS[encoding][0]
    with conn.transaction(force_rollback=True):
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="has letters beyond ASCII"):
            conn.execute(sql.replace("{}", letter))


def test_two_names_of_a_with_are_not_one(conn, encoding):
    """Read without loss: else the second would pass for the first, and its rows for those of the first's shard."""
    one, two, *rest = KEYS[encoding]
    conn.execute("INSERT INTO t SELECT i::text, 'x' FROM generate_series(1, 40) i")
    found = conn.execute(f'WITH "{one}" AS (SELECT * FROM t WHERE k = \'3\'), "{two}" AS (SELECT * FROM t)'
                         f' SELECT (SELECT count(*) FROM "{one}"), (SELECT count(*) FROM "{two}")').fetchone()
    assert found == (1, 40)


def test_messages_are_ascii(conn, encoding):
    letter = KEYS[encoding][0]
    with pytest.raises(psycopg.errors.UndefinedObject) as caught:
        conn.execute("SELECT shard_for('x'::text, %s)", (letter,))
    escaped = "".join(f"\\u{{{ord(c):x}}}" for c in letter)
    assert caught.value.diag.message_primary == f'keyspace "{escaped}" does not exist'


def test_a_comment_is_read_behind_other_letters(db, conn, encoding):
    """Positions in a statement's text are those of its bytes."""
    conn.execute("SET shardmap.fanout_policy = 'error'")
    letters = "".join(KEYS[encoding])
    for text in (f"SELECT '{letters}'; /* shardmap: allow fan-out */ SELECT count(*) FROM t; SELECT '{letters}'",
                 f"SELECT '{letters}'; SELECT count(*) FROM t /* shardmap: allow fan-out */; SELECT 1"):
        psycopg.ClientCursor(conn).execute(text)
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        psycopg.ClientCursor(conn).execute(
            f"SELECT '{letters}' /* shardmap: allow fan-out */; SELECT count(*) FROM t; SELECT '{letters}'")


def test_bytes_that_are_no_text(db, encoding):
    """SQL_ASCII takes any bytes. As a key they are hashed as they are; as a pin, which is exported as JSON, refused."""
    if encoding != "SQL_ASCII":
        pytest.skip("Postgres refuses them")
    with db.connect() as conn:
        conn.execute(r"INSERT INTO t VALUES (E'\xe9', 'bytes')")
        assert conn.execute(r"SELECT count(*) FROM t WHERE k = E'\xe9'").fetchone() == (1,)
        with pytest.raises(psycopg.errors.CharacterNotInRepertoire):
            conn.execute(r"SELECT shardmap.pin_key(E'\xe9'::text, 'shard-0')")
        conn.execute(r"DELETE FROM t WHERE k = E'\xe9'")

"""The tables: made twice in one database, distributed in schema `dist` and plain in schema `plain`.

A statement names no schema; the search_path of its session decides which tables it means. What always holds: both
schemas hold the same objects and, when a round starts, the same rows. All tables have the columns k (the key), id, a, b,
n, d and r (of the key's type), with primary key (k, id), so that any two of one family can be joined.
"""

import dataclasses

from .values import FAMILY, random_text

SCHEMAS = ("dist", "plain")
USER = "differential_user"  # an ordinary role, to whom row security applies


@dataclasses.dataclass(frozen=True)
class Table:
    name: str
    type: str
    keyspace: str = None  # None: local in both schemas
    kind: str = "table"  # or "view"
    base: str = None  # of a view: its table
    secured: bool = False
    reference: bool = False  # every shard has a copy

    @property
    def distributed(self):
        return self.keyspace is not None and not self.reference

    @property
    def family(self):
        return FAMILY[self.type]

    @property
    def stored(self):
        return self.base or self.name


TABLES = [
    Table("acct", "int4", "main"), Table("item", "int8", "main"), Table("tiny", "int2", "main"),
    Table("price", "numeric", "main"), Table("odd", "int4", "main"), Table("gen", "int4", "main"),
    Table("doc", "text", "main"), Table("note", "varchar(20)", "main"), Table("tag", "char(8)", "main"),
    Table("label", "char(8)", "main"), Table("sec", "text", "main", secured=True),
    Table("person", "uuid", "main"), Table("login", "uuid", "main"),
    Table("day", "date", "main"), Table("event", "timestamp", "main"), Table("visit", "timestamptz", "main"),
    Table("blob", "bytea", "main"), Table("chunk", "bytea", "main"),
    Table("s_acct", "int4", "second"), Table("s_doc", "text", "second"), Table("s_person", "uuid", "second"),
    Table("m_acct", "int8", "by_modulo"), Table("m_doc", "text", "by_modulo"),
    Table("r_acct", "int4", "by_number"), Table("r_item", "int8", "by_number"), Table("r_doc", "text", "by_text"),
    Table('"we ird""; x"', "text", "main"), Table("coded", "text", "main"),
    Table("vault", "int4", "main", secured=True), Table("collated", "text", "main"),
    Table("ref_num", "int4", "main", reference=True), Table("ref_word", "text", "main", reference=True),
    Table("loc", "int4"), Table("loc_doc", "text"), Table("loc_person", "uuid"), Table("loc_day", "date"),
]
VIEWS = [
    Table("v_acct", "int4", "main", "view", "acct"), Table("v_doc", "text", "main", "view", "doc"),
    Table("vb_item", "int8", "main", "view", "item"), Table("v_check", "uuid", "main", "view", "person"),
]
# Read only: (name, type, SQL).
READ_VIEWS = [
    Table("v_union", "int4", "main", "read view"), Table("v_group", "text", "main", "read view"),
    Table("v_join", "int4", "main", "read view"), Table("v_last", "text", "main", "read view"),
]
_VIEW_SQL = """
CREATE VIEW v_acct AS SELECT * FROM acct;
CREATE VIEW v_doc AS SELECT k, id, a, b, n, d, r FROM doc WHERE id > 2;
CREATE VIEW vb_item WITH (security_barrier) AS SELECT k, id, a, b, n, d, r FROM item WHERE a IS DISTINCT FROM 3;
CREATE VIEW v_check AS SELECT * FROM person WHERE id < 1000 WITH CHECK OPTION;
CREATE VIEW v_union AS SELECT k, id, a, b, n, d, r FROM acct UNION ALL SELECT k, id, a, b, n, d, r FROM s_acct;
CREATE VIEW v_group AS SELECT k, count(*)::int AS id, max(a) AS a, min(b) AS b, sum(n) AS n, max(d) AS d, min(r) AS r
    FROM doc GROUP BY k;
CREATE VIEW v_join AS SELECT x.k, x.id, y.a, x.b, y.n, x.d, y.r FROM acct x LEFT JOIN odd y ON x.k = y.k AND x.id = y.id;
CREATE VIEW v_nested AS SELECT k, id, a, b, n, d, r FROM v_join WHERE id > 1 UNION SELECT k, id, a, b, n, d, r FROM v_acct;
CREATE VIEW v_keyed AS SELECT * FROM note WHERE k = current_setting('app.text', true);
CREATE VIEW v_invoker WITH (security_invoker) AS SELECT k, id, a, b, n, d, r FROM login WHERE a IS NOT NULL;
CREATE VIEW v_last AS SELECT DISTINCT ON (k) k, id, a, b, n, d, r FROM note ORDER BY k, id DESC;
"""
_POLICIES = """
ALTER TABLE sec ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON sec USING (k = current_setting('app.text', true));
ALTER TABLE vault ENABLE ROW LEVEL SECURITY;
CREATE POLICY reads ON vault FOR SELECT USING (a IS DISTINCT FROM 3);
CREATE POLICY adds ON vault FOR INSERT WITH CHECK (id < 90000);
CREATE POLICY changes ON vault FOR UPDATE USING (a > 1) WITH CHECK (coalesce(a, 0) < 15);
CREATE POLICY removes ON vault FOR DELETE USING (b IS NOT NULL);
CREATE POLICY limits ON vault AS RESTRICTIVE USING (k IN (SELECT x.k FROM loc x) OR k > 2);
"""
_FUNCTIONS = """
CREATE FUNCTION inlined(key int8) RETURNS TABLE (c1 int4, c2 int4) LANGUAGE sql STABLE AS
    'SELECT x.id, x.a FROM item x WHERE x.k = key';
CREATE FUNCTION counted(key text) RETURNS int8 LANGUAGE plpgsql STABLE AS
    'BEGIN RETURN (SELECT count(*) FROM doc x WHERE x.k = key); END';
CREATE FUNCTION every_key() RETURNS SETOF int4 LANGUAGE plpgsql STABLE AS
    'BEGIN RETURN QUERY SELECT x.k FROM acct x WHERE x.a = 2; END';
"""
COLUMNS = ["k", "id", "a", "b", "n", "d", "r"]


def types_of(table):
    return {"k": table.type, "id": "int4", "a": "int4", "b": "text", "n": "numeric", "d": "date", "r": table.type}


def _create(table):
    columns = {name: f"{name} {type}" for name, type in types_of(table).items()}
    columns["k"] += " NOT NULL"
    columns["n"] = "n numeric(10,2)"
    order, tail = COLUMNS, ""
    if table.name == "odd":  # the key in the middle, and a hole in front of it
        order = ["b", "a", "k", "r", "id", "d", "n"]
        columns["b"] = "gone int, b text"
        tail = "; ALTER TABLE odd DROP COLUMN gone"
    elif table.name == "gen":
        columns["id"] = "id int4 GENERATED BY DEFAULT AS IDENTITY (START 500)"
        columns["a"] = "a int4 DEFAULT 5"
        columns["n"] = "n numeric(10,2) GENERATED ALWAYS AS (a * 2.5) STORED"
        columns["b"] = "b text DEFAULT 'dflt'"
        columns["d"] = "d date DEFAULT '2024-05-05'"
    elif table.name == "collated":
        columns["k"] = 'k text COLLATE "C" NOT NULL'
    elif table.name == "coded":
        columns["k"] = "k code NOT NULL"
    if table.name in ("acct", "doc"):
        tail = f"; CREATE INDEX ON {table.name} (a)"
    check = ", CHECK (a < 1000)"
    return f"CREATE TABLE {table.name} ({', '.join(columns[c] for c in order)}, PRIMARY KEY (k, id){check}){tail};\n"


def stored_columns(table):
    """The columns that a row is given."""
    return [c for c in COLUMNS if not (table.stored == "gen" and c == "n")]


def create(cluster):
    """Keyspaces, roles, and both schemas. Keyspace main has the cluster's shards, the others databases of their own."""
    psql = cluster.psql
    for keyspace, shards, options in (("second", 3, ""), ("by_modulo", 2, ", 'modulo'"),
                                      ("by_number", 4, ", 'range', range_order => 'integer'"),
                                      ("by_text", 4, ", 'range', range_order => 'text'")):
        psql(f"SELECT shardmap.create_keyspace('{keyspace}'{options})")
        for shard in range(shards):
            server, database = cluster.shard_server(shard), f"{keyspace}_{shard}"
            server.psql(f"CREATE DATABASE {database}")
            psql(f"SELECT shardmap.add_shard('{keyspace}-{shard}', host => '127.0.0.1', port => {server.port}, "
                 f"dbname => '{database}', keyspace => '{keyspace}')")
    for keyspace, bounds in (("by_number", [None, "0", "3", "8", None]), ("by_text", [None, "A", "b", "x", None])):
        for shard, (lower, upper) in enumerate(zip(bounds, bounds[1:])):
            lower, upper = (("NULL" if bound is None else f"'{bound}'") for bound in (lower, upper))
            psql(f"SELECT shardmap.set_range('{keyspace}', {lower}, {upper}, '{keyspace}-{shard}')")
    psql("SELECT shardmap.pin_key('5', 'shard-2'); SELECT shardmap.pin_key('a', 'shard-3')")
    psql(f"CREATE ROLE {USER} LOGIN")
    psql(f"""DO $$ DECLARE s text; BEGIN FOR s IN SELECT srvname FROM pg_foreign_server LOOP
        EXECUTE format('CREATE USER MAPPING FOR {USER} SERVER %I OPTIONS (user ''postgres'', password_required ''false'')', s); END LOOP; END $$""")
    domain = "CREATE DOMAIN public.code AS text CHECK (VALUE <> 'no')"
    psql(domain)
    for shard in range(cluster.shards):
        cluster.shard_psql(shard, domain)
    for schema in SCHEMAS:
        tables = "".join(_create(table) for table in TABLES)
        views = _VIEW_SQL.split("\n", 2)
        psql(f"CREATE SCHEMA {schema}; SET search_path = {schema}, public;\n{tables}{_POLICIES}{views[1]}")
        if schema == "dist":
            for table in TABLES:
                name = ("dist." + table.name).replace("'", "''")
                if table.reference:
                    psql(f"SELECT shardmap.distribute_reference('{name}')")
                elif table.keyspace:
                    psql(f"SELECT shardmap.distribute_table('{name}', 'k', '{table.keyspace}')")
        psql(f"SET search_path = {schema}, public;\n{views[2]}{_FUNCTIONS}")
        psql(f"GRANT USAGE ON SCHEMA {schema} TO {USER}; GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {USER};"
             f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {USER}")
        psql(f"SET search_path = {schema}; REVOKE ALL ON price FROM {USER};"
             f"GRANT SELECT (k, id, a, b, r), INSERT (k, id, a), UPDATE (a, b), DELETE ON price TO {USER}")
    psql(AUDIT)
    # Small batches, so that scans and inserts take more than one.
    for server in ("shard-1", "second-0", "by_number-1", "by_text-2"):
        psql(f'ALTER SERVER "{server}" OPTIONS (SET fetch_size \'2\', SET batch_size \'3\')')


AUDIT = """CREATE FUNCTION public.misplaced_rows() RETURNS TABLE (part text, rows bigint) LANGUAGE plpgsql AS $$
DECLARE p record;
BEGIN
    FOR p IN SELECT i.inhrelid::regclass::text AS name, t.keyspace, s.srvname FROM shardmap.logical_table t
        JOIN pg_inherits i ON i.inhparent = t.relation JOIN pg_foreign_table f ON f.ftrelid = i.inhrelid
        JOIN pg_foreign_server s ON s.oid = f.ftserver
    LOOP
        part := p.name;
        EXECUTE format('SELECT count(*) FROM %s WHERE shard_for(k, %L) IS DISTINCT FROM %L', p.name, p.keyspace, p.srvname)
            INTO rows;
        IF rows > 0 THEN RETURN NEXT; END IF;
    END LOOP;
END $$"""

_TEXTS = ["x", "y", "z", "", "tab\there", "q'uote", None, None]


def random_row(rng, table, id):
    """A row as texts, None for null, in the order of stored_columns."""
    row = {
        "k": random_text(rng, table.type), "id": str(id),
        "a": rng.choice([None, *map(str, range(8))]), "b": rng.choice(_TEXTS),
        "n": rng.choice([None, "0.50", "1.00", "2.25", "10.00", "-3.10"]),
        "d": rng.choice([None, "2024-01-01", "2024-02-29", "2024-03-10"]),
        "r": None if rng.random() < 0.2 else random_text(rng, table.type),
    }
    return [row[c] for c in stored_columns(table)]


def random_rows(rng, table, count):
    return [random_row(rng, table, id) for id in range(1, count + 1)]

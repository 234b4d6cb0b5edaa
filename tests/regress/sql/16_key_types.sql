-- Every type that a key can have: rows, operator classes, and where a key written in another way goes.
\set SHOW_CONTEXT never
SET shardmap.fanout_policy = 'allow';
SET timezone = 'America/New_York';
SELECT count(*) FROM shardmap.run_on_shards('CREATE DOMAIN tag AS varchar(20) CHECK (VALUE <> ''''); CREATE DOMAIN wide AS bigint; CREATE DOMAIN wider AS wide') WHERE success;
CREATE DOMAIN tag AS varchar(20) CHECK (VALUE <> '');
CREATE DOMAIN wide AS bigint;
CREATE DOMAIN wider AS wide;
CREATE FUNCTION sample(type text, i integer) RETURNS text LANGUAGE sql AS $$
    SELECT CASE
        WHEN type = 'uuid' THEN md5(i::text)
        WHEN type = 'bytea' THEN '\x' || md5(i::text)
        WHEN type ~ '^(date|timestamp)' THEN (timestamp '2024-01-01' + i * interval '36 hours 1.5 seconds')::text
        WHEN type ~ '^numeric' THEN i || '.50'
        ELSE i::text END $$;
DO $$
DECLARE
    type text;
    n integer := 0;
BEGIN
    FOREACH type IN ARRAY ARRAY['smallint', 'integer', 'bigint', 'text', 'varchar(10)', 'char(8)', 'uuid', 'numeric', 'numeric(12,2)',
        'date', 'timestamp', 'timestamptz', 'timestamptz(0)', 'bytea', 'tag', 'wider'] LOOP
        n := n + 1;
        EXECUTE format('CREATE TABLE keys_%s (k %s PRIMARY KEY, v integer)', lpad(n::text, 2, '0'), type);
        EXECUTE format('INSERT INTO keys_%s SELECT sample(%L, i)::%s, i FROM generate_series(1, 80) i', lpad(n::text, 2, '0'), type, type);
        PERFORM shardmap.distribute_table(format('keys_%s', lpad(n::text, 2, '0'))::regclass, 'k');
    END LOOP;
END
$$;
DO $$
DECLARE
    logical record;
    rows bigint; shards bigint; away bigint; again bigint;
BEGIN
    FOR logical IN SELECT * FROM shardmap.tables ORDER BY table_name::text LOOP
        EXECUTE format('SELECT count(*), count(DISTINCT tableoid) FROM %s', logical.table_name) INTO rows, shards;
        EXECUTE format('SELECT count(*) FROM %s x JOIN pg_foreign_table f ON f.ftrelid = x.tableoid JOIN pg_foreign_server s ON s.oid = f.ftserver '
            'WHERE shardmap.owner_of(x.k, ''main'') <> s.srvname', logical.table_name) INTO away;
        -- Written through the table again, each row lands where the copy has put it.
        EXECUTE format('WITH gone AS (DELETE FROM %1$s RETURNING k, v, tableoid::regclass::text AS part) SELECT count(*) FROM gone', logical.table_name) INTO again;
        EXECUTE format('INSERT INTO %1$s SELECT sample(%2$L, i)::%3$s, i FROM generate_series(1, 80) i', logical.table_name,
            logical.key_type::text, (SELECT format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = logical.table_name AND attname = 'k'));
        RAISE NOTICE '% %: % rows on % shards, % away from home, % deleted', logical.table_name, logical.key_type, rows, shards, away, again;
        EXECUTE format('SELECT count(*) FROM %s x JOIN pg_foreign_table f ON f.ftrelid = x.tableoid JOIN pg_foreign_server s ON s.oid = f.ftserver '
            'WHERE shardmap.owner_of(x.k, ''main'') <> s.srvname', logical.table_name) INTO away;
        IF away <> 0 THEN RAISE WARNING '% rows away from home', away; END IF;
    END LOOP;
END
$$;
SELECT c.keyspace, c.key_type, c.hash_function, c.family FROM shardmap.key_class c ORDER BY c.family, c.key_type::text;
SELECT o.opcname, amvalidate(o.oid) FROM pg_opclass o WHERE o.opcnamespace = 'shardmap'::regnamespace ORDER BY 1;
SELECT count(*) FROM pg_amop a JOIN pg_opfamily f ON f.oid = a.amopfamily WHERE f.opfname = 'main_integer_ops';
-- The classes are no members of the extension: pg_dump carries them.
SELECT count(*) FROM pg_depend d WHERE d.deptype = 'e' AND d.classid = 'pg_opclass'::regclass AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'pg_shardmap');
-- One key, written in other ways.
SELECT count(DISTINCT s) FROM (VALUES (shard_for(7::smallint)), (shard_for(7)), (shard_for(7::bigint)), (shard_for(7.00)), (shard_for('7')), (shard_for('7'::char(5)))) x (s);
SELECT count(DISTINCT s) FROM (VALUES (shard_for('2024-01-01 00:00'::timestamp)), (shard_for('2024-01-01'::date)), (shard_for('2023-12-31 19:00-05'::timestamptz))) x (s);
-- The hash functions that the classes share with Postgres' own.
SELECT shardmap.hash_date('2024-01-01') = hashint4('2024-01-01'::date - '2000-01-01'::date) AS date,
    shardmap.hash_timestamptz('2024-01-01 00:00+00') = timestamp_hash('2024-01-01 00:00') AS timestamptz;
-- Colocated tables of one keyspace may have other key types; dropping the keyspace takes its classes along.
SELECT shardmap.drop_keyspace('main');
DO $$
DECLARE
    name text;
BEGIN
    FOR name IN SELECT table_name FROM shardmap.tables LOOP PERFORM shardmap.undistribute_table(name::regclass); END LOOP;
END
$$;
CREATE FUNCTION rows(relation regclass, OUT n bigint) LANGUAGE plpgsql AS $$ BEGIN
    EXECUTE format('SELECT count(*) FROM %s', relation) INTO n; END $$;
SELECT count(*), min(rows(oid)), max(rows(oid)) FROM pg_class WHERE relname LIKE 'keys\___' AND relkind = 'r';
SELECT shardmap.drop_shard(name) FROM shardmap.shard ORDER BY number;
SELECT shardmap.drop_keyspace('main');
SELECT count(*) FROM pg_opclass WHERE opcnamespace = 'shardmap'::regnamespace;
SELECT count(*) FROM pg_proc WHERE pronamespace = 'shardmap'::regnamespace AND proname LIKE 'hash\_main%';

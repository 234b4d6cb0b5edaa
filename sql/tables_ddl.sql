-- The shard table: what it is made of, and how it is made.
--
-- Decides the statements that make a table of the same name on another server. What always holds: they are computed by
-- one query of built-ins, which reads a table here (to distribute it) or on a shard (to add another shard, or to bring
-- the table back), so that all shards' tables are alike; all names are qualified. Left out: what only the coordinator
-- can compute (sequences, identity, defaults of functions of its own) and what only it has (grants, policies, views).
-- Refuses types and collations that the shard does not have, and a table that is there already. Read tables_local.sql
-- next.

-- Query, for any server since 13 under a search_path of pg_catalog, for the statements that make a table: kind (table,
-- detail, check, constraint, deferrable, foreign key, index, comment), statement, in the order in which to run them. `text_collation`: qualified name to give to text
-- columns that have the default collation; may be empty.
CREATE FUNCTION shardmap._table_ddl_sql(schema text, name text, text_collation text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format($query$
WITH rel AS (
    SELECT c.oid, c.reltoastrelid, c.reloptions, c.relreplident, format('%%I.%%I', n.nspname, c.relname) AS name
      FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = %1$L AND c.relname = %2$L
), col AS (
    SELECT a.*, t.typcollation, t.typstorage, to_jsonb(a) ->> 'attcompression' AS compression,
        pg_get_expr(d.adbin, d.adrelid) AS expr,
        EXISTS (SELECT FROM pg_catalog.pg_depend x
                 WHERE x.classid = 'pg_attrdef'::regclass AND x.objid = d.oid AND x.deptype = 'n'
                   AND (x.refclassid = 'pg_proc'::regclass OR x.refobjid IN
                        (SELECT s.seqrelid FROM pg_catalog.pg_sequence s))) AS only_there
      FROM rel JOIN pg_catalog.pg_attribute a ON a.attrelid = rel.oid AND a.attnum > 0 AND NOT a.attisdropped
      JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
      LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
), con AS (
    SELECT o.* FROM rel JOIN pg_catalog.pg_constraint o ON o.conrelid = rel.oid AND o.contype IN ('c', 'p', 'u', 'x')
), ind AS (
    SELECT i.*, c.relname FROM rel JOIN pg_catalog.pg_index i ON i.indrelid = rel.oid
      JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid WHERE i.indisvalid
), storage AS (
    SELECT format('%%I=%%L', split_part(o, '=', 1), substr(o, strpos(o, '=') + 1)) AS option
      FROM rel, unnest(rel.reloptions) o
    UNION ALL
    SELECT format('toast.%%I=%%L', split_part(o, '=', 1), substr(o, strpos(o, '=') + 1))
      FROM rel JOIN pg_catalog.pg_class c ON c.oid = rel.reltoastrelid, unnest(c.reloptions) o
), ddl (step, kind, position, statement) AS (
    SELECT 1, 'table', 0::bigint, format('CREATE TABLE %%s (%%s)', rel.name,
        (SELECT string_agg(format('%%I %%s%%s%%s%%s', c.attname, format_type(c.atttypid, c.atttypmod),
            CASE WHEN c.attcollation = 0 THEN ''
                WHEN c.attcollation <> c.typcollation THEN (SELECT format(' COLLATE %%I.%%I', n.nspname, l.collname)
                    FROM pg_catalog.pg_collation l JOIN pg_catalog.pg_namespace n ON n.oid = l.collnamespace
                    WHERE l.oid = c.attcollation)
                WHEN c.attcollation = 'pg_catalog."default"'::regcollation AND %3$L <> '' THEN ' COLLATE ' || %3$L
                ELSE '' END,
            CASE WHEN c.attgenerated = 's' THEN format(' GENERATED ALWAYS AS (%%s) STORED', c.expr)
                WHEN c.attgenerated <> '' THEN format(' GENERATED ALWAYS AS (%%s) VIRTUAL', c.expr)
                WHEN c.expr IS NULL OR c.only_there OR strpos(c.expr, 'nextval(') > 0 THEN ''
                ELSE ' DEFAULT ' || c.expr END,
            CASE WHEN c.attnotnull THEN ' NOT NULL' ELSE '' END), ', ' ORDER BY c.attnum) FROM col c)) FROM rel
    UNION ALL
    SELECT 2, 'detail', 0, format('ALTER TABLE %%s SET (%%s)', rel.name, (SELECT string_agg(s.option, ', ') FROM storage s))
      FROM rel WHERE EXISTS (SELECT FROM storage)
    UNION ALL
    SELECT 2, 'detail', c.attnum, format('ALTER TABLE %%s ALTER COLUMN %%I SET %%s', rel.name, c.attname, x.what)
      FROM rel, col c, LATERAL (VALUES
        (CASE WHEN c.attstorage <> c.typstorage THEN 'STORAGE ' ||
            CASE c.attstorage WHEN 'p' THEN 'PLAIN' WHEN 'e' THEN 'EXTERNAL' WHEN 'x' THEN 'EXTENDED' ELSE 'MAIN' END END),
        (CASE c.compression WHEN 'p' THEN 'COMPRESSION pglz' WHEN 'l' THEN 'COMPRESSION lz4' END),
        (CASE WHEN c.attstattarget >= 0 THEN 'STATISTICS ' || c.attstattarget END),
        ((SELECT '(' || string_agg(o, ', ') || ')' FROM unnest(c.attoptions) o WHERE o LIKE 'n_distinct%%'))) x (what)
     WHERE x.what IS NOT NULL
    UNION ALL
    SELECT 3, CASE WHEN o.contype = 'c' THEN 'check' WHEN o.condeferrable THEN 'deferrable' ELSE 'constraint' END,
        row_number() OVER (ORDER BY o.contype, o.conname),
        format('ALTER TABLE %%s ADD CONSTRAINT %%I %%s', rel.name, o.conname, pg_get_constraintdef(o.oid)) FROM rel, con o
    UNION ALL
    SELECT 6, 'foreign key', row_number() OVER (ORDER BY o.conname),
        format('ALTER TABLE %%s ADD CONSTRAINT %%I %%s', rel.name, o.conname, pg_get_constraintdef(o.oid))
      FROM rel JOIN pg_catalog.pg_constraint o ON o.conrelid = rel.oid AND o.contype = 'f'
    UNION ALL
    SELECT 4, 'index', row_number() OVER (ORDER BY i.relname), pg_get_indexdef(i.indexrelid)
      FROM ind i WHERE i.indexrelid NOT IN (SELECT o.conindid FROM con o)
    UNION ALL
    SELECT 5, 'index', row_number() OVER (ORDER BY s.stxname), pg_get_statisticsobjdef(s.oid)
      FROM rel JOIN pg_catalog.pg_statistic_ext s ON s.stxrelid = rel.oid
    UNION ALL
    SELECT 6, 'index', 0, format('ALTER TABLE %%s REPLICA IDENTITY %%s', rel.name,
        CASE rel.relreplident WHEN 'f' THEN 'FULL' WHEN 'n' THEN 'NOTHING' ELSE (SELECT format('USING INDEX %%I', i.relname)
            FROM ind i WHERE i.indisreplident) END) FROM rel WHERE rel.relreplident <> 'd'
    UNION ALL
    SELECT 7, 'comment', d.objsubid, CASE d.objsubid WHEN 0 THEN format('COMMENT ON TABLE %%s IS %%L', rel.name, d.description)
        ELSE format('COMMENT ON COLUMN %%s.%%I IS %%L', rel.name, c.attname, d.description) END
      FROM rel JOIN pg_catalog.pg_description d ON d.classoid = 'pg_class'::regclass AND d.objoid = rel.oid
      LEFT JOIN col c ON c.attnum = d.objsubid
    UNION ALL
    SELECT 8, CASE o.contype WHEN 'c' THEN 'check' ELSE 'constraint' END, row_number() OVER (ORDER BY o.conname),
        format('COMMENT ON CONSTRAINT %%I ON %%s IS %%L', o.conname, rel.name, d.description)
      FROM rel, con o JOIN pg_catalog.pg_description d ON d.classoid = 'pg_constraint'::regclass AND d.objoid = o.oid
    UNION ALL
    SELECT 9, 'index', row_number() OVER (ORDER BY i.relname),
        format('COMMENT ON INDEX %%I.%%I IS %%L', %1$L, i.relname, d.description)
      FROM rel, ind i JOIN pg_catalog.pg_description d ON d.classoid = 'pg_class'::regclass AND d.objoid = i.indexrelid
     WHERE d.objsubid = 0
)
SELECT d.kind, d.statement FROM ddl d ORDER BY d.step, d.position
$query$, schema, name, coalesce(text_collation, ''))
$$;
COMMENT ON FUNCTION shardmap._table_ddl_sql(text, text, text) IS 'query for the statements that make a table of the same name on another server';
REVOKE ALL ON FUNCTION shardmap._table_ddl_sql(text, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._table_ddl_sql(text, text, text) TO shardmap_admin;

CREATE FUNCTION shardmap._check_shard_can_hold(relation regclass, shard text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    schema text;
    name text;
    missing text[];
BEGIN
    SELECT n.nspname, c.relname INTO STRICT schema, name
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation;
    IF EXISTS (SELECT FROM shardmap.remote_rows(shard, format('SELECT c.relkind::text AS kind FROM pg_catalog.pg_class c '
            'JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %L AND c.relname = %L',
            schema, name))) THEN
        RAISE EXCEPTION 'relation "%" already exists on shard "%"', name, shard
            USING ERRCODE = 'duplicate_table', DETAIL = format('It is in schema "%s" there.', schema),
                HINT = 'Drop or rename it there, or rename the table here.';
    END IF;
    SELECT r INTO missing FROM shardmap.remote_rows(shard, (
        SELECT format('SELECT w.kind, w.name FROM (VALUES %s) w (kind, name) WHERE CASE w.kind WHEN ''type'' '
                'THEN pg_catalog.to_regtype(w.name) IS NULL ELSE pg_catalog.to_regcollation(w.name) IS NULL END LIMIT 1',
            string_agg(DISTINCT format('(%L::pg_catalog.text, %L::pg_catalog.text)', x.kind, x.name), ', '))
          FROM pg_attribute a, LATERAL (
            SELECT 'type' AS kind, format_type(a.atttypid, NULL) AS name
            UNION ALL
            SELECT 'collation', format('%I.%I', n.nspname, l.collname)
              FROM pg_collation l JOIN pg_namespace n ON n.oid = l.collnamespace
             WHERE l.oid = a.attcollation AND l.collname <> 'default') x
         WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped)) r;
    IF FOUND THEN
        RAISE EXCEPTION '% % does not exist on shard "%"', missing[1], missing[2], shard
            USING ERRCODE = 'undefined_object', DETAIL = format('Table %s has a column of it.', relation),
                HINT = 'Create it (or its extension) on all shards with shardmap.run_on_shards.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_shard_can_hold(regclass, text) IS 'raises an error if a shard has a relation of the table''s name already, or lacks a type or collation of its columns';
REVOKE ALL ON FUNCTION shardmap._check_shard_can_hold(regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._check_shard_can_hold(regclass, text) TO shardmap_admin;

CREATE FUNCTION shardmap._run_ddl(shard text, schema text, statements text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- CREATE SCHEMA IF NOT EXISTS needs the right to create one even where it exists.
    IF NOT EXISTS (SELECT FROM shardmap.remote_rows(shard,
            format('SELECT n.nspname::text AS name FROM pg_catalog.pg_namespace n WHERE n.nspname = %L', schema))) THEN
        PERFORM shardmap._remote_ddl(shard, format('CREATE SCHEMA %I', schema));
    END IF;
    PERFORM shardmap._remote_ddl(shard, array_to_string(statements, '; '));
END
$$;
COMMENT ON FUNCTION shardmap._run_ddl(text, text, text[]) IS 'runs statements on a shard, after making the schema where it is missing';
REVOKE ALL ON FUNCTION shardmap._run_ddl(text, text, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._run_ddl(text, text, text[]) TO shardmap_admin;

CREATE FUNCTION shardmap._create_shard_table(relation regclass, shard text, is_copy boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    schema text;
    name text;
    statement text;
    statements text[];
BEGIN
    SELECT n.nspname, c.relname INTO STRICT schema, name
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation;
    -- A copy's rows meet them here already; there they could refuse what is right at the transaction's end only.
    FOR statement IN EXECUTE format('SELECT d.statement FROM (%s) d WHERE d.kind <> ALL ($1)',
            shardmap._table_ddl_sql(schema, name, shardmap._shard_collation(shard)))
        USING CASE WHEN is_copy THEN '{check,deferrable,foreign key}'::text[] ELSE '{}' END
    LOOP
        statements := statements || statement;
    END LOOP;
    PERFORM shardmap._run_ddl(shard, schema, statements);
END
$$;
COMMENT ON FUNCTION shardmap._create_shard_table(regclass, text, boolean) IS 'makes, on a shard, a table like the one here; is_copy: for a reference table, whose rows are checked here';
REVOKE ALL ON FUNCTION shardmap._create_shard_table(regclass, text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._create_shard_table(regclass, text, boolean) TO shardmap_admin;

CREATE FUNCTION shardmap._clone_shard_table(relation regclass, source text, shard text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    schema text;
    name text;
    statements text[];
BEGIN
    SELECT n.nspname, c.relname INTO STRICT schema, name
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation;
    PERFORM shardmap._check_shard_can_hold(relation, shard);
    SELECT array_agg(d.row[2] ORDER BY d.position) INTO statements
      FROM shardmap.remote_rows(source, shardmap._table_ddl_sql(schema, name, shardmap._shard_collation(shard)))
        WITH ORDINALITY d (row, position);
    IF statements IS NULL THEN
        RAISE EXCEPTION 'shard "%" has lost its table %', source, relation
            USING ERRCODE = 'undefined_table', HINT = 'Restore it there from a backup.';
    END IF;
    PERFORM shardmap._run_ddl(shard, schema, statements);
END
$$;
COMMENT ON FUNCTION shardmap._clone_shard_table(regclass, text, text) IS 'makes, on a shard, a table like another shard''s';
REVOKE ALL ON FUNCTION shardmap._clone_shard_table(regclass, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._clone_shard_table(regclass, text, text) TO shardmap_admin;

-- distribute_table carries over all that belongs to a table, and undistribute_table brings it back.
\set SHOW_CONTEXT never
SET shardmap.fanout_policy = 'allow';
CREATE ROLE regress_reader;
CREATE ROLE regress_owner;
GRANT CREATE ON SCHEMA public TO regress_owner;
CREATE TABLE objects (
    id bigserial,
    file_key text NOT NULL,
    gone integer,
    size integer DEFAULT 5 CHECK (size < 1000),
    made timestamptz DEFAULT '2024-01-01 00:00+00',
    big text GENERATED ALWAYS AS (upper(file_key)) STORED,
    number integer GENERATED ALWAYS AS IDENTITY (START WITH 10 INCREMENT BY 5),
    note varchar(10) COLLATE "C" DEFAULT 'it''s \',
    CONSTRAINT positive CHECK (size > 0) NO INHERIT,
    PRIMARY KEY (file_key, id),
    UNIQUE (file_key, number) INCLUDE (made)
) WITH (fillfactor = 80, autovacuum_enabled = off, toast.autovacuum_enabled = off);
ALTER TABLE objects DROP COLUMN gone;
ALTER TABLE objects ALTER COLUMN note SET STORAGE EXTERNAL, ALTER COLUMN size SET STATISTICS 50, ALTER COLUMN size SET (n_distinct = 7);
CREATE INDEX objects_made ON objects (made DESC) WHERE size > 1;
CREATE INDEX objects_lower ON objects USING hash (lower(note));
CREATE STATISTICS objects_stat (ndistinct) ON file_key, size FROM objects;
ALTER TABLE objects REPLICA IDENTITY FULL;
COMMENT ON TABLE objects IS 'the objects';
COMMENT ON COLUMN objects.size IS 'in it''s \ bytes';
COMMENT ON CONSTRAINT positive ON objects IS 'no empty ones';
COMMENT ON CONSTRAINT objects_pkey ON objects IS 'the key';
COMMENT ON INDEX objects_made IS 'by time';
CREATE VIEW recent WITH (security_barrier, security_invoker = true) AS SELECT file_key, size FROM objects WHERE made > '2023-01-01 00:00+00';
CREATE VIEW sums AS SELECT file_key, sum(size) AS total FROM recent GROUP BY file_key;
COMMENT ON VIEW recent IS 'the view';
GRANT SELECT ON recent TO regress_reader;
GRANT SELECT ON objects TO regress_reader WITH GRANT OPTION;
GRANT UPDATE (size, note) ON objects TO regress_reader;
GRANT INSERT ON objects TO PUBLIC;
REVOKE DELETE ON objects FROM CURRENT_USER;
ALTER TABLE objects OWNER TO regress_owner;
ALTER TABLE objects ENABLE ROW LEVEL SECURITY;
CREATE POLICY small ON objects AS RESTRICTIVE FOR SELECT TO regress_reader USING (size < 100);
CREATE POLICY every ON objects USING (true) WITH CHECK (size < (SELECT 500));
COMMENT ON POLICY small ON objects IS 'only small ones';
INSERT INTO objects (file_key, size, note) SELECT 'file-' || i % 50, i % 90 + 1, CASE i % 3 WHEN 0 THEN NULL WHEN 1 THEN '' ELSE E'a\\\tb' END
  FROM generate_series(1, 500) i;
SELECT 'recent'::regclass::oid AS view_before \gset
SELECT count(*) AS rows, sum(id) AS ids, sum(number) AS numbers, sum(size) AS sizes, md5(string_agg(o::text, ',' ORDER BY id)) AS all FROM objects o \gset before_

SELECT shardmap.distribute_table('objects', 'file_key');
\d objects
SELECT pg_get_partkeydef('objects'::regclass);
SELECT c.relname, pg_get_expr(c.relpartbound, c.oid), c.relkind FROM pg_class c WHERE c.relispartition ORDER BY 1;
SELECT reloptions FROM pg_class WHERE oid = 'recent'::regclass;
SELECT x.grantor::regrole, CASE x.grantee WHEN 0 THEN 'PUBLIC' ELSE x.grantee::regrole::text END AS grantee,
    string_agg(x.privilege_type || CASE WHEN x.is_grantable THEN '*' ELSE '' END, ', ' ORDER BY x.privilege_type) AS privileges
  FROM pg_class c, aclexplode(c.relacl) x WHERE c.oid = 'objects'::regclass AND x.privilege_type <> 'MAINTAIN' GROUP BY 1, 2 ORDER BY 1, 2;
SELECT a.attname, a.attacl FROM pg_attribute a WHERE a.attrelid = 'objects'::regclass AND a.attacl IS NOT NULL ORDER BY 1;
SELECT count(*) = :before_rows AND sum(id) = :before_ids AND sum(number) = :before_numbers AND sum(size) = :before_sizes
    AND md5(string_agg(o::text, ',' ORDER BY id)) = :'before_all' AS same FROM objects o;
SELECT 'recent'::regclass::oid = :view_before AS same_view, obj_description('recent'::regclass) AS comment;
SELECT * FROM sums ORDER BY file_key LIMIT 2;
SELECT conname, obj_description(oid, 'pg_constraint') FROM pg_constraint WHERE conrelid = 'objects'::regclass AND contype = 'c' ORDER BY 1;
SELECT polname, polpermissive, obj_description(oid, 'pg_policy') FROM pg_policy WHERE polrelid = 'objects'::regclass ORDER BY 1;
SELECT relname, relowner::regrole, relrowsecurity FROM pg_class WHERE relname ~ '^objects' ORDER BY 1;
SELECT table_name, keyspace, key_column, key_type, partitions FROM shardmap.tables;
-- Sequences go on where they were.
INSERT INTO objects (file_key) VALUES ('new') RETURNING id, number, size, big, note;
-- Each row is where its owner is.
SELECT s.srvname, count(*) > 50 AS many, bool_and(shard_for(file_key) = s.srvname) AS all_at_home
  FROM objects o JOIN pg_foreign_table f ON f.ftrelid = o.tableoid JOIN pg_foreign_server s ON s.oid = f.ftserver GROUP BY 1 ORDER BY 1;
-- Row security and grants work on.
SET ROLE regress_reader;
SELECT has_table_privilege('objects', 'SELECT'), has_column_privilege('objects', 'size', 'UPDATE'), has_table_privilege('objects', 'DELETE');
RESET ROLE;
-- What each shard has.
SELECT DISTINCT r AS columns FROM shardmap.shard, shardmap.remote_rows(name, $$
    SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull::text, a.attidentity::text, a.attgenerated::text, a.attstorage::text, nullif(a.attstattarget, -1)::text,
        (SELECT string_agg(o, ',') FROM unnest(a.attoptions) o WHERE o LIKE 'n_distinct%'), pg_get_expr(d.adbin, d.adrelid), col_description(a.attrelid, a.attnum), a.attnum::text
      FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
     WHERE a.attrelid = 'public.objects'::regclass AND a.attnum > 0$$) r ORDER BY 1;
SELECT DISTINCT r AS constraints FROM shardmap.shard, shardmap.remote_rows(name, $$
    SELECT conname, pg_get_constraintdef(oid), obj_description(oid, 'pg_constraint') FROM pg_constraint
     WHERE conrelid = 'public.objects'::regclass AND contype <> 'n'$$) r ORDER BY 1;
SELECT DISTINCT r AS indexes FROM shardmap.shard, shardmap.remote_rows(name, $$
    SELECT pg_get_indexdef(indexrelid), obj_description(indexrelid, 'pg_class') FROM pg_index WHERE indrelid = 'public.objects'::regclass$$) r ORDER BY 1;
SELECT DISTINCT r AS table FROM shardmap.shard, shardmap.remote_rows(name, $$
    SELECT array_to_string(c.reloptions, ','), array_to_string(t.reloptions, ','), c.relreplident::text, obj_description(c.oid, 'pg_class'),
        (SELECT pg_get_statisticsobjdef(s.oid) FROM pg_statistic_ext s WHERE s.stxrelid = c.oid)
      FROM pg_class c JOIN pg_class t ON t.oid = c.reltoastrelid WHERE c.oid = 'public.objects'::regclass$$) r;

-- And back.
SELECT shardmap.undistribute_table('objects');
\d objects
SELECT pg_get_partkeydef('objects'::regclass);
SELECT c.relname, pg_get_expr(c.relpartbound, c.oid), c.relkind FROM pg_class c WHERE c.relispartition ORDER BY 1;
SELECT reloptions FROM pg_class WHERE oid = 'recent'::regclass;
SELECT x.grantor::regrole, CASE x.grantee WHEN 0 THEN 'PUBLIC' ELSE x.grantee::regrole::text END AS grantee,
    string_agg(x.privilege_type || CASE WHEN x.is_grantable THEN '*' ELSE '' END, ', ' ORDER BY x.privilege_type) AS privileges
  FROM pg_class c, aclexplode(c.relacl) x WHERE c.oid = 'objects'::regclass AND x.privilege_type <> 'MAINTAIN' GROUP BY 1, 2 ORDER BY 1, 2;
SELECT a.attname, a.attacl FROM pg_attribute a WHERE a.attrelid = 'objects'::regclass AND a.attacl IS NOT NULL ORDER BY 1;
SELECT count(*) - 1 = :before_rows AND md5(string_agg(o::text, ',' ORDER BY id) FILTER (WHERE file_key <> 'new')) = :'before_all' AS same FROM objects o;
INSERT INTO objects (file_key) VALUES ('newer') RETURNING id, number, big;
SELECT 'recent'::regclass::oid = :view_before AS same_view;
SELECT c.relname, c.reloptions, t.reloptions AS toast, c.relowner::regrole FROM pg_class c JOIN pg_class t ON t.oid = c.reltoastrelid WHERE c.relname = 'objects';
SELECT obj_description('objects_made'::regclass), obj_description((SELECT oid FROM pg_constraint WHERE conname = 'objects_pkey'), 'pg_constraint');
SELECT count(*) FROM shardmap.shard, shardmap.remote_rows(name, 'SELECT relname FROM pg_class WHERE relname ~ ''^objects''') r;
SELECT count(*) FROM pg_class WHERE relname ~ 'shardmap_old';

-- All or nothing: a failure at the very end leaves all as it was, here and there.
CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_TAG = 'DROP TABLE' THEN RAISE EXCEPTION 'no'; END IF; END $$;
CREATE EVENT TRIGGER refuse ON sql_drop EXECUTE FUNCTION refuse();
SELECT shardmap.distribute_table('objects', 'file_key');
DROP EVENT TRIGGER refuse;
SELECT relkind, (SELECT count(*) FROM objects) FROM pg_class WHERE relname = 'objects';
SELECT count(*) FROM shardmap.shard, shardmap.remote_rows(name, 'SELECT relname FROM pg_class WHERE relname ~ ''^objects''') r;
SELECT count(*) FROM shardmap.logical_table;
BEGIN;
SELECT shardmap.distribute_table('objects', 'file_key');
ROLLBACK;
SELECT relkind FROM pg_class WHERE relname = 'objects';
SELECT shardmap.distribute_table('objects', 'file_key');
DROP TABLE objects CASCADE;
REVOKE ALL ON SCHEMA public FROM regress_owner;
DROP ROLE regress_reader, regress_owner;

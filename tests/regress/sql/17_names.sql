-- Names and values with quotes and backslashes, everywhere, and standard_conforming_strings off.
\set SHOW_CONTEXT never
SET shardmap.fanout_policy = 'allow';
SET standard_conforming_strings = off;
SET escape_string_warning = off;
SELECT host, port, dbname FROM shardmap.shards WHERE keyspace = 'main' AND number = 0 \gset
SELECT shardmap.create_keyspace('we "ird'';\\ ks', allocation => 'balanced', vnodes => 16);
SELECT shardmap.add_shard('sh "a"''\\' || number, host, port::integer, dbname, keyspace => 'we "ird'';\\ ks')
  FROM shardmap.shards WHERE keyspace = 'main' AND number < 3;
SELECT shard, vnodes, round(load::numeric, 3) AS load FROM shardmap.ring_balance('we "ird'';\\ ks');
CREATE SCHEMA "od""d; s\";
CREATE TABLE "od""d; s\"."we ird""; x" (
    "k""' ey\" text DEFAULT 'a\\''b' PRIMARY KEY,
    "n;--" integer DEFAULT 3 CHECK ("n;--" > 0 OR "k""' ey\" <> 'x\\y'),
    g text GENERATED ALWAYS AS ("k""' ey\" || '\\') STORED
);
COMMENT ON TABLE "od""d; s\"."we ird""; x" IS 'com\\ment''s';
CREATE INDEX ON "od""d; s\"."we ird""; x" (("n;--" + 1)) WHERE "k""' ey\" <> '\\''';
CREATE VIEW "v w" AS SELECT * FROM "od""d; s\"."we ird""; x" WHERE "k""' ey\" <> '\\''';
INSERT INTO "od""d; s\"."we ird""; x" SELECT 'k''\\"' || i, i FROM generate_series(1, 50) i;
SELECT shardmap.distribute_table('"od""d; s\\"."we ird""; x"', 'k"'' ey\\', 'we "ird'';\\ ks');
\d "od""d; s\"."we ird""; x"
SELECT * FROM shardmap.remote_rows('sh "a"''\\1', 'SELECT conname, pg_get_constraintdef(c.oid), obj_description(conrelid) FROM pg_constraint c WHERE contype = ''c'' AND conrelid <> 0');
SELECT count(*), min(g), max("n;--") FROM "od""d; s\"."we ird""; x";
SELECT count(*) FROM "v w";
INSERT INTO "od""d; s\"."we ird""; x" DEFAULT VALUES RETURNING *;
SELECT tableoid::regclass, * FROM "od""d; s\"."we ird""; x" WHERE "k""' ey\" = 'k''\\"7';
SELECT shard_for('k''\\"7', 'we "ird'';\\ ks');
SELECT shardmap.pin_key('new''\\"7', 'sh "a"''\\2', 'we "ird'';\\ ks');
INSERT INTO "od""d; s\"."we ird""; x" VALUES ('new''\\"7', 9) RETURNING tableoid::regclass, *;
SELECT shardmap.set_fanout_policy('"od""d; s\\"."we ird""; x"', 'error');
SELECT count(*) FROM "od""d; s\"."we ird""; x";
SELECT shardmap.set_fanout_policy('"od""d; s\\"."we ird""; x"', NULL);
SELECT * FROM shardmap.tables;
SELECT keyspace, name, number, vnodes FROM shardmap.shards WHERE keyspace <> 'main';
SELECT * FROM shardmap.pin;
-- A further shard gets the table.
\set VERBOSITY terse
SELECT shardmap.add_shard('sh "a"''\\3', host, port::integer, dbname, keyspace => 'we "ird'';\\ ks') FROM shardmap.shards WHERE name = 'shard-3';
\set VERBOSITY default
\d "od""d; s\"."we ird""; x_3"
SELECT shardmap.drop_shard('sh "a"''\\3');
SELECT shardmap.undistribute_table('"od""d; s\\"."we ird""; x"');
\d "od""d; s\"."we ird""; x"
SELECT count(*), min(g), max("n;--") FROM "od""d; s\"."we ird""; x";
SELECT obj_description('"od""d; s\\"."we ird""; x"'::regclass), count(*) FROM "v w";
SELECT shardmap.distribute_table('"od""d; s\\"."we ird""; x"', 'k"'' ey\\', 'we "ird'';\\ ks');
DROP TABLE "od""d; s\"."we ird""; x" CASCADE;
SELECT shard, success, error FROM shardmap.run_on_shards('SELECT FROM "od""d; s\\"."we ird""; x"', 'we "ird'';\\ ks');
SELECT count(*) FROM shardmap.logical_table;
RESET standard_conforming_strings;
-- Names as long as they can be, and partitions whose names are taken.
SELECT repeat('é', 31) AS long \gset
CREATE TABLE :"long" (k integer PRIMARY KEY);
SELECT shardmap.distribute_table(:'long', 'k');
SELECT relname, octet_length(relname) FROM pg_class WHERE relispartition ORDER BY 1;
DROP TABLE :"long";
CREATE TABLE t (k integer);
CREATE TABLE t_0 (k integer);
CREATE TYPE t_1 AS ENUM ();
SELECT shardmap.distribute_table('t', 'k');
SELECT relname FROM pg_class WHERE relispartition ORDER BY 1;
INSERT INTO t SELECT generate_series(1, 10);
SELECT count(*) FROM t;
-- A schema that the shards do not have, and a keyword.
CREATE SCHEMA "select";
CREATE TABLE "select"."table" ("order" integer PRIMARY KEY, "group" text);
SELECT shardmap.distribute_table('"select"."table"', 'order');
INSERT INTO "select"."table" VALUES (1, 'a') RETURNING *;

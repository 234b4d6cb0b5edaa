-- Moves: what a replica must have replayed before it answers reads again.
--
-- Decides from where on in its shard's log a replica shows what the map says. What always holds: when a shard becomes the
-- owner of rows that it was given by a move, or gets rid of rows that were hidden there, its place in the log by then is
-- noted in the transaction that publishes the map; whoever sees that map reads from no replica that is behind it. Read
-- src/core/reads/choice.rs next.

CREATE FUNCTION shardmap._note_floor(shard text, system text, timeline integer, lsn text) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO shardmap.read_floor AS f (shard, system, timeline, lsn) VALUES ($1, $2, $3, $4)
        ON CONFLICT ON CONSTRAINT read_floor_pkey DO UPDATE SET system = $2, timeline = $3, lsn = $4
$$;
COMMENT ON FUNCTION shardmap._note_floor(text, text, integer, text) IS 'notes from where on in its log a shard''s replicas may answer';
REVOKE ALL ON FUNCTION shardmap._note_floor(text, text, integer, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._note_floor(text, text, integer, text) TO shardmap_admin;

-- Of what is committed there by now.
CREATE FUNCTION shardmap._raise_floor(shard text) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT shardmap._note_floor(shard, shardmap._system_identifier(shard), r[1]::integer, r[2]) FROM shardmap.remote_rows(shard,
        'SELECT (''x'' OPERATOR(pg_catalog.||) pg_catalog.substr(pg_catalog.pg_walfile_name(l.l), 1, 8))::pg_catalog.bit(32)::pg_catalog.int4, l.l '
        'FROM (SELECT pg_catalog.pg_current_wal_insert_lsn()) l(l)', false) r
$$;
COMMENT ON FUNCTION shardmap._raise_floor(text) IS 'lets a shard''s replicas answer only when they have replayed what it has written by now';
REVOKE ALL ON FUNCTION shardmap._raise_floor(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._raise_floor(text) TO shardmap_admin;

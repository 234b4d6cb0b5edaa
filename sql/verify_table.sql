-- Verification of a logical table: every row lies on the shard that owns its key, and on no other.
--
-- Decides what a row is called that lies elsewhere: an orphan, if its owner has the same; doubled, if its owner has its
-- primary key with other contents; misplaced, if its owner has nothing of it. What always holds: each shard is a row of
-- the answer; one that could not be read is unknown, never clean. (Rows that all lie on their owner are on one shard only.)
-- Read audit.sql next.

CREATE FUNCTION shardmap._foreign_rows(relation regclass, primary_key text[], shard text, entries integer[], max_rows integer,
    transactional boolean DEFAULT false, scope text DEFAULT 'true')
RETURNS TABLE (entry integer, key text, row_id text, owner text, finding text, detail text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    keyspace text := (SELECT l.keyspace FROM shardmap.logical_table l WHERE l.relation = $1);
    entry_sql text := shardmap._entry_sql(keyspace);
    here record;
    there jsonb; -- by owner: what it has of these rows, or a text: why that is not known
BEGIN
    SELECT a.* INTO here FROM shardmap._ask_shards(ARRAY[shard], shardmap._digest_sql(relation, primary_key, scope, entry_sql,
        format('s.bucket = ANY (%L::integer[])', entries), max_rows), transactional) a;
    PERFORM shardmap._check_answer(relation, here.shard, here.error);
    SELECT jsonb_object_agg(a.shard, coalesce((SELECT jsonb_object_agg(e ->> 1, e ->> 2) FROM jsonb_array_elements(a.answer::jsonb) e),
            CASE WHEN a.error IS NULL THEN '{}'::jsonb ELSE to_jsonb(a.error) END)) INTO there
      FROM shardmap._ask_shards(ARRAY(SELECT DISTINCT e.owner FROM shardmap._map_entries(keyspace) e
                WHERE e.entry = ANY (entries) AND e.owner IS NOT NULL ORDER BY 1),
            shardmap._digest_sql(relation, primary_key, 'true', entry_sql, format('s.i = ANY (%L::text[]) AND s.bucket = ANY (%L::integer[])',
                ARRAY(SELECT e ->> 1 FROM jsonb_array_elements(here.answer::jsonb) e), entries)), transactional) a;
    RETURN QUERY SELECT (e ->> 3)::integer, e ->> 0, e ->> 1, m.owner,
            CASE WHEN there -> m.owner ->> (e ->> 1) = e ->> 2 THEN 'orphan'
                WHEN there -> m.owner ->> (e ->> 1) IS NOT NULL THEN 'doubled' ELSE 'misplaced' END,
            CASE WHEN m.owner IS NULL THEN 'no shard owns the key'
                WHEN jsonb_typeof(there -> m.owner) = 'string' THEN 'whether the owner has it too is not known: ' || (there ->> m.owner)
                WHEN there -> m.owner ->> (e ->> 1) = e ->> 2 THEN 'its owner has the same row'
                WHEN there -> m.owner ->> (e ->> 1) IS NOT NULL THEN 'its owner has another row of this primary key'
                ELSE 'its owner does not have it' END
        FROM jsonb_array_elements(here.answer::jsonb) e
        LEFT JOIN shardmap._map_entries(keyspace) m ON m.entry = (e ->> 3)::integer;
END
$$;
COMMENT ON FUNCTION shardmap._foreign_rows(regclass, text[], text, integer[], integer, boolean, text) IS
    'rows of entries of the map that a shard has without owning them, each with what its owner has of it';
REVOKE ALL ON FUNCTION shardmap._foreign_rows(regclass, text[], text, integer[], integer, boolean, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._foreign_rows(regclass, text[], text, integer[], integer, boolean, text) TO shardmap_admin;

-- The shards' answers to whether and under which primary key they have the table; what could not be read has an error.
CREATE FUNCTION shardmap._readable_shards(relation regclass, shards text[]) RETURNS TABLE (shard text, primary_key text[], error text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT a.shard, (a.answer::text[])[2:], coalesce(a.error,
            CASE WHEN (a.answer::text[])[1]::boolean THEN 'Row security hides rows of the table there.' END)
        FROM shardmap._ask_shards(shards, shardmap._primary_key_sql(relation), false) a;
END
$$;
COMMENT ON FUNCTION shardmap._readable_shards(regclass, text[]) IS 'shards with the primary key of a logical table''s table there, or why it cannot be read';
REVOKE ALL ON FUNCTION shardmap._readable_shards(regclass, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._readable_shards(regclass, text[]) TO shardmap_admin;

-- `answer`: a shard's to _summary_sql() by entry of the map. NULL: all is NULL.
CREATE FUNCTION shardmap._sum_entries(keyspace text, shard text, answer text)
RETURNS TABLE (rows bigint, misplaced bigint, checksum numeric, foreign_entries integer[])
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN $3 IS NOT NULL THEN coalesce(sum((b ->> 1)::bigint), 0)::bigint END,
        CASE WHEN $3 IS NOT NULL THEN coalesce(sum((b ->> 1)::bigint) FILTER (WHERE f.is_foreign), 0)::bigint END,
        CASE WHEN $3 IS NOT NULL THEN coalesce(sum((b ->> 2)::numeric), 0) END,
        coalesce(array_agg((b ->> 0)::integer) FILTER (WHERE f.is_foreign), '{}')
      FROM jsonb_array_elements($3::jsonb) b
      LEFT JOIN shardmap._map_entries($1) e ON e.entry = (b ->> 0)::integer
     CROSS JOIN LATERAL (SELECT e.kind <> 'moving' AND e.owner IS DISTINCT FROM $2 AS is_foreign) f
$$;
COMMENT ON FUNCTION shardmap._sum_entries(text, text, text) IS 'rows of a shard, those that it does not own, checksum, and the entries of the map that these belong to';
REVOKE ALL ON FUNCTION shardmap._sum_entries(text, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._sum_entries(text, text, text) TO shardmap_admin;

CREATE FUNCTION shardmap.verify(relation regclass, max_rows integer DEFAULT 100)
RETURNS TABLE (shard text, finding text, rows bigint, misplaced bigint, checksum numeric, key text, row_id text, owner text, detail text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space shardmap.keyspace;
    readable text[] := '{}';
    primary_key text[];
    answer record;
    entries integer[];
    errors jsonb := '{}';
    before text;
BEGIN
    SELECT k.* INTO space FROM shardmap.logical_table l JOIN shardmap.keyspace k ON k.name = l.keyspace WHERE l.relation = $1;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'table % is not distributed', relation
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'See shardmap.tables.';
    END IF;
    before := shardmap._entries_digest(space.name);
    FOR answer IN SELECT r.* FROM shardmap._readable_shards(relation,
            ARRAY(SELECT s.name FROM shardmap.shard s WHERE s.keyspace = space.name)) r ORDER BY r.shard LOOP
        IF answer.error IS NULL THEN
            readable := readable || answer.shard;
            primary_key := coalesce(primary_key, answer.primary_key);
        ELSE
            errors := errors || jsonb_build_object(answer.shard, answer.error);
        END IF;
    END LOOP;
    FOR answer IN
        SELECT a.shard, a.answer, a.error FROM shardmap._ask_shards(readable,
            shardmap._summary_sql(relation, primary_key, 'true', shardmap._entry_sql(space.name)), false) a
        UNION ALL SELECT e.key, NULL, e.value FROM jsonb_each_text(errors) e
        ORDER BY 1
    LOOP
        shard := answer.shard;
        SELECT CASE WHEN answer.answer IS NULL THEN 'unknown' WHEN f.misplaced > 0 THEN 'misplaced' ELSE 'clean' END, f.rows, f.misplaced, f.checksum,
            answer.error, f.foreign_entries
          INTO finding, rows, misplaced, checksum, detail, entries FROM shardmap._sum_entries(space.name, answer.shard, answer.answer) f;
        key := NULL;
        row_id := NULL;
        owner := NULL;
        RETURN NEXT;
        IF entries <> '{}' THEN
            RETURN QUERY SELECT answer.shard, f.finding, NULL::bigint, NULL::bigint, NULL::numeric, f.key, f.row_id, f.owner, f.detail
                FROM shardmap._foreign_rows(relation, primary_key, answer.shard, entries, max_rows) f ORDER BY f.key, f.row_id;
        END IF;
    END LOOP;
    IF shardmap._entries_digest(space.name) IS DISTINCT FROM before THEN
        RAISE EXCEPTION 'the map of keyspace "%" changed while table % was read', space.name, relation
            USING ERRCODE = 'serialization_failure', HINT = 'Verify it again.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap.verify(regclass, integer) IS
    'reads all of a logical table on its shards: a row for each shard (clean, misplaced, or unknown if it could not be read) with rows and checksum, and one for each row, at most max_rows a shard, that lies on a shard that does not own it';
REVOKE ALL ON FUNCTION shardmap.verify(regclass, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.verify(regclass, integer) TO shardmap_admin;

-- The map as a list of entries, and as SQL that finds a row's entry on a shard.
--
-- Decides what an entry is: an arc of a ring, a remainder, a range (also one that nobody owns), a pin. What always holds:
-- a key has one entry, and the entry's owner is the key's; shards count by entry without knowing the map, so that what
-- they say is what they hold. Read verify_table.sql next.

CREATE FUNCTION shardmap._bounds(keyspace text) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(array_agg(b.bound ORDER BY CASE WHEN k.range_order = 'integer' THEN b.bound::bigint END,
            CASE WHEN k.range_order = 'text' THEN convert_to(b.bound, 'UTF8') END), '{}')
      FROM shardmap.keyspace k JOIN (SELECT r.keyspace, r.lower AS bound FROM shardmap.key_range r
            UNION SELECT r.keyspace, r.upper FROM shardmap.key_range r) b ON b.keyspace = k.name
     WHERE k.name = $1 AND b.bound IS NOT NULL
$$;
COMMENT ON FUNCTION shardmap._bounds(text) IS 'bounds of the ranges of a keyspace, in its order';

-- Their rows are on two shards rightly.
CREATE FUNCTION shardmap._moving_keys(keyspace text) RETURNS SETOF text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT DISTINCT m.key::text FROM shardmap.move m WHERE m.keyspace = $1 AND m.kind = 'key' AND m.state NOT IN ('done', 'rolled_back');
END
$$;
COMMENT ON FUNCTION shardmap._moving_keys(text) IS 'canonical texts of the keys of a keyspace whose rows are on their way from shard to shard';
REVOKE ALL ON FUNCTION shardmap._moving_keys(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._moving_keys(text) TO shardmap_admin;

CREATE FUNCTION shardmap._moving_parts(keyspace text) RETURNS TABLE ("position" integer, lower text, upper text, condition text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT row_number() OVER (ORDER BY m.id)::integer, m.lower::text, m.upper::text, shardmap._part_sql(m, 'text', 's.k', 's.h')
        FROM shardmap.move m WHERE m.keyspace = $1 AND m.kind <> 'key' AND m.state NOT IN ('done', 'rolled_back');
END
$$;
COMMENT ON FUNCTION shardmap._moving_parts(text) IS 'parts of a keyspace, larger than a key, whose rows are on their way: numbered from 1, each with a condition on rows s of _source_sql()';
REVOKE ALL ON FUNCTION shardmap._moving_parts(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._moving_parts(text) TO shardmap_admin;

CREATE FUNCTION shardmap._map_entries(keyspace text)
RETURNS TABLE (entry integer, kind text, pin text, lower text, upper text, token_from bigint, token_to bigint, owner text, version bigint)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH space AS (SELECT k.* FROM shardmap.keyspace k WHERE k.name = $1
    ), rule AS (
        SELECT row_number() OVER (ORDER BY t.token) - 1 AS entry, 'arc' AS kind, NULL AS lower, NULL AS upper,
            t.token - t.positions + 1 AS token_from, t.token AS token_to, t.shard AS owner, s.version
          FROM space s JOIN shardmap.tokens t ON t.keyspace = s.name AND t.positions > 0 WHERE s.strategy = 'ring'
        UNION ALL
        SELECT o.n - 1, 'remainder', NULL, NULL, NULL, NULL, h.name, s.version
          FROM space s CROSS JOIN LATERAL unnest(coalesce(s.slots, ARRAY(SELECT h.number FROM shardmap.shard h
                WHERE h.keyspace = s.name AND h.state <> 'joining' ORDER BY h.number))) WITH ORDINALITY o (number, n)
          JOIN shardmap.shard h ON h.keyspace = s.name AND h.number = o.number WHERE s.strategy = 'modulo'
        UNION ALL
        SELECT b.n, 'range', b.lower, b.upper, NULL, NULL, r.shard, coalesce(r.version, 0)
          FROM space s CROSS JOIN LATERAL (SELECT shardmap._bounds(s.name) AS bounds) a
         CROSS JOIN LATERAL (SELECT n, a.bounds[n] AS lower, a.bounds[n + 1] AS upper FROM generate_series(0, cardinality(a.bounds)) n) b
          LEFT JOIN shardmap.key_range r ON r.keyspace = s.name AND CASE s.range_order
                WHEN 'integer' THEN (r.lower IS NULL OR b.lower IS NOT NULL AND r.lower::bigint <= b.lower::bigint)
                    AND (r.upper IS NULL OR b.upper IS NOT NULL AND r.upper::bigint >= b.upper::bigint)
                ELSE (r.lower IS NULL OR b.lower IS NOT NULL AND convert_to(r.lower, 'UTF8') <= convert_to(b.lower, 'UTF8'))
                    AND (r.upper IS NULL OR b.upper IS NOT NULL AND convert_to(r.upper, 'UTF8') >= convert_to(b.upper, 'UTF8')) END
         WHERE s.strategy = 'range'
    ), all_of AS (
        TABLE rule
        UNION ALL -- of a keyspace whose shards own nothing
        SELECT 0, 'nothing', NULL, NULL, NULL, NULL, NULL, s.version FROM space s WHERE NOT EXISTS (SELECT FROM rule)
    ), by_key AS (
        SELECT row_number() OVER (ORDER BY coalesce(m.key, p.key)) AS position, CASE WHEN m.key IS NULL THEN 'pin' ELSE 'moving' END AS kind,
            coalesce(m.key, p.key) AS key, CASE WHEN m.key IS NULL THEN p.shard END AS owner
          FROM shardmap._moving_keys($1) m (key) FULL JOIN (SELECT p.* FROM shardmap.pin p WHERE p.keyspace = $1) p ON p.key = m.key
    )
    SELECT r.entry::integer, r.kind, NULL, r.lower, r.upper, r.token_from, r.token_to, r.owner, r.version FROM all_of r
    UNION ALL
    SELECT ((SELECT count(*) FROM all_of) + k.position - 1)::integer, k.kind, k.key, NULL, NULL, NULL, NULL, k.owner, s.version
      FROM space s, by_key k
    UNION ALL
    SELECT ((SELECT count(*) FROM all_of) + (SELECT count(*) FROM by_key) + m.position - 1)::integer, 'moving', NULL, m.lower, m.upper,
        NULL, NULL, NULL, s.version
      FROM space s, shardmap._moving_parts($1) m
$$;
COMMENT ON FUNCTION shardmap._map_entries(text) IS
    'entries of the map of a keyspace, numbered from 0: arcs, remainders or ranges, then pins and keys that are moving, then parts that are moving; version: that of the range, or of the map';
REVOKE ALL ON FUNCTION shardmap._map_entries(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._map_entries(text) TO shardmap_admin;

CREATE FUNCTION shardmap._entry_sql(keyspace text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH entries AS (SELECT e.* FROM shardmap._map_entries($1) e
    ), rule AS (
        SELECT count(*) FILTER (WHERE e.kind NOT IN ('pin', 'moving')) AS entries,
            array_agg(e.token_to ORDER BY e.entry) FILTER (WHERE e.kind = 'arc') AS tokens,
            array_agg(e.pin ORDER BY e.entry) FILTER (WHERE e.pin IS NOT NULL) AS pins,
            max(e.kind) FILTER (WHERE e.kind NOT IN ('pin', 'moving')) AS kind
          FROM entries e
    ), expression AS (
        SELECT r.*, CASE r.kind
            WHEN 'arc' THEN format('width_bucket(s.token - 1, %L::bigint[]) %% %s', r.tokens, r.entries)
            -- The MD5 as a number of 128 bits, in four steps.
            WHEN 'remainder' THEN (SELECT format('((((%2$s %% %1$s << 32 | %3$s) %% %1$s << 32 | %4$s) %% %1$s << 32 | %5$s) %% %1$s)::integer',
                    r.entries, w[1], w[2], w[3], w[4])
                  FROM (SELECT array_agg(format('(''x'' || substr(s.h, %s, 8))::bit(32)::bigint', n) ORDER BY n) AS w
                          FROM generate_series(1, 25, 8) n) x)
            WHEN 'range' THEN CASE k.range_order
                WHEN 'integer' THEN format('width_bucket(s.k::bigint, %L::bigint[])', shardmap._bounds($1))
                ELSE format('width_bucket(convert_to(s.k, ''UTF8''), %L::bytea[])',
                    ARRAY(SELECT convert_to(b, 'UTF8') FROM unnest(shardmap._bounds($1)) WITH ORDINALITY u (b, n) ORDER BY n)) END
            ELSE '0' END AS sql
          FROM rule r, shardmap.keyspace k WHERE k.name = $1
    )
    SELECT CASE WHEN x.pins IS NULL AND p.sql IS NULL THEN x.sql ELSE format('CASE%s%s ELSE %s END',
            CASE WHEN x.pins IS NOT NULL THEN
                format(' WHEN s.k = ANY (%1$L::text[]) THEN array_position(%1$L::text[], s.k) + %2$s', x.pins, x.entries - 1) END,
            p.sql, x.sql) END
      FROM expression x, LATERAL (SELECT string_agg(format(' WHEN %s THEN %s', m.condition,
            x.entries + coalesce(cardinality(x.pins), 0) + m.position - 1), '' ORDER BY m.position) AS sql
          FROM shardmap._moving_parts($1) m) p
$$;
COMMENT ON FUNCTION shardmap._entry_sql(text) IS
    'SQL, of built-ins, of the entry of the map that a row s of _source_sql() belongs to';
REVOKE ALL ON FUNCTION shardmap._entry_sql(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._entry_sql(text) TO shardmap_admin;

-- Moves that are planned come in without a new version of the map.
CREATE FUNCTION shardmap._entries_digest(keyspace text) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT md5(string_agg(e::text, ' ' ORDER BY e.entry)) FROM shardmap._map_entries($1) e
$$;
COMMENT ON FUNCTION shardmap._entries_digest(text) IS 'MD5 of the entries of the map: whether it is still the same';
REVOKE ALL ON FUNCTION shardmap._entries_digest(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._entries_digest(text) TO shardmap_admin;

-- Moves: the part of a keyspace that one of them moves.
--
-- Decides which rows belong to a part: those of a key, of arcs of a ring, of remainders, of a range. What always holds:
-- _part_sql is the one condition by which they are counted, copied, logged, compared, deleted, and hidden from
-- statements; keys that were pinned when a move was planned stay where they are; parts of moves under way do not overlap.
-- Its conditions are made of immutable built-ins under full names, and use no cast through text, so that postgres_fdw
-- sends them to the shards: src/pg/fdw/owned.rs reads them. Read moves_plan.sql next.

CREATE FUNCTION shardmap._arcs_sql(token_sql text, arcs int8multirange) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    -- Even: below an arc, between two, or above; odd: within one.
    SELECT format('(pg_catalog.width_bucket(%s, %L::pg_catalog.int8[]) OPERATOR(pg_catalog.%%) 2) OPERATOR(pg_catalog.=) 1', token_sql,
        ARRAY(SELECT b FROM unnest(arcs) r, unnest(ARRAY[lower(r), upper(r)]) b ORDER BY b))
$$;
COMMENT ON FUNCTION shardmap._arcs_sql(text, int8multirange) IS 'SQL condition: a token is on one of the arcs';

-- The MD5 as a number of 128 bits, in four steps.
CREATE FUNCTION shardmap._remainders_sql(md5_sql text, modulus integer, remainders integer[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    remainder text;
    word text;
BEGIN
    FOR place IN 1 .. 25 BY 8 LOOP
        word := format('pg_catalog.int8(pg_catalog.bit_in(pg_catalog.textout(pg_catalog.textcat(''x'', pg_catalog.substr(%s, %s, 8))), 0, 32))',
            md5_sql, place);
        remainder := format('(%s OPERATOR(pg_catalog.%%) %L::pg_catalog.int8)',
            CASE WHEN place = 1 THEN word ELSE format('((%s OPERATOR(pg_catalog.<<) 32) OPERATOR(pg_catalog.|) %s)', remainder, word) END, modulus);
    END LOOP;
    RETURN format('%s OPERATOR(pg_catalog.=) ANY (%L::pg_catalog.int8[])', remainder, remainders);
END
$$;
COMMENT ON FUNCTION shardmap._remainders_sql(text, integer, integer[]) IS 'SQL condition: an MD5 leaves one of the remainders';

-- Of integers by their value, else by the bytes of the canonical text in UTF-8.
CREATE FUNCTION shardmap._range_sql(range_order text, key_type regtype, column_sql text, lower text, upper text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(string_agg(CASE
            WHEN $1 = 'integer' AND shardmap._base_type($2) = 'text'::regtype THEN
                format('CASE WHEN %1$s ~ ''^-?[0-9]+$'' THEN %1$s::pg_catalog.numeric %2$s %3$L ELSE false END', $3, o.sign, o.bound)
            WHEN $1 = 'integer' THEN format('%s OPERATOR(pg_catalog.%s) %L::pg_catalog.int8', $3, o.sign, o.bound)
            WHEN current_setting('server_encoding') IN ('UTF8', 'SQL_ASCII') THEN
                format('%s OPERATOR(pg_catalog.%s) %L::pg_catalog.text', k.sql, o.text_sign, o.bound)
            ELSE format('pg_catalog.convert_to(%s, ''UTF8'') OPERATOR(pg_catalog.%s) %L::pg_catalog.bytea', k.sql, o.sign,
                convert_to(o.bound, 'UTF8')) END, ' AND ' ORDER BY o.sign DESC), 'true')
      FROM (VALUES ('>=', '~>=~', $4), ('<', '~<~', $5)) o (sign, text_sign, bound), shardmap.key_sql($2, $3) k (sql)
     WHERE o.bound IS NOT NULL
$$;
COMMENT ON FUNCTION shardmap._range_sql(text, regtype, text, text, text) IS 'SQL condition: a key of a type is from lower to below upper; NULL: no limit';

-- Compared by the key's own type where the text is computed: a comparison of that has a collation which is not the column's.
CREATE FUNCTION shardmap._except_sql(key_type regtype, column_sql text, keys text[]) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH form AS (
        SELECT * FROM (VALUES
            ('{int2,int4,int8}'::regtype[], '%s', 'int8', '^(0|-?[1-9][0-9]{0,18})$'),
            ('{uuid}', '%s', 'uuid', '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'),
            ('{numeric}', '%s', 'numeric', '^(NaN|-?Infinity|0|-?(0|[1-9][0-9]*)\.[0-9]*[1-9]|-?[1-9][0-9]*)$'),
            ('{date,timestamp}', 'EXTRACT(epoch FROM %s)', 'numeric', '^(-?Infinity|0|-?(0|[1-9][0-9]*)\.[0-9]*[1-9]|-?[1-9][0-9]*)$'),
            ('{timestamptz}', 'EXTRACT(epoch FROM pg_catalog.timezone(''UTC'', %s))', 'numeric',
                '^(-?Infinity|0|-?(0|[1-9][0-9]*)\.[0-9]*[1-9]|-?[1-9][0-9]*)$'),
            ('{bytea}', '%s', 'bytea', '^([0-9a-f]{2})*$'),
            ('{text,varchar,bpchar}', '(%s)::pg_catalog.text', 'text', '')) f (types, sql, type, pattern)
         WHERE shardmap._base_type($1) = ANY (f.types)
    ), excepted AS (
        SELECT f.type, f.sql, array_agg(CASE f.type WHEN 'bytea' THEN '\x' || k ELSE k END ORDER BY k) AS keys
          FROM form f, unnest($3) k
         WHERE k ~ f.pattern AND (f.type <> 'int8' OR CASE WHEN k ~ '^-?[0-9]+$' THEN k::numeric END BETWEEN -9223372036854775808 AND 9223372036854775807)
         GROUP BY f.type, f.sql
    )
    SELECT format('%s OPERATOR(pg_catalog.<>) ALL (%L::pg_catalog.%I[])', format(e.sql, $2), e.keys, e.type) FROM excepted e
$$;
COMMENT ON FUNCTION shardmap._except_sql(regtype, text, text[]) IS
    'SQL condition: a key of a type is none of some, given as canonical texts; NULL: none of them is of the type';

-- `md5_sql`: the MD5 of the key, if it is at hand.
CREATE FUNCTION shardmap._part_sql(job shardmap.move, key_type regtype, column_sql text, md5_sql text DEFAULT NULL) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE job.kind WHEN 'key' THEN format('%s OPERATOR(pg_catalog.=) %L', column_sql, job.literal)
        ELSE concat_ws(' AND ', CASE job.kind
                WHEN 'arcs' THEN shardmap._arcs_sql(shardmap._token_sql(h.sql), job.arcs)
                WHEN 'remainders' THEN shardmap._remainders_sql(h.sql, job.modulus, job.remainders)
                WHEN 'range' THEN shardmap._range_sql((SELECT s.range_order FROM shardmap.keyspace s WHERE s.name = job.keyspace),
                    key_type, column_sql, job.lower, job.upper) END,
            shardmap._except_sql(key_type, column_sql, job.except_keys)) END
      FROM coalesce(md5_sql, shardmap._key_md5_sql(shardmap.key_sql(key_type, column_sql))) h (sql)
$$;
COMMENT ON FUNCTION shardmap._part_sql(shardmap.move, regtype, text, text) IS 'SQL condition: a key of a type belongs to the part that a move moves';

-- Also of keys that stay where they are because they were pinned.
CREATE FUNCTION shardmap._part_has_key(job shardmap.move, key text) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found boolean;
BEGIN
    IF job.kind = 'key' THEN
        RETURN job.key = $2;
    END IF;
    job.except_keys := '{}';
    EXECUTE format('SELECT %s FROM (SELECT $1) x (k)', shardmap._part_sql(job, 'text', 'x.k')) INTO found USING $2;
    RETURN found;
END
$$;
COMMENT ON FUNCTION shardmap._part_has_key(shardmap.move, text) IS 'whether a key, given as canonical text, lies within a move''s part';

CREATE FUNCTION shardmap._parts_overlap(a shardmap.move, b shardmap.move) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT a.keyspace = b.keyspace AND CASE
        WHEN a.kind = 'key' THEN shardmap._part_has_key(b, a.key)
        WHEN b.kind = 'key' THEN shardmap._part_has_key(a, b.key)
        WHEN a.kind = 'arcs' AND b.kind = 'arcs' THEN a.arcs && b.arcs
        WHEN a.kind = 'remainders' AND b.kind = 'remainders' THEN EXISTS (
            SELECT FROM unnest(a.remainders) x, unnest(b.remainders) y WHERE (x - y) % gcd(a.modulus, b.modulus) = 0)
        WHEN a.kind = 'range' AND b.kind = 'range' THEN (
            SELECT coalesce(shardmap._bound_less(s.range_order, a.lower, b.upper), true)
                AND coalesce(shardmap._bound_less(s.range_order, b.lower, a.upper), true) FROM shardmap.keyspace s WHERE s.name = a.keyspace)
        ELSE true END
$$;
COMMENT ON FUNCTION shardmap._parts_overlap(shardmap.move, shardmap.move) IS 'whether a key can belong to both parts';

CREATE FUNCTION shardmap._part_owners(job shardmap.move) RETURNS text[]
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    range_order text := (SELECT s.range_order FROM shardmap.keyspace s WHERE s.name = job.keyspace);
BEGIN
    RETURN CASE job.kind
        WHEN 'key' THEN ARRAY[shardmap.owner_of(job.key, job.keyspace)]
        WHEN 'arcs' THEN ARRAY(SELECT s.name::text FROM shardmap.shard s
            WHERE s.keyspace = job.keyspace AND shardmap._owned_tokens(s.name) && job.arcs ORDER BY 1)
        WHEN 'remainders' THEN ARRAY(
            WITH slot AS (SELECT e.entry, e.owner, count(*) OVER ()::integer AS slots FROM shardmap._map_entries(job.keyspace) e WHERE e.kind = 'remainder')
            SELECT DISTINCT s.owner FROM slot s, unnest(job.remainders) r WHERE (s.entry - r) % gcd(s.slots, job.modulus) = 0 ORDER BY 1)
        ELSE ARRAY(SELECT DISTINCT e.owner FROM shardmap._map_entries(job.keyspace) e
             WHERE e.kind = 'range' AND coalesce(shardmap._bound_less(range_order, e.lower, job.upper), true)
               AND coalesce(shardmap._bound_less(range_order, job.lower, e.upper), true) ORDER BY 1) END;
END
$$;
COMMENT ON FUNCTION shardmap._part_owners(shardmap.move) IS 'shards that own keys of a move''s part, by the map; NULL among them: nobody';

CREATE FUNCTION shardmap._refuse_overlap(met shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'move % of keyspace "%" is under way', met.id, met.keyspace
        USING ERRCODE = 'object_in_use', DETAIL = format('It moves %s from shard "%s" to shard "%s", and is %s.',
                shardmap._part_text(met), met.source, met.target, met.state),
            HINT = format('Let it come to its end with CALL shardmap.run_move(%s), or give it up with shardmap.cancel_move(%1$s).', met.id);
END
$$;
COMMENT ON FUNCTION shardmap._refuse_overlap(shardmap.move) IS 'raises an error: a move is in the way';

-- Tables and shards stay as they are; keys can be pinned, but for those that move.
CREATE FUNCTION shardmap._check_no_move(keyspace text, key text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    met shardmap.move;
BEGIN
    SELECT m.* INTO met FROM shardmap.move m
     WHERE m.keyspace = $1 AND m.state NOT IN ('done', 'rolled_back') AND ($2 IS NULL OR shardmap._part_has_key(m, $2)) ORDER BY m.id LIMIT 1;
    IF FOUND THEN
        PERFORM shardmap._refuse_overlap(met);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_no_move(text, text) IS 'raises an error if rows of a keyspace, or of one key of it, are moved';

CREATE FUNCTION shardmap._check_no_overlap(job shardmap.move) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    met shardmap.move;
BEGIN
    SELECT m.* INTO met FROM shardmap.move m
     WHERE m.keyspace = job.keyspace AND m.state NOT IN ('done', 'rolled_back') AND shardmap._parts_overlap(m, job) ORDER BY m.id LIMIT 1;
    IF FOUND THEN
        PERFORM shardmap._refuse_overlap(met);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._check_no_overlap(shardmap.move) IS 'raises an error if a move under way moves keys of a part';
REVOKE ALL ON FUNCTION shardmap._arcs_sql(text, int8multirange), shardmap._remainders_sql(text, integer, integer[]),
    shardmap._range_sql(text, regtype, text, text, text), shardmap._except_sql(regtype, text, text[]),
    shardmap._part_sql(shardmap.move, regtype, text, text),
    shardmap._parts_overlap(shardmap.move, shardmap.move), shardmap._part_owners(shardmap.move),
    shardmap._check_no_overlap(shardmap.move) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._arcs_sql(text, int8multirange), shardmap._remainders_sql(text, integer, integer[]),
    shardmap._range_sql(text, regtype, text, text, text), shardmap._except_sql(regtype, text, text[]),
    shardmap._part_sql(shardmap.move, regtype, text, text),
    shardmap._parts_overlap(shardmap.move, shardmap.move), shardmap._part_owners(shardmap.move),
    shardmap._check_no_overlap(shardmap.move) TO shardmap_admin;

-- The next version of the map has it; the caller publishes that.
CREATE FUNCTION shardmap._give_range(keyspace text, lower text, upper text, shard text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    space shardmap.keyspace := shardmap._lock_ranges(keyspace);
    bound text;
    cut shardmap.key_range;
BEGIN
    FOREACH bound IN ARRAY array_remove(ARRAY[lower, upper], NULL) LOOP
        SELECT r.* INTO cut FROM shardmap.key_range r
         WHERE r.keyspace = space.name AND coalesce(shardmap._bound_less(space.range_order, r.lower, bound), true)
           AND coalesce(shardmap._bound_less(space.range_order, bound, r.upper), true);
        IF FOUND THEN
            UPDATE shardmap.key_range r SET upper = bound, version = space.version + 1
             WHERE r.keyspace = space.name AND r.lower IS NOT DISTINCT FROM cut.lower;
            INSERT INTO shardmap.key_range (keyspace, lower, upper, shard, version)
            VALUES (space.name, bound, cut.upper, cut.shard, space.version + 1);
        END IF;
    END LOOP;
    UPDATE shardmap.key_range r SET shard = $4, version = space.version + 1
     WHERE r.keyspace = space.name AND r.shard <> $4
       AND coalesce(shardmap._bound_less(space.range_order, r.lower, $3), true)
       AND coalesce(shardmap._bound_less(space.range_order, $2, r.upper), true);
END
$$;
COMMENT ON FUNCTION shardmap._give_range(text, text, text, text) IS 'cuts the ranges of a keyspace at two bounds, and gives what lies between to a shard; does not publish the map';
REVOKE ALL ON FUNCTION shardmap._give_range(text, text, text, text) FROM PUBLIC;

CREATE FUNCTION shardmap._give_part(job shardmap.move, shard text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    CASE job.kind
        WHEN 'key' THEN
            DELETE FROM shardmap.pin p WHERE p.keyspace = job.keyspace AND p.key = job.key;
            INSERT INTO shardmap.pin (keyspace, key, shard) VALUES (job.keyspace, job.key, $2);
        WHEN 'range' THEN PERFORM shardmap._give_range(job.keyspace, job.lower, job.upper, $2);
        ELSE PERFORM shardmap._reassign(job.keyspace, $2, job.arcs, job.modulus, job.remainders);
    END CASE;
END
$$;
COMMENT ON FUNCTION shardmap._give_part(shardmap.move, text) IS 'makes a shard the owner of a move''s part; does not publish the map';
REVOKE ALL ON FUNCTION shardmap._give_part(shardmap.move, text) FROM PUBLIC;

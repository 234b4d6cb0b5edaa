-- Verification of a big table, which can be broken off: slice by slice, and what was read is not read again.
--
-- Decides what a slice is: so many pages of a shard's table, of each shard the same number at once. What always holds: a
-- slice is read, compared with the map as it is then, and written down in one transaction; after a crash or a cancel the
-- next run goes on behind it; what could not be read is read by the next run. A row that nobody touches meanwhile is
-- read exactly once. A shard whose table was rewritten (VACUUM FULL, say) begins anew. Read verify_move.sql next.

CREATE TABLE shardmap.verification (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    relation regclass NOT NULL,
    keyspace text COLLATE pg_catalog."C" NOT NULL REFERENCES shardmap.keyspace ON DELETE CASCADE,
    slice_pages integer NOT NULL
        CONSTRAINT verification_slice_positive CHECK (slice_pages > 0),
    max_rows integer NOT NULL,
    started_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);
COMMENT ON TABLE shardmap.verification IS 'verifications that can be broken off; see the view shardmap.verifications';
COMMENT ON COLUMN shardmap.verification.id IS 'number of the verification';
COMMENT ON COLUMN shardmap.verification.relation IS 'the logical table';
COMMENT ON COLUMN shardmap.verification.keyspace IS 'its keyspace';
COMMENT ON COLUMN shardmap.verification.slice_pages IS 'pages of a shard''s table that are read in one transaction';
COMMENT ON COLUMN shardmap.verification.max_rows IS 'rows that are named, of each shard';
COMMENT ON COLUMN shardmap.verification.started_at IS 'when it was started';
COMMENT ON SEQUENCE shardmap.verification_id_seq IS 'numbers of verifications';

CREATE TABLE shardmap.verification_shard (
    verification bigint NOT NULL REFERENCES shardmap.verification ON DELETE CASCADE,
    shard text COLLATE pg_catalog."C" NOT NULL,
    primary_key text[],
    filenode bigint,
    pages bigint,
    next_page bigint NOT NULL DEFAULT 0,
    rows bigint NOT NULL DEFAULT 0,
    misplaced bigint NOT NULL DEFAULT 0,
    checksum numeric NOT NULL DEFAULT 0,
    slices integer NOT NULL DEFAULT 0,
    restarts integer NOT NULL DEFAULT 0,
    read_at timestamptz,
    error text,
    CONSTRAINT verification_shard_pkey PRIMARY KEY (verification, shard)
);
COMMENT ON TABLE shardmap.verification_shard IS 'how far verifications have come on each shard';
COMMENT ON COLUMN shardmap.verification_shard.verification IS 'number of the verification';
COMMENT ON COLUMN shardmap.verification_shard.shard IS 'the shard';
COMMENT ON COLUMN shardmap.verification_shard.primary_key IS 'columns of the primary key there; NULL: not known yet';
COMMENT ON COLUMN shardmap.verification_shard.filenode IS 'file of the table there: another one means that it was rewritten';
COMMENT ON COLUMN shardmap.verification_shard.pages IS 'pages that the table had when it was first looked at; NULL: not known yet';
COMMENT ON COLUMN shardmap.verification_shard.next_page IS 'pages before this one were read';
COMMENT ON COLUMN shardmap.verification_shard.rows IS 'rows on them';
COMMENT ON COLUMN shardmap.verification_shard.misplaced IS 'of these, rows whose key another shard owns';
COMMENT ON COLUMN shardmap.verification_shard.checksum IS 'sum of the checksums of these rows';
COMMENT ON COLUMN shardmap.verification_shard.slices IS 'slices that were read';
COMMENT ON COLUMN shardmap.verification_shard.restarts IS 'how often it began anew, as the table had been rewritten';
COMMENT ON COLUMN shardmap.verification_shard.read_at IS 'when a slice was last read';
COMMENT ON COLUMN shardmap.verification_shard.error IS 'why the last attempt failed; the next run tries again';

CREATE TABLE shardmap.verification_row (
    verification bigint NOT NULL REFERENCES shardmap.verification ON DELETE CASCADE,
    shard text COLLATE pg_catalog."C" NOT NULL,
    finding text NOT NULL,
    key text,
    row_id text,
    owner text,
    detail text
);
COMMENT ON TABLE shardmap.verification_row IS 'rows that verifications have found on a shard that does not own them';
COMMENT ON COLUMN shardmap.verification_row.verification IS 'number of the verification';
COMMENT ON COLUMN shardmap.verification_row.shard IS 'the shard that has the row';
COMMENT ON COLUMN shardmap.verification_row.finding IS 'misplaced, orphan or doubled, as in shardmap.verify()';
COMMENT ON COLUMN shardmap.verification_row.key IS 'its key';
COMMENT ON COLUMN shardmap.verification_row.row_id IS 'its primary key, or for want of one an MD5 of the row';
COMMENT ON COLUMN shardmap.verification_row.owner IS 'the shard that owns the key; NULL: none does';
COMMENT ON COLUMN shardmap.verification_row.detail IS 'what the owner has of it';
CREATE INDEX verification_row_of ON shardmap.verification_row (verification, shard);
GRANT SELECT ON shardmap.verification, shardmap.verification_shard TO PUBLIC;
GRANT SELECT ON shardmap.verification_row TO shardmap_admin;

CREATE VIEW shardmap.verifications AS
    SELECT v.id, v.relation, CASE WHEN s.is_read AND s.misplaced = 0 THEN 'clean' WHEN s.is_read THEN 'misplaced'
            WHEN s.error IS NOT NULL THEN 'unknown' ELSE 'under way' END AS state,
        s.pages_read / nullif(s.pages, 0)::double precision AS progress, s.pages, s.pages_read, s.rows, s.misplaced, v.started_at, s.read_at, s.error
      FROM shardmap.verification v CROSS JOIN LATERAL (
        SELECT coalesce(pg_catalog.bool_and(h.pages IS NOT NULL AND h.next_page >= h.pages), false) AS is_read,
            pg_catalog.sum(h.pages)::bigint AS pages, pg_catalog.sum(least(h.next_page, h.pages))::bigint AS pages_read,
            pg_catalog.sum(h.rows)::bigint AS rows, pg_catalog.sum(h.misplaced)::bigint AS misplaced, pg_catalog.max(h.read_at) AS read_at,
            pg_catalog.string_agg(pg_catalog.format('%s: %s', h.shard, h.error), '; ' ORDER BY h.shard) FILTER (WHERE h.error IS NOT NULL) AS error
          FROM shardmap.verification_shard h WHERE h.verification = v.id) s
     ORDER BY v.id;
COMMENT ON VIEW shardmap.verifications IS 'verifications that can be broken off, how far they have come and what they have found';
COMMENT ON COLUMN shardmap.verifications.id IS 'number of the verification';
COMMENT ON COLUMN shardmap.verifications.relation IS 'the logical table';
COMMENT ON COLUMN shardmap.verifications.state IS 'under way: not all was read yet; unknown: some could not be read, the next run tries again; clean; misplaced: see shardmap.verification_row';
COMMENT ON COLUMN shardmap.verifications.progress IS 'part of the pages that was read, 0 to 1';
COMMENT ON COLUMN shardmap.verifications.pages IS 'pages of all shards'' tables';
COMMENT ON COLUMN shardmap.verifications.pages_read IS 'of these, those that were read';
COMMENT ON COLUMN shardmap.verifications.rows IS 'rows on them';
COMMENT ON COLUMN shardmap.verifications.misplaced IS 'of these, rows that lie on a shard that does not own their key';
COMMENT ON COLUMN shardmap.verifications.started_at IS 'when it was started';
COMMENT ON COLUMN shardmap.verifications.read_at IS 'when a slice was last read';
COMMENT ON COLUMN shardmap.verifications.error IS 'shards that could not be read, and why';
GRANT SELECT ON shardmap.verifications TO PUBLIC;

CREATE FUNCTION shardmap._enter_verification(relation regclass, keyspace text, slice_pages integer, max_rows integer) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH new AS (INSERT INTO shardmap.verification (relation, keyspace, slice_pages, max_rows) VALUES ($1, $2, $3, $4) RETURNING id
    ), shards AS (INSERT INTO shardmap.verification_shard (verification, shard)
        SELECT new.id, s.name FROM new, shardmap.shard s WHERE s.keyspace = $2 RETURNING 1)
    SELECT new.id FROM new
$$;
COMMENT ON FUNCTION shardmap._enter_verification(regclass, text, integer, integer) IS 'enters a verification in the catalog; returns its number';

-- `changes`: columns of verification_shard; `named`: rows of verification_row, or NULL: those so far are deleted.
CREATE FUNCTION shardmap._note_verified(verification bigint, shard text, changes jsonb, named jsonb DEFAULT '[]') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    one shardmap.verification_shard;
BEGIN
    SELECT h.* INTO STRICT one FROM shardmap.verification_shard h WHERE h.verification = $1 AND h.shard = $2 FOR UPDATE;
    one := jsonb_populate_record(one, changes);
    UPDATE shardmap.verification_shard h SET primary_key = one.primary_key, filenode = one.filenode, pages = one.pages, next_page = one.next_page,
            rows = one.rows, misplaced = one.misplaced, checksum = one.checksum, slices = one.slices, restarts = one.restarts,
            read_at = one.read_at, error = one.error
     WHERE h.verification = $1 AND h.shard = $2;
    IF named IS NULL THEN
        DELETE FROM shardmap.verification_row r WHERE r.verification = $1 AND r.shard = $2;
    ELSE
        INSERT INTO shardmap.verification_row (verification, shard, finding, key, row_id, owner, detail)
        SELECT $1, $2, f.finding, f.key, f.row_id, f.owner, f.detail
          FROM jsonb_to_recordset(named) f (finding text, key text, row_id text, owner text, detail text);
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap._note_verified(bigint, text, jsonb, jsonb) IS 'writes down how far a verification has come on a shard';

CREATE FUNCTION shardmap.start_verification(relation regclass, slice_pages integer DEFAULT 131072, max_rows integer DEFAULT 100) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    number bigint;
    keyspace text := (SELECT l.keyspace FROM shardmap.logical_table l WHERE l.relation = $1);
BEGIN
    IF keyspace IS NULL THEN
        RAISE EXCEPTION 'table % is not distributed', relation
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'See shardmap.tables.';
    ELSIF slice_pages IS NULL OR slice_pages < 1 OR max_rows IS NULL OR max_rows < 0 THEN
        RAISE EXCEPTION 'slice_pages must be at least 1, max_rows at least 0' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    number := shardmap._enter_verification(relation, keyspace, slice_pages, max_rows);
    RAISE NOTICE 'verification % is begun', number USING HINT = format('Run it: CALL shardmap.run_verification(%s).', number);
    RETURN number;
END
$$;
COMMENT ON FUNCTION shardmap.start_verification(regclass, integer, integer) IS
    'begins a verification of a logical table that can be broken off, as shardmap.verify() makes it at one go; returns its number; slice_pages: pages of each shard that are read in one transaction (1 GB)';

-- What the shards' tables are; a table that was rewritten since begins anew. False: one of the shards' has.
CREATE FUNCTION shardmap._look_at_files(this shardmap.verification, shards text[]) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    answer record;
    is_same boolean := true;
BEGIN
    FOR answer IN
        SELECT a.shard, a.error, (a.answer::json ->> 0)::bigint AS filenode, (a.answer::json ->> 1)::bigint AS pages, h.filenode AS before, h.restarts
          FROM shardmap._ask_shards(shards, format('SELECT json_build_array(pg_relation_filenode(%1$L), '
            'pg_relation_size(%1$L) / current_setting(''block_size'')::bigint)::text AS answer', shardmap._shard_table(this.relation)), false) a
          JOIN shardmap.verification_shard h ON h.verification = this.id AND h.shard = a.shard
    LOOP
        CONTINUE WHEN answer.filenode = answer.before;
        is_same := false;
        IF answer.error IS NOT NULL THEN
            PERFORM shardmap._note_verified(this.id, answer.shard, jsonb_build_object('error', answer.error));
        ELSE
            PERFORM shardmap._note_verified(this.id, answer.shard, jsonb_build_object('filenode', answer.filenode, 'pages', answer.pages, 'next_page', 0,
                'rows', 0, 'misplaced', 0, 'checksum', 0, 'slices', 0,
                'restarts', answer.restarts + CASE WHEN answer.before IS NULL THEN 0 ELSE 1 END), NULL);
        END IF;
    END LOOP;
    RETURN is_same;
END
$$;
COMMENT ON FUNCTION shardmap._look_at_files(shardmap.verification, text[]) IS 'whether the shards'' tables are the files that were read before; those that are not begin anew';

CREATE FUNCTION shardmap._begin_verification(id bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    this shardmap.verification;
    answer record;
BEGIN
    PERFORM shardmap._check_no_block('shardmap.run_verification');
    SELECT v.* INTO this FROM shardmap.verification v WHERE v.id = $1;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'verification % does not exist', id USING ERRCODE = 'undefined_object', HINT = 'See shardmap.verifications.';
    ELSIF NOT EXISTS (SELECT FROM shardmap.logical_table l WHERE l.relation = this.relation) THEN
        RAISE EXCEPTION 'the table of verification % is not distributed any more', id USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    FOR answer IN SELECT r.* FROM shardmap._readable_shards(this.relation, ARRAY(
        SELECT h.shard FROM shardmap.verification_shard h WHERE h.verification = $1 AND (h.pages IS NULL OR h.next_page < h.pages) ORDER BY 1)) r
    LOOP
        PERFORM shardmap._note_verified(id, answer.shard, jsonb_build_object('error', answer.error, 'primary_key', answer.primary_key));
    END LOOP;
    PERFORM shardmap._look_at_files(this, ARRAY(SELECT h.shard FROM shardmap.verification_shard h
        WHERE h.verification = $1 AND h.error IS NULL AND (h.pages IS NULL OR h.next_page < h.pages) ORDER BY 1));
END
$$;
COMMENT ON FUNCTION shardmap._begin_verification(bigint) IS 'what comes before the first slice of a run: which shards can be read, and what their tables are';

-- One slice of the shards that are farthest behind. False: there is nothing left that can be read.
CREATE FUNCTION shardmap._verify_slice(id bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    this shardmap.verification;
    shards text[];
    first bigint;
    scope text;
    keys text[];
    entries text;
    answers jsonb;
    answer record;
    bad_rows jsonb;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('shardmap.verification ' || id::text, 0)); -- several runs share the work
    SELECT v.* INTO this FROM shardmap.verification v WHERE v.id = $1;
    SELECT h.next_page, h.primary_key, array_agg(h.shard ORDER BY h.shard) INTO first, keys, shards FROM shardmap.verification_shard h
     WHERE h.verification = $1 AND h.error IS NULL AND h.next_page < h.pages GROUP BY h.next_page, h.primary_key ORDER BY h.next_page LIMIT 1;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    scope := format('t.ctid >= ''(%s,0)''::tid AND t.ctid < ''(%s,0)''::tid', first, least(first + this.slice_pages, 4294967295));
    entries := shardmap._entries_digest(this.keyspace);
    SELECT jsonb_agg(to_jsonb(a)) INTO answers FROM shardmap._ask_shards(shards,
        shardmap._summary_sql(this.relation, keys, scope, shardmap._entry_sql(this.keyspace)), false) a;
    IF NOT shardmap._look_at_files(this, ARRAY(SELECT a ->> 'shard' FROM jsonb_array_elements(answers) a WHERE a ->> 'error' IS NULL)) THEN
        RETURN true; -- what was read is read again
    END IF;
    FOR answer IN
        SELECT h.*, a.error AS failed, f.rows AS rows_here, f.misplaced AS misplaced_here, f.checksum AS checksum_here, f.foreign_entries,
            greatest(this.max_rows - (SELECT count(*) FROM shardmap.verification_row r WHERE r.verification = $1 AND r.shard = h.shard), 0)::integer AS room
          FROM jsonb_to_recordset(answers) a (shard text, answer text, error text)
          JOIN shardmap.verification_shard h ON h.verification = $1 AND h.shard = a.shard
         CROSS JOIN LATERAL shardmap._sum_entries(this.keyspace, a.shard, a.answer) f
    LOOP
        IF answer.failed IS NOT NULL THEN
            PERFORM shardmap._note_verified(id, answer.shard, jsonb_build_object('error', answer.failed));
            CONTINUE;
        END IF;
        bad_rows := '[]';
        IF answer.foreign_entries <> '{}' AND answer.room > 0 THEN
            SELECT coalesce(jsonb_agg(to_jsonb(f)), '[]') INTO bad_rows FROM shardmap._foreign_rows(this.relation, keys, answer.shard,
                answer.foreign_entries, answer.room, scope => scope) f;
        END IF;
        PERFORM shardmap._note_verified(id, answer.shard, jsonb_build_object('next_page', first + this.slice_pages, 'rows', answer.rows + answer.rows_here,
            'misplaced', answer.misplaced + answer.misplaced_here, 'checksum', answer.checksum + answer.checksum_here,
            'slices', answer.slices + 1, 'read_at', clock_timestamp()), bad_rows);
    END LOOP;
    IF shardmap._entries_digest(this.keyspace) IS DISTINCT FROM entries THEN
        RAISE EXCEPTION 'the map of keyspace "%" changed while table % was read', this.keyspace, this.relation USING ERRCODE = 'serialization_failure';
    END IF;
    PERFORM shardmap._crash_here('verification_slice');
    RAISE NOTICE 'verification %: % %%', id, (SELECT trunc(v.progress * 100) FROM shardmap.verifications v WHERE v.id = $1);
    RETURN true;
END
$$;
COMMENT ON FUNCTION shardmap._verify_slice(bigint) IS 'reads the next slice of a verification; false: nothing is left that can be read';

-- No search_path of its own: see run_move().
CREATE PROCEDURE shardmap.run_verification(id bigint)
LANGUAGE plpgsql AS $$
DECLARE
    goes_on boolean := true;
BEGIN
    PERFORM shardmap._begin_verification(id);
    COMMIT;
    WHILE goes_on LOOP
        BEGIN
            goes_on := shardmap._verify_slice(id);
        EXCEPTION
            WHEN serialization_failure THEN NULL; -- the map has changed meanwhile: again
        END;
        COMMIT;
    END LOOP;
END
$$;
COMMENT ON PROCEDURE shardmap.run_verification(bigint) IS 'reads what a verification has not read yet, slice by slice, each committed; broken off, it goes on when it is called again';
REVOKE ALL ON PROCEDURE shardmap.run_verification(bigint) FROM PUBLIC;
GRANT EXECUTE ON PROCEDURE shardmap.run_verification(bigint) TO shardmap_admin;

CREATE FUNCTION shardmap.drop_verification(id bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM shardmap.verification v WHERE v.id = $1;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'verification % does not exist', id USING ERRCODE = 'undefined_object', HINT = 'See shardmap.verifications.';
    END IF;
END
$$;
COMMENT ON FUNCTION shardmap.drop_verification(bigint) IS 'forgets a verification and what it has found';

DO $$
DECLARE
    function text;
BEGIN
    FOREACH function IN ARRAY ARRAY['_enter_verification(regclass, text, integer, integer)', '_note_verified(bigint, text, jsonb, jsonb)',
        'start_verification(regclass, integer, integer)', '_look_at_files(shardmap.verification, text[])', '_begin_verification(bigint)',
        '_verify_slice(bigint)', 'drop_verification(bigint)'] LOOP
        EXECUTE pg_catalog.format('REVOKE ALL ON FUNCTION shardmap.%s FROM PUBLIC', function);
        EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION shardmap.%s TO shardmap_admin', function);
    END LOOP;
END
$$;

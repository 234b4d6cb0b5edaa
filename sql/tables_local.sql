-- The logical table: how one table takes another's place here.
--
-- Decides what stands under the table's name on the coordinator, and carries over what belongs to the name: owner,
-- grants, policies, comments, sequences, views. What always holds: views keep their OID, and with it their own grants
-- and dependents; a sequence goes on where it was; what is carried over is read in full before anything is replaced.
-- Read tables.sql next.

CREATE FUNCTION shardmap._dependent_views(relation regclass) RETURNS TABLE (view oid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT DISTINCT r.ev_class FROM pg_depend d JOIN pg_rewrite r ON r.oid = d.objid JOIN pg_class c ON c.oid = r.ev_class
     WHERE d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = relation
       AND c.relkind = 'v'
$$;
COMMENT ON FUNCTION shardmap._dependent_views(regclass) IS 'views that read a table themselves';
REVOKE ALL ON FUNCTION shardmap._dependent_views(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._dependent_views(regclass) TO shardmap_admin;

-- The statement that makes a table with the same columns and checks; without indexes. `tail`: PARTITION BY, or nothing.
CREATE FUNCTION shardmap._local_table_ddl(relation regclass, key_column name, tail text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('CREATE TABLE %s (%s)%s', shardmap._shard_table(relation),
        (SELECT string_agg(part, ', ' ORDER BY position, part) FROM (
            SELECT a.attnum::integer AS position, format('%I %s%s%s%s', a.attname, format_type(a.atttypid, a.atttypmod),
                (SELECT format(' COLLATE %I.%I', n.nspname, l.collname)
                   FROM pg_collation l JOIN pg_namespace n ON n.oid = l.collnamespace
                  WHERE l.oid = a.attcollation AND a.attcollation <> t.typcollation),
                CASE WHEN a.attidentity <> '' THEN (
                        SELECT format(' GENERATED %s AS IDENTITY (SEQUENCE NAME %I.%I INCREMENT BY %s MINVALUE %s MAXVALUE %s '
                                'START WITH %s CACHE %s%s)', CASE a.attidentity WHEN 'a' THEN 'ALWAYS' ELSE 'BY DEFAULT' END,
                            n.nspname, c.relname, s.seqincrement, s.seqmin, s.seqmax, s.seqstart, s.seqcache,
                            CASE WHEN s.seqcycle THEN ' CYCLE' ELSE '' END)
                          FROM pg_depend x JOIN pg_class c ON c.oid = x.objid JOIN pg_sequence s ON s.seqrelid = c.oid
                          JOIN pg_namespace n ON n.oid = c.relnamespace
                         WHERE x.refclassid = 'pg_class'::regclass AND x.refobjid = a.attrelid AND x.refobjsubid = a.attnum
                           AND x.classid = 'pg_class'::regclass AND x.deptype = 'i')
                    WHEN d.adbin IS NULL THEN ''
                    WHEN a.attgenerated = 's' THEN format(' GENERATED ALWAYS AS (%s) STORED', pg_get_expr(d.adbin, d.adrelid))
                    WHEN a.attgenerated <> '' THEN format(' GENERATED ALWAYS AS (%s) VIRTUAL', pg_get_expr(d.adbin, d.adrelid))
                    ELSE ' DEFAULT ' || pg_get_expr(d.adbin, d.adrelid) END,
                CASE WHEN a.attnotnull OR a.attname = key_column THEN ' NOT NULL' END) AS part
              FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
              LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
             WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
            UNION ALL
            -- NO INHERIT means nothing on a shard and is refused on a partitioned table.
            SELECT 10000, format('CONSTRAINT %I CHECK (%s)', o.conname, pg_get_expr(o.conbin, o.conrelid))
              FROM pg_constraint o WHERE o.conrelid = relation AND o.contype = 'c') parts),
        tail)
$$;
COMMENT ON FUNCTION shardmap._local_table_ddl(regclass, name, text) IS 'statement that makes a table of the same name, columns and checks';
REVOKE ALL ON FUNCTION shardmap._local_table_ddl(regclass, name, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._local_table_ddl(regclass, name, text) TO shardmap_admin;

CREATE FUNCTION shardmap._grant_statements(relation regclass) RETURNS TABLE (statement text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH target AS (
        SELECT c.oid, c.relacl, c.relowner, shardmap._shard_table(c.oid) AS name,
            CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END AS kind
          FROM pg_class c WHERE c.oid = relation
    )
    -- What ALTER DEFAULT PRIVILEGES gave to the new table.
    SELECT format('REVOKE ALL ON %s %s FROM %s', t.kind, t.name, CASE x.grantee WHEN 0 THEN 'PUBLIC' ELSE x.grantee::regrole::text END)
      FROM target t, (SELECT DISTINCT e.grantee FROM pg_default_acl d, aclexplode(d.defaclacl) e
            WHERE d.defaclobjtype IN ('r', 'S')) x
     WHERE x.grantee <> t.relowner
    UNION ALL
    SELECT format('REVOKE ALL ON %s %s FROM %s', t.kind, t.name, t.relowner::regrole) FROM target t WHERE t.relacl IS NOT NULL
    UNION ALL
    SELECT format('GRANT %s ON %s %s TO %s%s', x.privilege_type, t.kind, t.name,
        CASE x.grantee WHEN 0 THEN 'PUBLIC' ELSE x.grantee::regrole::text END,
        CASE WHEN x.is_grantable THEN ' WITH GRANT OPTION' END)
      FROM target t, aclexplode(t.relacl) x
    UNION ALL
    SELECT format('GRANT %s (%I) ON TABLE %s TO %s%s', x.privilege_type, a.attname, t.name,
        CASE x.grantee WHEN 0 THEN 'PUBLIC' ELSE x.grantee::regrole::text END,
        CASE WHEN x.is_grantable THEN ' WITH GRANT OPTION' END)
      FROM target t JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped,
        aclexplode(a.attacl) x
$$;
COMMENT ON FUNCTION shardmap._grant_statements(regclass) IS 'statements that give a new table or sequence of the same name the same privileges';
REVOKE ALL ON FUNCTION shardmap._grant_statements(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._grant_statements(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._sequence_statements(relation regclass) RETURNS TABLE (statement text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    sequence record;
    last bigint;
    called boolean;
BEGIN
    FOR sequence IN
        SELECT c.oid::regclass AS oid, shardmap._shard_table(c.oid) AS name, a.attname, x.deptype
          FROM pg_depend x JOIN pg_class c ON c.oid = x.objid AND c.relkind = 'S'
          JOIN pg_attribute a ON a.attrelid = x.refobjid AND a.attnum = x.refobjsubid
         WHERE x.classid = 'pg_class'::regclass AND x.refclassid = 'pg_class'::regclass AND x.refobjid = relation
           AND x.deptype IN ('a', 'i')
         ORDER BY c.relname
    LOOP
        IF sequence.deptype = 'a' THEN
            statement := format('ALTER SEQUENCE %s OWNED BY %s.%I', sequence.name, shardmap._shard_table(relation), sequence.attname);
            RETURN NEXT;
        ELSE
            EXECUTE format('SELECT s.last_value, s.is_called FROM %s s', sequence.name) INTO last, called;
            statement := format('SELECT pg_catalog.setval(%L, %s, %L)', sequence.name, last, called);
            RETURN NEXT;
            RETURN QUERY SELECT g.statement FROM shardmap._grant_statements(sequence.oid) g;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._sequence_statements(regclass) IS 'statements that give a new table of the same name the sequences of the old one, where they stand';
REVOKE ALL ON FUNCTION shardmap._sequence_statements(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._sequence_statements(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._policy_statements(relation regclass) RETURNS TABLE (statement text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', shardmap._shard_table(relation))
      FROM pg_class c WHERE c.oid = relation AND c.relrowsecurity
    UNION ALL
    SELECT format('ALTER TABLE %s FORCE ROW LEVEL SECURITY', shardmap._shard_table(relation))
      FROM pg_class c WHERE c.oid = relation AND c.relforcerowsecurity
    UNION ALL
    SELECT format('CREATE POLICY %I ON %s AS %s FOR %s TO %s%s%s', p.polname, shardmap._shard_table(relation),
        CASE WHEN p.polpermissive THEN 'PERMISSIVE' ELSE 'RESTRICTIVE' END,
        CASE p.polcmd WHEN 'r' THEN 'SELECT' WHEN 'a' THEN 'INSERT' WHEN 'w' THEN 'UPDATE' WHEN 'd' THEN 'DELETE' ELSE 'ALL' END,
        (SELECT string_agg(CASE r WHEN 0 THEN 'PUBLIC' ELSE r::regrole::text END, ', ') FROM unnest(p.polroles) r),
        ' USING (' || pg_get_expr(p.polqual, p.polrelid) || ')',
        ' WITH CHECK (' || pg_get_expr(p.polwithcheck, p.polrelid) || ')')
      FROM pg_policy p WHERE p.polrelid = relation
    UNION ALL
    SELECT format('COMMENT ON POLICY %I ON %s IS %L', p.polname, shardmap._shard_table(relation), d.description)
      FROM pg_policy p JOIN pg_description d ON d.classoid = 'pg_policy'::regclass AND d.objoid = p.oid
     WHERE p.polrelid = relation
$$;
COMMENT ON FUNCTION shardmap._policy_statements(regclass) IS 'statements that give a new table of the same name the same row security';
REVOKE ALL ON FUNCTION shardmap._policy_statements(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._policy_statements(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._comment_statements(relation regclass) RETURNS TABLE (statement text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE d.objsubid
        WHEN 0 THEN format('COMMENT ON TABLE %s IS %L', shardmap._shard_table(relation), d.description)
        ELSE format('COMMENT ON COLUMN %s.%I IS %L', shardmap._shard_table(relation), a.attname, d.description) END
      FROM pg_description d
      LEFT JOIN pg_attribute a ON a.attrelid = d.objoid AND a.attnum = d.objsubid AND d.objsubid > 0
     WHERE d.classoid = 'pg_class'::regclass AND d.objoid = relation
    UNION ALL
    SELECT format('COMMENT ON CONSTRAINT %I ON %s IS %L', o.conname, shardmap._shard_table(relation), d.description)
      FROM pg_constraint o JOIN pg_description d ON d.classoid = 'pg_constraint'::regclass AND d.objoid = o.oid
     WHERE o.conrelid = relation AND o.contype = 'c'
$$;
COMMENT ON FUNCTION shardmap._comment_statements(regclass) IS 'statements that give a new table of the same name the same comments';
REVOKE ALL ON FUNCTION shardmap._comment_statements(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._comment_statements(regclass) TO shardmap_admin;

CREATE FUNCTION shardmap._view_statements(relation regclass) RETURNS TABLE (statement text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('CREATE OR REPLACE VIEW %s%s AS %s', shardmap._shard_table(c.oid),
        ' WITH (' || array_to_string(c.reloptions, ', ') || ')', pg_get_viewdef(c.oid))
      FROM shardmap._dependent_views(relation) v JOIN pg_class c ON c.oid = v.view
$$;
COMMENT ON FUNCTION shardmap._view_statements(regclass) IS 'statements that make the views on a table read a new table of the same name';
REVOKE ALL ON FUNCTION shardmap._view_statements(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._view_statements(regclass) TO shardmap_admin;

-- Puts a new table in the place of `relation`, with all that belongs to the name. The old one is left, out of the way,
-- for the caller to drop; the result is the new one.
CREATE FUNCTION shardmap._replace_table(relation regclass, ddl text) RETURNS regclass
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name text := shardmap._shard_table(relation);
    statements text[];
    statement text;
    sequence regclass;
BEGIN
    statements := format('ALTER TABLE %s OWNER TO %s', name, (SELECT c.relowner::regrole FROM pg_class c WHERE c.oid = relation))
        || ARRAY(SELECT g.statement FROM shardmap._grant_statements(relation) g)
        || ARRAY(SELECT s.statement FROM shardmap._sequence_statements(relation) s)
        || ARRAY(SELECT p.statement FROM shardmap._policy_statements(relation) p)
        || ARRAY(SELECT c.statement FROM shardmap._comment_statements(relation) c)
        || ARRAY(SELECT v.statement FROM shardmap._view_statements(relation) v);
    EXECUTE format('ALTER TABLE %s RENAME TO %I', name, '_shardmap_old_' || relation::oid);
    FOR sequence IN
        SELECT x.objid::regclass FROM pg_depend x JOIN pg_sequence s ON s.seqrelid = x.objid
         WHERE x.classid = 'pg_class'::regclass AND x.refclassid = 'pg_class'::regclass AND x.refobjid = relation
           AND x.deptype = 'i'
    LOOP
        EXECUTE format('ALTER SEQUENCE %s RENAME TO %I', shardmap._shard_table(sequence), '_shardmap_old_' || sequence::oid);
    END LOOP;
    EXECUTE ddl;
    FOREACH statement IN ARRAY statements LOOP
        EXECUTE statement;
    END LOOP;
    RETURN name::regclass;
END
$$;
COMMENT ON FUNCTION shardmap._replace_table(regclass, text) IS 'puts a new table in the place of another, with its owner, grants, sequences, policies, comments and views';
REVOKE ALL ON FUNCTION shardmap._replace_table(regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._replace_table(regclass, text) TO shardmap_admin;

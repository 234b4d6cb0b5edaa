-- Privileges on the shards' tables.
--
-- Decides what the roles that users connect as on a shard may do there with a logical table: what the user may do here.
-- What always holds: the coordinator checks its own privileges and row security first in any case; nothing is taken away
-- on a shard. A user's role there is the option "user" of the user mapping, else the user's own name; roles that the
-- shard does not have are left out. Read tables_drop.sql next.

-- Names only: what else a mapping holds is secret.
CREATE FUNCTION shardmap._remote_roles(shard text) RETURNS TABLE (local_role oid, remote_role text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT m.umuser, coalesce((SELECT o.option_value FROM pg_options_to_table(m.umoptions) o WHERE o.option_name = 'user'),
            pg_get_userbyid(m.umuser))
      FROM pg_foreign_server f JOIN pg_user_mapping m ON m.umserver = f.oid
     WHERE f.srvname = shard
$$;
COMMENT ON FUNCTION shardmap._remote_roles(text) IS 'roles that users connect to a shard as (local role 0: those without a mapping of their own)';
REVOKE ALL ON FUNCTION shardmap._remote_roles(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._remote_roles(text) TO shardmap_admin;

CREATE FUNCTION shardmap._shard_grants(relation regclass, shard text) RETURNS TABLE (remote_role text, privileges text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH kinds (privilege, ofcolumn) AS (
        VALUES ('SELECT', true), ('INSERT', true), ('UPDATE', true), ('DELETE', false), ('TRUNCATE', false)
    )
    SELECT r.remote_role, string_agg(DISTINCT p.privilege, ', ')
      FROM shardmap._remote_roles(shard) r, LATERAL (
            SELECT k.privilege FROM kinds k
             WHERE r.local_role <> 0 AND has_table_privilege(r.local_role, relation, k.privilege)
                OR r.local_role = 0 AND EXISTS (SELECT FROM pg_class c, aclexplode(c.relacl) x
                        WHERE c.oid = relation AND x.privilege_type = k.privilege)
            UNION ALL
            SELECT format('%s (%I)', k.privilege, a.attname) FROM kinds k, pg_attribute a
             WHERE k.ofcolumn AND r.local_role <> 0 AND a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
               AND NOT has_table_privilege(r.local_role, relation, k.privilege)
               AND has_column_privilege(r.local_role, relation, a.attnum, k.privilege)
            UNION ALL
            -- A copy's row is written by its key, whatever was done to the row here.
            SELECT k.privilege FROM kinds k
             WHERE k.privilege <> 'TRUNCATE' AND EXISTS (SELECT FROM shardmap.reference_table t WHERE t.relation = $1)
               AND (r.local_role <> 0 AND (has_table_privilege(r.local_role, relation, 'DELETE')
                        OR has_any_column_privilege(r.local_role, relation, 'INSERT, UPDATE'))
                    OR r.local_role = 0 AND EXISTS (SELECT FROM pg_class c, aclexplode(c.relacl) x
                        WHERE c.oid = relation AND x.privilege_type IN ('INSERT', 'UPDATE', 'DELETE')))) p
     GROUP BY r.remote_role
$$;
COMMENT ON FUNCTION shardmap._shard_grants(regclass, text) IS 'what each role on a shard needs on a table there, by what its users may do here';
REVOKE ALL ON FUNCTION shardmap._shard_grants(regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._shard_grants(regclass, text) TO shardmap_admin;

CREATE FUNCTION shardmap._grant_on_shard(relation regclass, shard text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    schema text := (SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = relation);
    role record;
    sees_schema text;
BEGIN
    FOR role IN SELECT g.remote_role, g.privileges FROM shardmap._shard_grants(relation, shard) g LOOP
        SELECT r[1] INTO sees_schema FROM shardmap.remote_rows(shard, format(
            'SELECT pg_catalog.has_schema_privilege(r.oid, %L, ''USAGE'')::pg_catalog.text FROM pg_catalog.pg_roles r '
            'WHERE r.rolname = %L AND r.rolname <> CURRENT_USER AND NOT r.rolsuper', schema, role.remote_role)) r;
        CONTINUE WHEN NOT FOUND;
        IF NOT sees_schema::boolean THEN
            PERFORM shardmap.remote_execute(shard, format('GRANT USAGE ON SCHEMA %I TO %I', schema, role.remote_role));
        END IF;
        PERFORM shardmap.remote_execute(shard, format('GRANT %s ON TABLE %s TO %I',
            role.privileges, shardmap._shard_table(relation), role.remote_role));
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._grant_on_shard(regclass, text) IS 'grants on a shard what the users that connect to it may do with a table here';
REVOKE ALL ON FUNCTION shardmap._grant_on_shard(regclass, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._grant_on_shard(regclass, text) TO shardmap_admin;

CREATE FUNCTION shardmap.grant_on_shards(relation regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    keyspaces text[] := ARRAY(SELECT t.keyspace FROM shardmap.reference_table t WHERE t.relation = $1);
    shard text;
BEGIN
    IF keyspaces = '{}' THEN
        keyspaces := ARRAY[(shardmap._find_table(relation)).keyspace];
    END IF;
    FOR shard IN SELECT s.name FROM shardmap.shard s WHERE s.keyspace = ANY (keyspaces) ORDER BY s.keyspace, s.number LOOP
        PERFORM shardmap._grant_on_shard(relation, shard);
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap.grant_on_shards(regclass) IS 'lets the shards follow GRANTs and user mappings made after a table was distributed; takes nothing away';
REVOKE ALL ON FUNCTION shardmap.grant_on_shards(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap.grant_on_shards(regclass) TO shardmap_admin;

-- What a reference table must not become.
--
-- Refuses what would make it differ from its copies: other columns, another primary key or name, triggers that are off or
-- gone, inheritance. Everything else can be altered here alone: constraints, indexes, defaults, owner. A table that was
-- never complete is let be: a dump that is being restored brings rows, key and triggers one after the other. Read
-- planning.sql next.

CREATE FUNCTION shardmap._broken_reference(relation regclass, layout text[]) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE
        WHEN shardmap._reference_layout($1) IS DISTINCT FROM layout
            THEN 'Its name, columns or primary key would not be those of its copies.'
        WHEN (SELECT count(*) FROM pg_trigger g
               WHERE g.tgrelid = $1 AND g.tgfoid = 'shardmap._replicate_reference()'::regprocedure AND g.tgenabled = 'A'
                 AND g.tgqual IS NULL AND g.tgattr = ''::int2vector AND (g.tgname, g.tgtype) IN (
                    ('shardmap_reference_row', 29), ('shardmap_reference_statement', 60))) <> 2
            THEN 'Its copies would not follow what is written to it: it needs its triggers, enabled always.'
        WHEN EXISTS (SELECT FROM pg_inherits i WHERE $1 IN (i.inhrelid, i.inhparent))
            THEN 'It would be part of an inheritance tree.'
        WHEN (SELECT c.relpersistence FROM pg_class c WHERE c.oid = $1) <> 'p'
            THEN 'A crash would empty an unlogged table, and not its copies.'
        END
$$;
COMMENT ON FUNCTION shardmap._broken_reference(regclass, text[]) IS 'why a table is not the reference table of that layout; NULL if it is';

CREATE FUNCTION shardmap._note_complete() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    NEW.complete := shardmap._broken_reference(NEW.relation, NEW.layout) IS NULL;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION shardmap._note_complete() IS 'trigger: looks whether a reference table that is entered has all that it needs';
REVOKE ALL ON FUNCTION shardmap._note_complete() FROM PUBLIC;

CREATE TRIGGER note_complete BEFORE INSERT ON shardmap.reference_table
    FOR EACH ROW EXECUTE FUNCTION shardmap._note_complete();
COMMENT ON TRIGGER note_complete ON shardmap.reference_table IS 'looks whether a reference table that is entered has all that it needs';

-- The stack is read in English whatever the session's language, for which the owner's rights are needed.
CREATE FUNCTION shardmap._guard_references() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lc_messages = 'C' AS $$
DECLARE
    stack text;
    reference record;
BEGIN
    IF NOT EXISTS (SELECT FROM shardmap.reference_table) THEN
        RETURN;
    END IF;
    GET DIAGNOSTICS stack = PG_CONTEXT;
    IF shardmap._is_administration(stack) THEN
        RETURN;
    END IF;
    FOR reference IN
        SELECT t.relation, t.keyspace, t.complete, shardmap._broken_reference(t.relation, t.layout) AS reason
          FROM shardmap.reference_table t WHERE EXISTS (SELECT FROM pg_class c WHERE c.oid = t.relation)
    LOOP
        IF reference.complete AND reference.reason IS NOT NULL THEN
            RAISE EXCEPTION '% would break reference table %', TG_TAG, reference.relation
                USING ERRCODE = 'feature_not_supported', DETAIL = reference.reason,
                    HINT = 'Alter columns with shardmap.alter_reference(); for the rest, shardmap.undistribute_reference() first.';
        ELSIF NOT reference.complete AND reference.reason IS NULL THEN
            UPDATE shardmap.reference_table t SET complete = true
             WHERE t.relation = reference.relation AND t.keyspace = reference.keyspace;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._guard_references() IS 'refuses what would make a reference table differ from its copies';
REVOKE ALL ON FUNCTION shardmap._guard_references() FROM PUBLIC;

CREATE EVENT TRIGGER shardmap_guard_references ON ddl_command_end
    WHEN TAG IN ('ALTER TABLE', 'ALTER FOREIGN TABLE', 'ALTER INDEX', 'ALTER VIEW', 'ALTER SCHEMA', 'ALTER TRIGGER', 'ALTER TYPE',
        'CREATE TABLE', 'CREATE FOREIGN TABLE', 'CREATE TRIGGER')
    EXECUTE FUNCTION shardmap._guard_references();
COMMENT ON EVENT TRIGGER shardmap_guard_references IS 'refuses what would make a reference table differ from its copies';

CREATE EVENT TRIGGER shardmap_guard_reference_drops ON sql_drop EXECUTE FUNCTION shardmap._guard_references();
COMMENT ON EVENT TRIGGER shardmap_guard_reference_drops IS 'refuses the drop of what keeps a reference table''s copies equal';

-- Transactions that commit on several shards in two phases.
--
-- Decides nothing. What always holds: a record is written by the transaction that it is about, just before it commits, and
-- deleted once all its parts on shards are committed; nobody else writes here. pg_dump leaves it out: a record is worth
-- nothing to another cluster. Read src/core/two_phase.rs and src/pg/remote/resolve.rs next.

CREATE TABLE shardmap.transactions (
    id text COLLATE pg_catalog."C" PRIMARY KEY,
    transaction xid8 NOT NULL,
    servers oid[] NOT NULL,
    decided_at timestamp with time zone NOT NULL
);
COMMENT ON TABLE shardmap.transactions IS 'transactions that have committed in two phases, until all their parts on shards are known to be committed';
COMMENT ON COLUMN shardmap.transactions.id IS 'what the ids of its prepared parts begin with: cluster, database, transaction, a random number';
COMMENT ON COLUMN shardmap.transactions.transaction IS 'number of the transaction on the coordinator';
COMMENT ON COLUMN shardmap.transactions.servers IS 'foreign servers of the shards on which it wrote; twice where two users did';
COMMENT ON COLUMN shardmap.transactions.decided_at IS 'when it was decided to commit it';
GRANT SELECT ON shardmap.transactions TO PUBLIC;

-- As its owner, so that it may read all and has the owner's user mappings. It sends fixed statements only.
CREATE FUNCTION shardmap._prepared_transactions(
    resolve boolean, OUT shard text, OUT prepared_id text, OUT transaction text, OUT owner text, OUT prepared_at text,
    OUT decision text, OUT done boolean, OUT error text)
RETURNS SETOF record
LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp ROWS 10
AS 'MODULE_PATHNAME', 'prepared_transactions_wrapper';
COMMENT ON FUNCTION shardmap._prepared_transactions(boolean) IS
    'this coordinator''s prepared transactions on the shards; resolve: finishes those that are decided';

CREATE VIEW shardmap.in_doubt AS
SELECT p.shard, p.prepared_id, p.transaction::pg_catalog.xid8 AS transaction, p.owner,
       p.prepared_at::timestamp with time zone AS prepared_at, p.decision, p.error
  FROM shardmap._prepared_transactions(false) p
 WHERE p.prepared_id IS NOT NULL OR p.error IS NOT NULL;
COMMENT ON VIEW shardmap.in_doubt IS 'transactions of this coordinator that are prepared on shards, and shards that could not be asked; asks every shard';
COMMENT ON COLUMN shardmap.in_doubt.shard IS 'the shard';
COMMENT ON COLUMN shardmap.in_doubt.prepared_id IS 'its id there, as in pg_prepared_xacts; NULL: the shard could not be asked';
COMMENT ON COLUMN shardmap.in_doubt.transaction IS 'number of the transaction on the coordinator';
COMMENT ON COLUMN shardmap.in_doubt.owner IS 'user of the shard who prepared it';
COMMENT ON COLUMN shardmap.in_doubt.prepared_at IS 'when it was prepared, by the shard''s clock';
COMMENT ON COLUMN shardmap.in_doubt.decision IS 'commit; roll back; running: not decided yet; unclear: to be decided by hand';
COMMENT ON COLUMN shardmap.in_doubt.error IS 'why the shard could not be asked';

CREATE FUNCTION shardmap.resolve_transactions()
RETURNS TABLE (shard text, prepared_id text, decision text, done boolean, error text)
LANGUAGE sql VOLATILE STRICT PARALLEL UNSAFE ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
    SELECT p.shard, p.prepared_id, p.decision, p.done, p.error FROM shardmap._prepared_transactions(true) p
$$;
COMMENT ON FUNCTION shardmap.resolve_transactions() IS
    'finishes what a failure left prepared on the shards, as the background worker does; a row for each part found, and for each shard that could not be asked';

CREATE FUNCTION shardmap._unconfirmed_shard() RETURNS text
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'unconfirmed_shard_wrapper';
COMMENT ON FUNCTION shardmap._unconfirmed_shard() IS
    'a shard that still holds prepared what a transaction of this session has committed; NULL: none does';

-- For what goes on in another transaction, and must find there what the one before has done.
CREATE FUNCTION shardmap._await_own_commits() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    late text := shardmap._unconfirmed_shard();
    until_when constant timestamptz := clock_timestamp() + interval '10 seconds';
BEGIN
    WHILE late IS NOT NULL LOOP
        PERFORM shardmap.resolve_transactions();
        late := shardmap._unconfirmed_shard();
        IF late IS NOT NULL AND clock_timestamp() > until_when THEN
            RAISE EXCEPTION 'the transaction before is not yet committed on shard "%"', late
                USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'See shardmap.in_doubt, and go on when it is.';
        END IF;
        PERFORM pg_sleep(CASE WHEN late IS NULL THEN 0 ELSE 0.1 END);
    END LOOP;
END
$$;
COMMENT ON FUNCTION shardmap._await_own_commits() IS 'waits until all shards have committed what transactions of this session have';
REVOKE ALL ON FUNCTION shardmap._unconfirmed_shard(), shardmap._await_own_commits() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._unconfirmed_shard(), shardmap._await_own_commits() TO shardmap_admin;

REVOKE ALL ON FUNCTION shardmap._prepared_transactions(boolean), shardmap.resolve_transactions() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION shardmap._prepared_transactions(boolean), shardmap.resolve_transactions() TO shardmap_admin;
GRANT SELECT ON shardmap.in_doubt TO shardmap_admin;

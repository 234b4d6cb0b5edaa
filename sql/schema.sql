-- The schema, the administrators' role, and the catalog.
--
-- Decides what a shard map is on disk. What always holds: a row that could not be part of any map is refused by a
-- constraint; everything is readable by all and holds no secret (those stand in user mappings); pg_dump carries all of
-- it. Changed through the functions of keyspaces.sql, shards.sql, ranges.sql and tables*.sql only: those check the map
-- as a whole and publish it. Read keyspaces.sql next.

CREATE SCHEMA shardmap;
COMMENT ON SCHEMA shardmap IS 'administration of pg_shardmap';
GRANT USAGE ON SCHEMA shardmap TO PUBLIC;

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname OPERATOR(pg_catalog.=) 'shardmap_admin') THEN
        CREATE ROLE shardmap_admin NOLOGIN;
        COMMENT ON ROLE shardmap_admin IS 'may administer pg_shardmap: keyspaces, shards, logical tables';
    END IF;
EXCEPTION
    WHEN duplicate_object OR unique_violation THEN NULL; -- made by another database of this server just now
END
$$;

CREATE TABLE shardmap.keyspace (
    name text COLLATE pg_catalog."C" PRIMARY KEY
        CONSTRAINT keyspace_name_length CHECK (pg_catalog.octet_length(name) BETWEEN 1 AND 40),
    strategy text NOT NULL
        CONSTRAINT keyspace_strategy_known CHECK (strategy IN ('ring', 'modulo', 'range')),
    vnodes integer NOT NULL
        CONSTRAINT keyspace_vnodes_range CHECK (vnodes BETWEEN 1 AND 4096),
    allocation text NOT NULL
        CONSTRAINT keyspace_allocation_known CHECK (allocation IN ('random', 'balanced')),
    range_order text
        CONSTRAINT keyspace_range_order_known CHECK (range_order IN ('integer', 'text')),
    version bigint NOT NULL DEFAULT 1
        CONSTRAINT keyspace_version_positive CHECK (version > 0),
    slots integer[],
    wanted_slots integer[],
    CONSTRAINT keyspace_slots_with_modulo CHECK (strategy = 'modulo' OR (slots IS NULL AND wanted_slots IS NULL)),
    CONSTRAINT keyspace_slots_range CHECK (0 <= ALL (slots || wanted_slots) AND 1024 > ALL (slots || wanted_slots)
        AND pg_catalog.array_position(slots || wanted_slots, NULL) IS NULL
        AND pg_catalog.cardinality(slots) BETWEEN 1 AND 65536 AND pg_catalog.cardinality(wanted_slots) BETWEEN 1 AND 65536),
    CONSTRAINT keyspace_range_order_with_range CHECK ((strategy = 'range') = (range_order IS NOT NULL)),
    CONSTRAINT keyspace_balanced_with_ring CHECK (allocation = 'random' OR strategy = 'ring')
);
COMMENT ON TABLE shardmap.keyspace IS 'sets of shards, each with a rule that gives every key one of them';
COMMENT ON COLUMN shardmap.keyspace.name IS 'name of the keyspace';
COMMENT ON COLUMN shardmap.keyspace.strategy IS 'ring: consistent hashing; modulo: MD5 mod the number of shards; range: ordered key ranges';
COMMENT ON COLUMN shardmap.keyspace.vnodes IS 'ring positions of a shard of weight 1';
COMMENT ON COLUMN shardmap.keyspace.allocation IS 'how ring positions are chosen: random (by MD5 of name and number) or balanced (where they even out the load)';
COMMENT ON COLUMN shardmap.keyspace.range_order IS 'order of the ranges of strategy range: integer (by value) or text (by bytes of the canonical text)';
COMMENT ON COLUMN shardmap.keyspace.version IS 'version of the map: grows by one with every change';
COMMENT ON COLUMN shardmap.keyspace.slots IS 'strategy modulo: number of the shard that owns each remainder of MD5, from 0; NULL: one for each shard, in the order of numbers';
COMMENT ON COLUMN shardmap.keyspace.wanted_slots IS 'slots as they should be; NULL: one for each shard that is not draining, in the order of numbers';

CREATE TABLE shardmap.shard (
    name text COLLATE pg_catalog."C" PRIMARY KEY
        CONSTRAINT shard_name_length CHECK (pg_catalog.octet_length(name) BETWEEN 1 AND 63),
    keyspace text COLLATE pg_catalog."C" NOT NULL REFERENCES shardmap.keyspace,
    number integer NOT NULL
        CONSTRAINT shard_number_range CHECK (number BETWEEN 0 AND 1023),
    weight double precision NOT NULL DEFAULT 1
        CONSTRAINT shard_weight_range CHECK (weight > 0 AND weight <= 1000),
    state text NOT NULL
        CONSTRAINT shard_state_known CHECK (state IN ('active', 'joining', 'draining')),
    tokens bigint[] NOT NULL DEFAULT '{}'
        CONSTRAINT shard_tokens_on_ring CHECK (0 <= ALL (tokens) AND 4294967296 > ALL (tokens)
            AND pg_catalog.array_position(tokens, NULL) IS NULL),
    wanted_tokens bigint[]
        CONSTRAINT shard_wanted_tokens_on_ring CHECK (0 <= ALL (wanted_tokens) AND 4294967296 > ALL (wanted_tokens)
            AND pg_catalog.array_position(wanted_tokens, NULL) IS NULL),
    CONSTRAINT shard_number_unique UNIQUE (keyspace, number),
    CONSTRAINT shard_keyspace_name_unique UNIQUE (keyspace, name),
    CONSTRAINT shard_joining_owns_nothing CHECK (state <> 'joining' OR pg_catalog.cardinality(tokens) = 0)
);
COMMENT ON TABLE shardmap.shard IS 'shards; each has a foreign server of its name, which says where it is';
COMMENT ON COLUMN shardmap.shard.name IS 'name of the shard and of its foreign server';
COMMENT ON COLUMN shardmap.shard.keyspace IS 'keyspace that the shard belongs to';
COMMENT ON COLUMN shardmap.shard.number IS 'number of the shard in its keyspace, for ever: the remainder of its partitions';
COMMENT ON COLUMN shardmap.shard.weight IS 'share of load, in relation to the other shards'' weights';
COMMENT ON COLUMN shardmap.shard.state IS 'active; joining: registered, owns nothing yet; draining: to be emptied';
COMMENT ON COLUMN shardmap.shard.tokens IS 'ring positions, 0 to 4294967295; the shard owns the arc that ends at each';
COMMENT ON COLUMN shardmap.shard.wanted_tokens IS 'ring positions that the shard should have once shardmap.rebalance is through; NULL: those that it has';

CREATE TABLE shardmap.pin (
    keyspace text COLLATE pg_catalog."C" NOT NULL REFERENCES shardmap.keyspace,
    key text COLLATE pg_catalog."C" NOT NULL,
    shard text COLLATE pg_catalog."C" NOT NULL,
    CONSTRAINT pin_pkey PRIMARY KEY (keyspace, key),
    CONSTRAINT pin_shard_fkey FOREIGN KEY (keyspace, shard) REFERENCES shardmap.shard (keyspace, name)
);
COMMENT ON TABLE shardmap.pin IS 'keys with a shard of their own choosing, ahead of the rule';
COMMENT ON COLUMN shardmap.pin.keyspace IS 'keyspace of the key';
COMMENT ON COLUMN shardmap.pin.key IS 'canonical text of the key';
COMMENT ON COLUMN shardmap.pin.shard IS 'shard that owns the key';

CREATE TABLE shardmap.key_range (
    keyspace text COLLATE pg_catalog."C" NOT NULL REFERENCES shardmap.keyspace,
    lower text COLLATE pg_catalog."C",
    upper text COLLATE pg_catalog."C",
    shard text COLLATE pg_catalog."C" NOT NULL,
    version bigint NOT NULL
        CONSTRAINT key_range_version_positive CHECK (version > 0),
    CONSTRAINT key_range_lower_unique UNIQUE NULLS NOT DISTINCT (keyspace, lower),
    CONSTRAINT key_range_upper_unique UNIQUE NULLS NOT DISTINCT (keyspace, upper),
    CONSTRAINT key_range_shard_fkey FOREIGN KEY (keyspace, shard) REFERENCES shardmap.shard (keyspace, name)
);
COMMENT ON TABLE shardmap.key_range IS 'the directory of keyspaces of strategy range: who owns the keys from lower up to but not including upper';
COMMENT ON COLUMN shardmap.key_range.keyspace IS 'keyspace of the range';
COMMENT ON COLUMN shardmap.key_range.lower IS 'canonical text of the first key of the range; NULL: no limit';
COMMENT ON COLUMN shardmap.key_range.upper IS 'canonical text of the first key after the range; NULL: no limit';
COMMENT ON COLUMN shardmap.key_range.shard IS 'shard that owns the range';
COMMENT ON COLUMN shardmap.key_range.version IS 'version of the map in which the range last changed';

CREATE TABLE shardmap.logical_table (
    relation regclass PRIMARY KEY,
    key_column text COLLATE pg_catalog."C" NOT NULL,
    key_type regtype NOT NULL,
    keyspace text COLLATE pg_catalog."C" NOT NULL REFERENCES shardmap.keyspace,
    fanout_policy text
        CONSTRAINT logical_table_policy_known CHECK (fanout_policy IN ('allow', 'notice', 'warning', 'error')),
    enforced text[],
    enforced_as_of integer
);
COMMENT ON TABLE shardmap.logical_table IS 'tables of this database whose rows are on the shards of a keyspace';
COMMENT ON COLUMN shardmap.logical_table.relation IS 'the partitioned table';
COMMENT ON COLUMN shardmap.logical_table.key_column IS 'its distribution column';
COMMENT ON COLUMN shardmap.logical_table.key_type IS 'type of the distribution column';
COMMENT ON COLUMN shardmap.logical_table.keyspace IS 'keyspace whose shards hold the rows';
COMMENT ON COLUMN shardmap.logical_table.enforced IS 'constraints that the shards'' tables were made with, as the guard describes them';
COMMENT ON COLUMN shardmap.logical_table.enforced_as_of IS 'server_version_num of the server that described them last: another one may describe the same constraints otherwise';
COMMENT ON COLUMN shardmap.logical_table.fanout_policy IS 'least strict policy for un-keyed statements on this table; NULL: that of the session';

CREATE TABLE shardmap.reference_table (
    relation regclass NOT NULL,
    keyspace text COLLATE pg_catalog."C" NOT NULL REFERENCES shardmap.keyspace,
    layout text[] NOT NULL,
    complete boolean NOT NULL,
    CONSTRAINT reference_table_pkey PRIMARY KEY (relation, keyspace)
);
COMMENT ON TABLE shardmap.reference_table IS 'tables of this database of which every shard of a keyspace has a copy';
COMMENT ON COLUMN shardmap.reference_table.relation IS 'the table, an ordinary one';
COMMENT ON COLUMN shardmap.reference_table.keyspace IS 'keyspace whose shards have copies';
COMMENT ON COLUMN shardmap.reference_table.layout IS 'name, columns and primary key that the copies were made with, one line each';
COMMENT ON COLUMN shardmap.reference_table.complete IS 'whether the table was seen with all that keeps its copies equal; not while a dump is restored';

CREATE TABLE shardmap.key_class (
    keyspace text COLLATE pg_catalog."C" NOT NULL REFERENCES shardmap.keyspace,
    key_type regtype NOT NULL,
    hash_function text COLLATE pg_catalog."C" NOT NULL,
    family text COLLATE pg_catalog."C" NOT NULL,
    CONSTRAINT key_class_pkey PRIMARY KEY (keyspace, key_type),
    CONSTRAINT key_class_hash_function_unique UNIQUE (hash_function)
);
COMMENT ON TABLE shardmap.key_class IS 'operator classes that make Postgres'' hash partitioning follow the map, one a keyspace and key type';
COMMENT ON COLUMN shardmap.key_class.keyspace IS 'keyspace whose map the class follows';
COMMENT ON COLUMN shardmap.key_class.key_type IS 'type of the keys';
COMMENT ON COLUMN shardmap.key_class.hash_function IS 'the class''s hash function, as regprocedure spells it: looks up the key''s owner';
COMMENT ON COLUMN shardmap.key_class.family IS 'operator family, in schema shardmap';

CREATE TABLE shardmap.shippable_mark (
    kind text COLLATE pg_catalog."C" NOT NULL
        CONSTRAINT shippable_mark_kind_known CHECK (kind IN ('function', 'type', 'operator')),
    name text COLLATE pg_catalog."C" NOT NULL,
    argument_types text COLLATE pg_catalog."C" NOT NULL DEFAULT '',
    CONSTRAINT shippable_mark_pkey PRIMARY KEY (kind, name)
);
COMMENT ON TABLE shardmap.shippable_mark IS 'functions, types and operators that every shard knows';
COMMENT ON COLUMN shardmap.shippable_mark.kind IS 'function (also an aggregate), type or operator';
COMMENT ON COLUMN shardmap.shippable_mark.name IS 'what it is called, as regprocedure, regtype or regoperator spells it';
COMMENT ON COLUMN shardmap.shippable_mark.argument_types IS 'types of its arguments, one a line: Postgres 15 fails to look up a function if one of them is gone';

GRANT SELECT ON shardmap.keyspace, shardmap.shard, shardmap.pin, shardmap.key_range, shardmap.logical_table,
    shardmap.reference_table, shardmap.key_class, shardmap.shippable_mark TO PUBLIC;

SELECT pg_catalog.pg_extension_config_dump('shardmap.keyspace', '');
SELECT pg_catalog.pg_extension_config_dump('shardmap.shard', '');
SELECT pg_catalog.pg_extension_config_dump('shardmap.pin', '');
SELECT pg_catalog.pg_extension_config_dump('shardmap.key_range', '');
SELECT pg_catalog.pg_extension_config_dump('shardmap.logical_table', '');
SELECT pg_catalog.pg_extension_config_dump('shardmap.reference_table', '');
SELECT pg_catalog.pg_extension_config_dump('shardmap.key_class', '');
SELECT pg_catalog.pg_extension_config_dump('shardmap.shippable_mark', '');

-- A restored row replaces the pristine one that CREATE EXTENSION made: nothing can refer to that yet.
CREATE FUNCTION shardmap._replace_pristine_keyspace() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM shardmap.keyspace k
     WHERE k.name = NEW.name AND k.version = 1
       AND NOT EXISTS (SELECT FROM shardmap.shard s WHERE s.keyspace = k.name)
       AND NOT EXISTS (SELECT FROM shardmap.logical_table t WHERE t.keyspace = k.name)
       AND NOT EXISTS (SELECT FROM shardmap.reference_table t WHERE t.keyspace = k.name)
       AND NOT EXISTS (SELECT FROM shardmap.key_class c WHERE c.keyspace = k.name);
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION shardmap._replace_pristine_keyspace() IS 'trigger: lets a restored keyspace take the place of the one that CREATE EXTENSION made';
REVOKE ALL ON FUNCTION shardmap._replace_pristine_keyspace() FROM PUBLIC;

CREATE TRIGGER replace_pristine_keyspace BEFORE INSERT ON shardmap.keyspace
    FOR EACH ROW EXECUTE FUNCTION shardmap._replace_pristine_keyspace();
COMMENT ON TRIGGER replace_pristine_keyspace ON shardmap.keyspace IS 'lets pg_restore bring back keyspace main';

INSERT INTO shardmap.keyspace (name, strategy, vnodes, allocation) VALUES ('main', 'ring', 100, 'random');

"""The verdict on an arena when its writers have ended and its moves are over.

What always holds: nothing is taken from the coordinator that the shards can say themselves; what could not be asked is a failure.
"""

from .arena import NAMES, OLD, retried
from .clients import ACCOUNTS
from .ledger import DOUBLED, LOST, Finding, Ledger, differences

MISPLACED, LEFT, REPORTED = "misplaced", "left", "reported"

LEFT_BEHIND = """
SELECT 'schema ' || nspname FROM pg_namespace WHERE nspname ~ '^shardmap'
UNION ALL SELECT 'trigger ' || tgname FROM pg_trigger WHERE NOT tgisinternal
UNION ALL SELECT 'transaction ' || gid FROM pg_prepared_xacts WHERE database = current_database()
UNION ALL SELECT 'publication ' || pubname FROM pg_publication
UNION ALL SELECT 'subscription ' || subname FROM pg_subscription WHERE subdbid = (SELECT oid FROM pg_database WHERE datname = current_database())
UNION ALL SELECT 'slot ' || slot_name FROM pg_replication_slots WHERE database = current_database()
UNION ALL SELECT 'function ' || proname FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace
    WHERE nspname !~ '^(pg_|information_schema)'
"""


def judge(arena, ledgers):
    """All that is wrong."""
    retried(lambda: arena.psql("SELECT count(*) FROM shardmap.resolve_transactions()"))
    return [*clients_know(arena, ledgers), *accounts(arena), *ownership(arena), *reported(arena), *left(arena)]


def clients_know(arena, ledgers):
    old = Ledger(OLD)
    for tenant in arena.hot:
        for number in range(1, arena.hot_items + 1):
            old.wrote_item((tenant, number), number, sure=True)
    return differences([old, *ledgers], arena.stored())


def accounts(arena):
    """Money only goes from one account of a tenant to another."""
    found = {}
    for shard in range(arena.shards):
        for tenant, rows, distinct, money in arena.on_shard(
                shard, "SELECT tenant, count(*), count(DISTINCT id), sum(balance)::bigint FROM account GROUP BY tenant"):
            before = found.get(tenant, (0, 0, 0))
            found[tenant] = (before[0] + rows, before[1] + distinct, before[2] + money)
    for tenant in arena.ranked:
        rows, distinct, money = found.get(tenant, (0, 0, 0))
        if (rows, distinct, money) != (ACCOUNTS, ACCOUNTS, 1000 * ACCOUNTS):
            yield Finding(DOUBLED if rows > ACCOUNTS or rows == ACCOUNTS and money > 1000 * ACCOUNTS else LOST,
                          f"tenant {tenant} has {rows} accounts with {money} in all")


def ownership(arena):
    """Each row is on the one shard that the map names."""
    owners = arena.owners()
    for shard in range(arena.shards):
        for table in NAMES:
            for tenant, rows in arena.on_shard(shard, f"SELECT tenant, count(*) FROM {table} GROUP BY tenant"):
                if owners.get(tenant) != f"shard-{shard}":
                    yield Finding(MISPLACED, f"{rows} rows of tenant {tenant} in {table} on shard-{shard}; {owners.get(tenant)} owns it")


def reported(arena):
    """What the product finds out itself."""
    with arena.connect() as conn:
        for table in NAMES:
            for shard, finding, detail in conn.execute(
                    f"SELECT shard, finding, concat_ws(' ', row_id, detail) FROM shardmap.verify('{table}') WHERE finding <> 'clean'"):
                yield Finding(REPORTED, f"verify({table}): {shard} {finding} {detail}")
        for kind, detail in conn.execute("SELECT kind, detail FROM shardmap.audit(%s, 'full')", [arena.keyspace]):
            yield Finding(REPORTED, f"audit: {kind} {detail}")
        if conn.execute("SELECT count(*) FROM shardmap.in_doubt").fetchone() != (0,):
            yield Finding(LEFT, "transactions in doubt")


def left(arena):
    """What moves made, on shards or in the catalog."""
    for shard in range(arena.shards):
        for (what,) in arena.on_shard(shard, LEFT_BEHIND):
            yield Finding(LEFT, f"{what} on shard-{shard}")
    with arena.connect() as conn:
        for move, shard in conn.execute("SELECT DISTINCT move, shard FROM shardmap.hidden_rows"):
            yield Finding(LEFT, f"hidden rows of move {move} on {shard}")
    for move in arena.moves():
        if move["state"] not in ("done", "rolled_back"):
            yield Finding(LEFT, f"move {move['id']} is {move['state']}: {move['last_error']}")

"""Units: the settings of a session and the statements that run in it, all from one random seed."""

import dataclasses

from .aggregates import Aggregates
from .conditions import Conditions
from .documents import Json
from .locking import Locking
from .pins import Pins
from .queries import Queries
from .relations import Relations
from .schema import TABLES
from .session import FORMS
from .steps import Step
from .values import POOLS
from .transactions import Transactions
from .upserts import Upserts
from .writes import Writes

# Settings of the planner: they must not change an answer. Set on the distributed side.
PLANNER = ["enable_hashjoin", "enable_mergejoin", "enable_nestloop", "enable_hashagg", "enable_sort", "enable_material",
           "enable_memoize", "enable_async_append", "enable_partition_pruning", "enable_partitionwise_join",
           "enable_incremental_sort"]
PINNED = 0.45  # of the statements are about one key
PARALLEL = {"debug_parallel_query": "on", "min_parallel_table_scan_size": "0", "parallel_setup_cost": "0"}


@dataclasses.dataclass
class Unit:
    settings: dict  # of both sides
    dist_settings: dict
    steps: list
    as_user: bool = False


class Generator(Conditions, Relations, Pins, Queries, Aggregates, Json, Locking, Writes, Upserts, Transactions):
    """Makes units. The same `rng` state gives the same units."""

    def __init__(self, rng, version):
        self.rng, self.version, self.as_user, self.keys = rng, version, False, None

    def pool(self):
        return [t for t in TABLES if t.secured or not self.as_user or self.rng.random() < 0.5]

    def start(self):
        """Forgets the statement before."""
        keyed = self.keys is not None and self.rng.random() < 0.9
        near = self.keys[0] if keyed else self.rng.choice(self.pool())
        self.near, self.family, self.keyspace = near, near.family, near.keyspace
        self.aliases, self.ctes, self.pin = 0, [], None
        self.budget = self.rng.choice([1, 2, 3, 4, 5])
        if near.distributed and (keyed or self.rng.random() < PINNED):
            self.choose_pin(self.rng.choice(self.keys[1]) if keyed else None)

    def unit(self):
        dist = {"shardmap.enable_routing": self.rng.choice(["on"] * 6 + ["off"]),
                "shardmap.enable_router": self.rng.choice(["on"] * 6 + ["off"]),
                "plan_cache_mode": self.rng.choice(["auto", "force_generic_plan", "force_custom_plan"])}
        for name in PLANNER:
            if self.rng.random() < 0.04:
                dist[name] = "off"
        if self.rng.random() < 0.06:
            dist.update(PARALLEL)
        roll, self.as_user = self.rng.random(), self.rng.random() < 0.12
        if roll < 0.58:
            steps = [self.read()]
        elif roll < 0.80:
            steps = [self.sent(self._write())]
        else:
            steps = self.transaction()
        settings = {"bytea_output": self.rng.choice(["hex", "hex", "escape"]),
                    "transform_null_equals": self.rng.choice(["off"] * 9 + ["on"]),
                    "datestyle": self.rng.choice(["ISO, MDY"] * 3 + ["SQL, DMY", "German"])}
        for family, type in (("int", "int4"), ("text", "text"), ("uuid", "uuid"), ("time", "date"), ("bytea", "bytea")):
            settings[f"app.{family}"] = self.rng.choice([p for p in POOLS[type] if "BC" not in p and "inf" not in p])
        settings["standard_conforming_strings"] = self.rng.choice(["on"] * 12 + ["off"])  # last: it changes the others' texts
        if settings["datestyle"] != "ISO, MDY":
            settings["app.time"] = "infinity"
        return Unit(settings, dist, steps, self.as_user)

    def sent(self, step):
        """Chooses how the step is sent."""
        if step.kind in ("query", "write"):
            step.form = self.rng.choice(FORMS)
            if step.form in ("cursor", "held") and step.kind == "write":
                step.form = "simple"
            step.seed = self.rng.getrandbits(32)
        return step

    def read(self):
        self.start()
        roll = self.rng.random()
        if roll < 0.04:
            return Step(["COPY (", self.query(1).tree, ") TO STDOUT"], "copy out")
        if roll < 0.045:
            table = self.rng.choice(TABLES)
            return Step(f"COPY {table.name} TO STDOUT", "copy out")
        if roll < 0.10:
            return self.sent(self.locking())
        query = self.with_ctes(2) if roll < 0.28 else self.query(self.rng.choice([0, 1, 2]))
        query = self.limit(query) if self.rng.random() < 0.25 else self.order(query) if self.rng.random() < 0.3 else query
        if roll > 0.96:
            options = self.rng.choice(["VERBOSE", "VERBOSE, COSTS OFF", "ANALYZE, VERBOSE", "GENERIC_PLAN", "FORMAT JSON"])
            return Step([f"EXPLAIN ({options}) ", query.tree], "explain")
        return self.sent(Step(query.tree, "query", query.order, total=len(set(query.order)) == len(query.columns)))

    def _write(self):
        self.start()
        step = self.write()
        if step.kind == "write" and self.rng.random() < 0.04:
            return Step(["EXPLAIN (ANALYZE) ", step.tree], "explain write", (), step.tables)
        if step.kind == "write" and self.rng.random() < 0.06:
            second = self.write()
            if second.kind == "write":
                return Step([step.tree, "; ", second.tree], "batch", (), (*step.tables, *second.tables))
        return step

"""Units: the settings of a session and the statements that run in it, all from one random seed."""

import dataclasses

from .conditions import Conditions
from .queries import Queries
from .relations import Relations
from .schema import TABLES, types_of
from .session import FORMS
from .tree import optional
from .values import POOLS
from .writes import Step, Writes

# Settings of the planner: they must not change an answer. Set on the distributed side.
PLANNER = ["enable_hashjoin", "enable_mergejoin", "enable_nestloop", "enable_hashagg", "enable_sort", "enable_material",
           "enable_memoize", "enable_async_append", "enable_partition_pruning", "enable_partitionwise_join",
           "enable_incremental_sort"]
PARALLEL = {"debug_parallel_query": "on", "min_parallel_table_scan_size": "0", "parallel_setup_cost": "0"}


@dataclasses.dataclass
class Unit:
    settings: dict  # of both sides
    dist_settings: dict
    steps: list
    as_user: bool = False


class Generator(Conditions, Relations, Queries, Writes):
    """Makes units. The same `rng` state gives the same units."""

    def __init__(self, rng):
        self.rng, self.as_user = rng, False

    def start(self):
        """Forgets the statement before."""
        near = self.rng.choice([t for t in TABLES if t.secured or not self.as_user or self.rng.random() < 0.5])
        self.family, self.keyspace = near.family, near.keyspace
        self.aliases, self.ctes = 0, []
        self.budget = self.rng.choice([1, 2, 3, 4, 5])

    def unit(self):
        dist = {"shardmap.enable_routing": self.rng.choice(["on", "on", "on", "off"]),
                "plan_cache_mode": self.rng.choice(["auto", "force_generic_plan", "force_custom_plan"])}
        for name in PLANNER:
            if self.rng.random() < 0.04:
                dist[name] = "off"
        if self.rng.random() < 0.06:
            dist.update(PARALLEL)
        roll, self.as_user = self.rng.random(), self.rng.random() < 0.12
        if roll < 0.62:
            steps = [self.read()]
        elif roll < 0.82:
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
            if step.form == "cursor" and step.kind == "write":
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
            return self.sent(self._locking())
        query = self.with_ctes(2) if roll < 0.28 else self.query(self.rng.choice([0, 1, 2]))
        query = self.limit(query) if self.rng.random() < 0.25 else self.order(query) if self.rng.random() < 0.3 else query
        if roll > 0.96:
            options = self.rng.choice(["VERBOSE", "VERBOSE, COSTS OFF", "ANALYZE, VERBOSE", "GENERIC_PLAN", "FORMAT JSON"])
            return Step([f"EXPLAIN ({options}) ", query.tree], "explain")
        return self.sent(Step(query.tree, "query", query.order, total=len(set(query.order)) == len(query.columns)))

    def _locking(self):
        table = self.choose_table([t for t in TABLES])
        relation = self.relation_of(table, "t")
        names = self.rng.sample(list(types_of(table)), 3)
        lock = self.rng.choice(["FOR UPDATE", "FOR SHARE", "FOR NO KEY UPDATE", "FOR UPDATE OF t NOWAIT"])
        tree = [f"SELECT {', '.join('t.' + n for n in names)} FROM {table.name} t", self.where([relation]), optional(" ", lock)]
        return Step(tree, "query")

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

    def transaction(self):
        """BEGIN, reads and writes with savepoints, and COMMIT or ROLLBACK."""
        level = self.rng.choice([""] * 3 + [" ISOLATION LEVEL REPEATABLE READ", " ISOLATION LEVEL SERIALIZABLE"])
        steps, open_points = [Step("BEGIN" + level, "control")], 0
        for _ in range(self.rng.randrange(2, 8)):
            roll = self.rng.random()
            if roll < 0.15:
                open_points += 1
                steps.append(Step(f"SAVEPOINT s{open_points}", "control"))
            elif roll < 0.3 and open_points:
                point = self.rng.randrange(1, open_points + 1)
                release = self.rng.random() < 0.4
                steps.append(Step(f"{'RELEASE' if release else 'ROLLBACK TO'} SAVEPOINT s{point}", "control"))
                open_points = point - 1 if release else point
            elif roll < 0.33:
                steps.append(Step(f"SET shardmap.enable_routing = {self.rng.choice(['on', 'off'])}", "control"))
            elif roll < 0.65:
                steps.append(self.sent(self._write()))
            else:
                steps.append(self.read())
        if open_points and self.rng.random() < 0.5:
            steps.append(Step("ROLLBACK TO SAVEPOINT s1", "control"))
        steps.append(Step(self.rng.choice(["COMMIT", "COMMIT", "ROLLBACK"]), "control"))
        return steps

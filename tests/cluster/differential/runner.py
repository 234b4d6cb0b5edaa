"""The loop: rounds of units, each statement on both sides, answers and states compared.

A round is a seed of its own: fresh rows, one time zone, UNITS units. What always holds: after a statement that may have
written, the tables concerned hold the same rows on both sides; at the end of a round every row is on the shard that owns
it. After a failure the rows are made the same again, so that one defect does not show as many.
"""

import os
import random
import time

from . import known
from .generator import Generator
from .report import Failure, bound, described, only
from .schema import TABLES, USER, random_rows, stored_columns
from .session import FUNCTIONS, Answer, Lost, Session, difference
from .tree import minimise, render
from .values import literal

UNITS = 60
ROWS = 40
CLEAN = "RESET ROLE; DEALLOCATE ALL; DROP TABLE IF EXISTS made; RESET standard_conforming_strings; RESET bytea_output"
SAME_ROWS = 8  # rounds one after another that have the same rows


def what_to_run(minutes, seed, rounds):
    """The seed, and the numbers of its rounds (None: as many as there is time for): those of DIFFERENTIAL_SEED (`seed` or
    `seed/round`), else for `minutes` a seed by chance, else the `rounds` first ones of `seed`."""
    given, _, number = os.environ.get("DIFFERENTIAL_SEED", "").partition("/")
    if given or minutes:
        return given or str(random.SystemRandom().randrange(10**6)), [int(number)] if number else None
    return seed, list(range(rounds))


class Runner:
    """Both sessions and what they have seen."""

    def __init__(self, dsn, seed, log=print):
        encoder = {}
        self.dist, self.plain = Session(dsn, "dist", encoder), Session(dsn, "plain", encoder)
        self.sides = (self.dist, self.plain)
        self.seed, self.log = seed, log
        self.filled, self.dirty, self.rows = None, set(), {}
        self.refused, self.opened = {}, {}  # refusals and open defects -> how often
        self.errors = {}  # SQLSTATE -> how often both sides failed with it
        self.failures, self.counts = [], {"statements": 0, "queries": 0, "with rows": 0, "failed on both": 0, "rounds": 0, "timeouts": 0}

    def run(self, minutes=None, rounds=None, most_failures=5):
        """Runs rounds until the time is over, or those numbers given."""
        deadline = time.monotonic() + (minutes or 0) * 60
        for number in rounds or range(10**9):
            if (minutes and time.monotonic() > deadline) or len(self.failures) >= most_failures:
                break
            self.round(number)
        return self.failures

    def summary(self):
        """What was seen, for the end of a run."""
        return (f"{self.counts}, steps {self.steps()}, both failed with {self.errors}, refused {self.refused}, "
                f"open defects {self.opened}")

    def steps(self):
        """What became of the statements on logical tables, those that look at the tables' state included."""
        return dict(self.dist.command("SELECT step, statements FROM shardmap.stat_routing").rows)

    def both(self, sql):
        for side in self.sides:
            side.command(sql)

    def round(self, number):
        self.name = f"{self.seed}/{number}"
        self.counts["rounds"] += 1
        rng = random.Random(self.name)
        self.zone = rng.choice(["UTC", "UTC", "America/New_York", "Asia/Kolkata"])
        self.fill(f"{self.seed}/{number // SAME_ROWS}")
        self.reset()
        generator = Generator(rng, self.dist.pg.server_version)
        for index in range(UNITS):
            generator.start()
            unit = generator.unit()
            self.where = f"{self.name} unit {index}"
            try:
                clean = self.unit(unit)
            except Lost as lost:
                self.failures.append(Failure(self.where, "the connection broke", self.last, str(lost)))
                clean = False
            if not clean:
                self.reset()
        self.audit()

    def fill(self, name):
        """Chooses the round's rows, by their own seed."""
        if name != self.filled:
            rng = random.Random(name)
            self.rows = {table.name: random_rows(rng, table, ROWS) for table in TABLES}
            self.filled, self.dirty = name, {table.name for table in TABLES}
            self.analyze = rng.random() < 0.5

    def reset(self):
        """Gives the tables that may have changed the round's rows, on both sides."""
        for side in self.sides:
            if side.pg.status != 0:
                side.reconnect()
            side.simple("ROLLBACK")
            side.simple(CLEAN)
            side.command("SET datestyle = 'ISO, MDY'; SET timezone = 'UTC'")
            for table in (t for t in TABLES if t.name in self.dirty):
                side.command(f"TRUNCATE {table.name}")
                data = "".join("\t".join(map(_copied, row)) + "\n" for row in self.rows[table.name])
                answer = side.copy_in(f"COPY {table.name} ({', '.join(stored_columns(table))}) FROM STDIN", data)
                if answer.error:
                    raise AssertionError(f"{side.schema}.{table.name}: {answer}")
            side.command(f"SET timezone = '{self.zone}'")
        if self.analyze and len(self.dirty) > 5:
            self.both("; ".join(f"ANALYZE {table.name}" for table in TABLES))
        self.dirty = set()
        self.dist.command("SET shardmap.fanout_policy = 'allow'")

    def audit(self):
        self.dist.simple("RESET ROLE")
        misplaced = self.dist.command("SELECT * FROM public.misplaced_rows()")
        if misplaced.rows:
            self.failures.append(Failure(f"{self.name} end", "rows on a shard that does not own them", [], str(misplaced)))
        for table in (t for t in TABLES if t.reference):
            copies = self.dist.command(f"SELECT * FROM shardmap.verify_reference('{table.name}') WHERE equal IS NOT TRUE")
            if copies.rows:
                self.failures.append(Failure(f"{self.name} end", f"copies of {table.name} differ", [], str(copies)))

    def unit(self, unit):
        """Runs a unit; returns whether both sides are still the same for sure."""
        self.last, self.told, self.undone, changed = [], False, False, set()
        settings = [f"set_config('{name}', {literal('text', value)}, false)" for name, value in unit.settings.items()]
        self.both("SELECT " + ", ".join(settings))
        dist = {name: value for name, value in unit.dist_settings.items()
                if name != "debug_parallel_query" or self.dist.pg.server_version >= 160000}
        self.dist.command("; ".join(f"SET {name} = {value}" for name, value in dist.items()))
        if unit.as_user:
            self.both(f"SET ROLE {USER}")
        try:
            for step in unit.steps:
                if self.dist.failed and step.kind != "control" and self.told:
                    continue  # that a transaction has failed is told once
                self.told = self.dist.failed
                changed.update(step.tables)
                self.dirty.update(t for t in step.tables if t != "made")
                if not self.step(step, unit, changed):
                    return self.undone
        finally:
            if self.dist.pg.status == 0:
                for side in self.sides:
                    side.simple("ROLLBACK")
                    side.simple(CLEAN)
                self.dist.simple("; ".join(f"RESET {name}" for name in dist))
        return True

    def step(self, step, unit, changed):
        sql = render(step.tree)
        settings = ", ".join(f"{k}={v}" for k, v in unit.dist_settings.items())
        self.last.append(f"-- form {step.form}; {settings}{'; as ' + USER if unit.as_user else ''}\n{sql};")
        if "gen" in step.tables and not self.dist.failed:
            for side in self.sides:
                side.simple("SELECT setval(pg_get_serial_sequence('gen', 'id'), %d)" % (50000 + self.counts["statements"]))
        answers = self.send(self.dist, step)
        refusals = [known.refusal(sql, answer, unit.as_user) for answer in answers]
        if name := next(filter(None, refusals), None):
            self.refused[name] = self.refused.get(name, 0) + 1
            # Nothing is done on the plain side; what was done here before is rolled back, if it was in a transaction.
            self.undone = len(unit.steps) > 1 or all(answer.error for answer in answers)
            return False
        self.counts["statements"] += len(answers)
        if step.kind == "explain":
            return self.explained(step, answers)
        expected = self.send(self.plain, step)
        for error in (a.error for a in expected if a.error):
            self.counts["failed on both"] += 1
            self.errors[error] = self.errors.get(error, 0) + 1
        if step.kind == "query":
            self.counts["queries"] += 1
            self.counts["with rows"] += any(a.rows for a in expected)
        why = self.differ(step, answers, expected)
        if why is None and step.kind != "query" and not self.dist.failed:
            if unit.as_user and self.dist.idle:
                self.both("RESET ROLE")  # what row security hides is compared too
            why, answers, expected = self.state(changed, answers, expected)
            if unit.as_user and self.dist.idle:
                self.both(f"SET ROLE {USER}")
            if any(known.refusal("", answer, unit.as_user) for answer in answers):
                return False
        if why is None:
            return True
        return self.failed(step, unit, why, answers, expected)

    def explained(self, step, answers):
        """EXPLAIN has no counterpart; it must not fail in a way of its own."""
        for answer in answers:
            if answer.error and not answer.error.startswith(("42", "22", "25")):
                self.failures.append(Failure(self.where, "EXPLAIN failed", self.last, str(answer)))
                return False
        if self.dist.failed:
            self.plain.simple("SELECT 1/0")
        return True

    def differ(self, step, answers, expected):
        if step.kind == "explain write":
            answers, expected = ([Answer(a.error, a.message) for a in side] for side in (answers, expected))
        for each, other in zip(answers, expected):
            if "57014" in (each.error, other.error):
                self.counts["timeouts"] += 1
                return "timeout of one side" if each.error != other.error else None
            order = step.order if step.form not in FUNCTIONS else ()
            if why := difference(each, other, order):
                return why
        return None if len(answers) == len(expected) else "number of answers"

    def state(self, tables, answers, expected):
        """Compares the rows of tables."""
        for table in sorted(tables):
            sql = f"SELECT * FROM {table}"
            here, there = self.rows_now(sql), self.plain.simple(sql)
            if why := difference(here, there):
                return f"{why} of table {table} afterwards", [*answers, only(here, there)], [*expected, only(there, here)]
        return None, answers, expected

    def rows_now(self, sql):
        return self.dist.simple(sql)

    def send(self, side, step):
        """Runs a step on one side: its answers."""
        if step.kind not in ("query", "write", "copy in", "copy out"):
            return [side.simple(render(step.tree))]
        if step.kind == "copy in":
            return [side.copy_in(render(step.tree), step.data)]
        if step.kind == "copy out":
            return [side.copy_out(render(step.tree))]
        if step.form == "simple":
            return [side.simple(render(step.tree))]
        if step.form in ("cursor", "held"):
            return getattr(side, step.form)(render(step.tree), step.total)
        sql, sets = bound(step)
        literals = [[literal(type, text) for type, text, _ in each] for each in sets]
        if step.form == "prepare":
            return side.sql_prepare(sql, sets, literals)
        if step.form in FUNCTIONS:
            return side.function(sql, sets, literals, step)
        return side.prepared(sql, sets, step.form)

    def failed(self, step, unit, why, answers, expected):
        """Keeps a failure, made smaller if it shows on the round's rows by itself. Returns False: the sides differ."""
        details = described(step, answers, expected)
        before = list(self.last)
        self.reset()
        explain = self.dist.simple("EXPLAIN (VERBOSE) " + render(step.tree)) if step.kind in ("query", "write") else Answer()
        plan = "\n".join(row[0] for row in explain.rows) or str(explain)
        if name := known.open_defect("\n".join(before), f"{why}\n{details}\n{plan}"):
            self.opened[name] = self.opened.get(name, 0) + 1
            return False
        smaller = None
        if len(unit.steps) == 1 and self.again(step, unit):
            minimise(step.tree, lambda: self.again(step, unit))
            smaller = self.last[0]
        if smaller:
            details += f"\nsmaller:\n{smaller}\n{self.details}"
        settings = "".join(f"SET {k} = {literal('text', v)};\n" for k, v in unit.settings.items())
        failure = Failure(self.where, why, before, f"{details}\nSET timezone = '{self.zone}';\n{settings}plan:\n{plan}")
        self.failures.append(failure)
        self.log(str(failure))
        return False

    def again(self, step, unit):
        """Whether the step, run by itself on the round's rows, fails again."""
        failures, log, name_of = self.failures, self.log, self.failed
        seen = []
        self.failures, self.log = [], lambda text: None
        self.failed = lambda *args: seen.append(args) or False
        try:
            clean = self.unit(unit)
            if step.tables:
                self.reset()
        except Lost:
            clean = False
            self.reset()
        finally:
            self.failures, self.log = failures, log
            del self.failed
        if seen:
            _, _, why, answers, expected = seen[0]
            self.details = described(step, answers, expected)
        return not clean and bool(seen)


def _copied(value):
    if value is None:
        return "\\N"
    return value.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")

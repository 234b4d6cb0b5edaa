"""Clients, each a thread: writers that remember in a ledger what they were told, readers who must never see a thing waver.

What always holds: a client that meets a failure (an OperationalError: a server is gone, a lock timed out, a transaction is to
be repeated) counts it and goes on with another connection. Any other error, a keyed statement that finds another number of rows than
there are, and an answer that differs from the one before are what the gauntlet is there to find.
"""

import bisect
import itertools
import random
import threading
import time
from dataclasses import dataclass

import psycopg

from .ledger import ABSENT, LOST, Finding, Ledger

ACCOUNTS = 20  # of a tenant: they are filled before, and money goes from one to the other

COUNT = "INSERT INTO counter AS c VALUES (%s, 1, 0) ON CONFLICT (tenant) DO UPDATE SET ops = c.ops + 1"
OPERATION = "INSERT INTO op VALUES (%s, %s, %s)"
WITHIN_ONE = f"WITH o AS ({OPERATION}) {COUNT}"
BARE = "UPDATE counter SET bare = bare + 1 WHERE tenant = %s"
PAY = "UPDATE account SET balance = balance + %s WHERE tenant = %s AND id = %s"
INSERT = "INSERT INTO item VALUES (%s, %s, %s, %s, repeat('note ', 10))"
UPSERT = INSERT + " ON CONFLICT (tenant, writer, id) DO UPDATE SET value = EXCLUDED.value"
UPDATE = "UPDATE item SET value = %s WHERE tenant = %s AND writer = %s AND id = %s"
DELETE = "DELETE FROM item WHERE tenant = %s AND writer = %s AND id = %s"


class Uniform:
    """Chooses a tenant, each as often as the other."""

    def __init__(self, tenants):
        self.tenants = tenants

    def choose(self, chance):
        return chance.choice(self.tenants)


class Zipf:
    """The n-th tenant of the list is chosen in proportion to 1 / n."""

    def __init__(self, tenants, exponent=1.1):
        self.tenants = tenants
        self.sums = list(itertools.accumulate(1 / rank ** exponent for rank in range(1, len(tenants) + 1)))

    def choose(self, chance):
        return self.tenants[bisect.bisect(self.sums, chance.random() * self.sums[-1])]


class Client(threading.Thread):
    """Does `step` again and again until it is stopped. `findings`: what should not be."""

    def __init__(self, name, dsn, seed, stop, pause):
        super().__init__(name=name, daemon=True)
        self.dsn, self.chance, self.stop, self.pause = dsn, random.Random(f"{seed}/{name}"), stop, pause
        self.conn, self.steps, self.failures, self.findings, self.broken = None, 0, {}, [], None

    def run(self):
        try:
            while not self.stop.is_set():
                try:
                    if self.conn is None or self.conn.closed:
                        self.conn = connect(self.dsn)
                    self.step()
                    self.steps += 1
                except psycopg.OperationalError as error:
                    self.failures[error.sqlstate] = self.failures.get(error.sqlstate, 0) + 1
                    self._leave()
                self.stop.wait(self.chance.random() * self.pause)
        except Exception as error:  # pylint: disable=broad-exception-caught  # shown by the runner
            self.broken = error
        self._leave()

    def _leave(self):
        if self.conn is not None:
            self.conn.close()
        self.conn = None

    def step(self):
        raise NotImplementedError


class Writer(Client):
    """`tenants` chooses whose rows are written."""

    def __init__(self, number, tenants, dsn, seed, stop, pause=0.03):
        super().__init__(f"writer-{number}", dsn, seed, stop, pause)
        self.number, self.tenants, self.ledger = number, tenants, Ledger(number)
        self.numbers = itertools.count(1)
        self.longest = 0.0

    def step(self):
        tenant = self.tenants.choose(self.chance)
        way = self.chance.choice([self.count, self.bare, self.transfer, self.transfer, self.add_item, self.change_item, self.change_item])
        began = time.monotonic()
        way(tenant)
        self.longest = max(self.longest, time.monotonic() - began)

    def one_row(self, cursor, what):
        if cursor.rowcount != 1:
            self.findings.append(Finding(LOST, f"{what} met {cursor.rowcount} rows"))

    def count(self, tenant):
        op = (tenant, next(self.numbers))
        self.ledger.unknown.add(op)
        self.one_row(self.conn.execute(WITHIN_ONE, [tenant, self.number, op[1], tenant]), f"a count of tenant {tenant}")
        self._confirm(op)

    def _confirm(self, op):
        self.ledger.unknown.remove(op)
        self.ledger.confirmed.add(op)

    def bare(self, tenant):
        self.ledger.bare_unknown[tenant] += 1
        cursor = self.conn.execute(BARE, [tenant])
        self.one_row(cursor, f"a bare count of tenant {tenant}")
        self.ledger.bare_unknown[tenant] -= 1
        self.ledger.bare[tenant] += cursor.rowcount

    def transfer(self, tenant):
        """Several statements in one transaction; up to COMMIT it is known that nothing has happened."""
        op, amount = (tenant, next(self.numbers)), self.chance.randint(1, 9)
        first, second = sorted(self.chance.sample(range(1, ACCOUNTS + 1), 2))
        self.conn.execute("BEGIN")
        self.one_row(self.conn.execute(PAY, [amount, tenant, first]), f"a payment of tenant {tenant}")
        self.one_row(self.conn.execute(PAY, [-amount, tenant, second]), f"a payment of tenant {tenant}")
        self.conn.execute(OPERATION, [tenant, self.number, op[1]])
        self.conn.execute(COUNT, [tenant])
        self.ledger.unknown.add(op)
        self.conn.execute("COMMIT")
        self._confirm(op)

    def add_item(self, tenant):
        key, value = (tenant, next(self.numbers)), self.chance.randrange(10**6)
        self.ledger.wrote_item(key, value, sure=False)
        self.conn.execute(self.chance.choice([INSERT, UPSERT]), [tenant, self.number, key[1], value])
        self.ledger.wrote_item(key, value, sure=True)

    def change_item(self, tenant):
        """One of the last that the tenant has of this writer, if what it is now is known."""
        keys = [key for key, values in self.ledger.items.items() if key[0] == tenant and values != {ABSENT} and self.ledger.certain(key)]
        if not keys:
            self.add_item(tenant)
            return
        key = self.chance.choice(keys[-5:])
        way, value = self.chance.choice(["update", "upsert", "delete"]), self.chance.randrange(10**6)
        self.ledger.wrote_item(key, ABSENT if way == "delete" else value, sure=False)
        if way == "update":
            cursor = self.conn.execute(UPDATE, [value, tenant, self.number, key[1]])
        elif way == "upsert":
            cursor = self.conn.execute(UPSERT, [tenant, self.number, key[1], value])
        else:
            cursor = self.conn.execute(DELETE, [tenant, self.number, key[1]])
        self.one_row(cursor, f"{way} of item {key[1]} of tenant {tenant}")
        self.ledger.wrote_item(key, ABSENT if way == "delete" else value, sure=True)


@dataclass(frozen=True)
class Question:
    """A query whose answer must stay the same; or, if it `grows`, never get less."""

    sql: str
    grows: bool = False


QUESTIONS = [
    Question("SELECT count(*), sum(balance), sum(tenant::bigint * id), count(DISTINCT (tenant, id)) FROM account"),
    Question("SELECT count(*), sum(a.balance) FROM account a JOIN counter c ON c.tenant = a.tenant"),
    Question("SELECT count(*), sum(balance) FROM account WHERE tenant = {tenant}"),
    Question("SELECT sum(ops), sum(bare) FROM counter", grows=True),
    Question("SELECT count(*) FROM op", grows=True),
]


class Reader(Client):
    """Asks the same again and again."""

    def __init__(self, number, questions, dsn, seed, stop, pause=0.1):
        super().__init__(f"reader-{number}", dsn, seed, stop, pause)
        self.questions, self.last = questions, {}

    def step(self):
        for question in self.questions:
            answer = self.conn.execute(question.sql, prepare=self.steps % 2 == 0).fetchone()
            last = self.last.setdefault(question, answer)
            if any(new < old for new, old in zip(answer, last)) if question.grows else answer != last:
                self.findings.append(Finding("wavering", f"{question.sql}: {answer} after {last}"))
            self.last[question] = answer


def connect(dsn):
    return psycopg.connect(dsn, autocommit=True, options="-c shardmap.fanout_policy=allow -c statement_timeout=60s")

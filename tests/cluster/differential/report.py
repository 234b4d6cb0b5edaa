"""What a failure prints: where it is (a seed to give again), what ran, what was bound, both answers, the plan."""

import random

from .session import FUNCTIONS, Answer, difference
from .tree import render
from .values import literal, rebound


class Failure:
    def __init__(self, where, why, statements, details):
        self.where, self.why, self.statements, self.details = where, why, list(statements), details

    def __str__(self):
        seed = self.where.split()[0]
        ran = "\n".join(self.statements)
        return (f"\n=== {self.why} at {self.where}\n    again: DIFFERENTIAL_SEED={seed} scripts/test-cluster.sh -k differential -s\n"
                f"{ran}\n{self.details}\n")


def bound(step):
    """The text of a step with parameters, and the sets of values that are bound to them: (type, text, declared)."""
    values, rng = [], random.Random(step.seed)
    sql = render(step.tree, values, "p" if step.form in FUNCTIONS and step.form != "executed" else "$")
    sets = [[(v.type, v.text, v.declared) for v in values]]
    for _ in range(rng.choice([0, 1, 2, 7]) if step.kind == "query" else rng.choice([0, 1])):
        sets.append([(v.type, rebound(rng, v), v.declared) for v in values])
    return sql, sets


def described(step, answers, expected):
    """The pair of answers that differs, and what was bound for it."""
    pairs = list(zip(answers, expected))
    at = next((i for i, (a, b) in enumerate(pairs) if difference(a, b, step.order)), len(pairs) - 1)
    text = f"distributed: {pairs[at][0]}\nplain: {pairs[at][1]}"
    if step.kind in ("query", "write") and step.form not in ("simple", "cursor", "held"):
        sql, sets = bound(step)
        run = at - (step.form in ("prepare", *FUNCTIONS))
        values = [literal(type, value) + ("" if declared else " (type not declared)") for type, value, declared in sets[min(run, len(sets) - 1)]]
        text = f"{sql}\nrun {run + 1} of {len(sets)} with {values}\n{text}"
    return text


def only(left, right):
    """The rows that the left answer has and the right one has not."""
    rest = list(right.rows)
    missing = [row for row in left.rows if row not in rest or rest.remove(row)]
    return Answer(left.error, left.message, "only here", left.columns, missing)

"""What is asked: for the coordinator one statement, for a client that routes itself the steps that it takes.

A step names the shard key among its parameters, or goes to all shards. The rows of a question with several steps are
those of the first joined with those of the next. Next: routers.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """`takes`: positions among the question's parameters; `key`: position of the shard key, None for all shards."""

    sql: str
    takes: tuple
    key: "int | None"


@dataclass(frozen=True)
class Question:
    """`parameters` gives those of an object of data.py."""

    name: str
    statement: str
    steps: tuple
    parameters: callable

    @property
    def keyed(self):
        """Does it ask one shard, at least for a part?"""
        return any(step.key is not None for step in self.steps)

    @property
    def scattered(self):
        return any(step.key is None for step in self.steps)

    @classmethod
    def of_one_step(cls, name, sql, key, parameters):
        takes = tuple(range(sql.count("$")))
        return cls(name, sql, (Step(sql, takes, key),), parameters)


def file_of(row):
    return (row[0],)


def user_of(row):
    return (row[3],)


def object_of(row):
    return (row[0], row[1])


SINGLE = Question.of_one_step(
    "single", "SELECT file_key, id, name, created_by FROM objects WHERE file_key = $1", 0, file_of)

SCATTER = Question.of_one_step(
    "scatter", "SELECT file_key, id, name, created_by FROM objects WHERE created_by = $1", None, user_of)

COLOCATED = Question.of_one_step(
    "colocated",
    "SELECT o.name, c.id, c.author, c.body FROM objects o JOIN comments c"
    " ON c.file_key = o.file_key AND c.object_id = o.id WHERE o.file_key = $1 AND o.id = $2", 0, object_of)

CROSS = Question(
    "cross_shard",
    "SELECT o.name, c.id, c.author, c.body FROM objects o JOIN comments2 c ON c.object_id = o.id"
    " WHERE o.file_key = $1 AND o.id = $2",
    (Step("SELECT name FROM objects WHERE file_key = $1 AND id = $2", (0, 1), 0),
     Step("SELECT id, author, body FROM comments2 WHERE object_id = $1", (1,), None)),
    object_of)

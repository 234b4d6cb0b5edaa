"""The rows: files with objects, and comments on them that exist twice, by file and by author.

A seed gives the same rows and the same keys to ask for, whatever the number of shards. A file has ten objects on average
and a user has made ten, so that the keyed and the scattered question of experiment A have answers of equal size; an
object has none to four comments.
"""

import random
from dataclasses import dataclass, field

from .routers import shard_of

OBJECTS_EACH = 10  # of a file, and of a user, on average
MOST_COMMENTS = 4

TABLES = {
    "objects": ("file_key", """
        CREATE TABLE objects (file_key text NOT NULL, id bigint NOT NULL, name text NOT NULL, created_by int NOT NULL,
                              PRIMARY KEY (file_key, id));
        CREATE INDEX ON objects (created_by);"""),
    "comments": ("file_key", """
        CREATE TABLE comments (file_key text NOT NULL, id bigint NOT NULL, object_id bigint NOT NULL, author int NOT NULL,
                               body text NOT NULL, PRIMARY KEY (file_key, id));
        CREATE INDEX ON comments (object_id);"""),
    # The same rows again, on the shards of their authors.
    "comments2": ("author", """
        CREATE TABLE comments2 (file_key text NOT NULL, id bigint NOT NULL, object_id bigint NOT NULL, author int NOT NULL,
                                body text NOT NULL, PRIMARY KEY (author, id));
        CREATE INDEX ON comments2 (object_id);"""),
}


@dataclass
class Data:
    """Rows as tuples in the order of the tables' columns."""

    total_rows: int
    seed: int
    objects: list = field(init=False)
    comments: list = field(init=False)

    def __post_init__(self):
        chance = random.Random(self.seed)
        groups = max(1, self.total_rows // OBJECTS_EACH)
        file, user = lambda: f"file-{chance.randrange(groups)}", lambda: chance.randrange(groups)
        self.objects = [(file(), number, f"object {number}", user()) for number in range(1, self.total_rows + 1)]
        pairs = [(file_key, number) for file_key, number, _, _ in self.objects
                 for _ in range(chance.randint(0, MOST_COMMENTS))]
        pairs = pairs or [self.objects[0][:2]]
        self.comments = [(file_key, number, object_id, user(), f"comment {number} on object {object_id}")
                         for number, (file_key, object_id) in enumerate(pairs, start=1)]

    def rows(self, table):
        return self.objects if table == "objects" else self.comments

    def asked_for(self, count):
        """`count` objects to ask for, each of which has a comment."""
        chance = random.Random(f"{self.seed} asked for")
        by_id = {row[1]: row for row in self.objects}
        return [by_id[chance.choice(self.comments)[2]] for _ in range(count)]

    def to_warm_up(self, count, shards):
        """`count` objects of each of so many shards, so that none of them answers its first question on the clock."""
        chosen = {}
        for row in self.objects:
            mine = chosen.setdefault(shard_of(row[0], shards), [])
            if len(mine) < count:
                mine.append(row)
        return [row for rows in chosen.values() for row in rows]

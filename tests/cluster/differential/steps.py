"""One statement of a unit, and what the loop must know about it."""

import dataclasses


@dataclasses.dataclass
class Step:
    """One statement of a unit."""

    tree: object
    kind: str = "query"  # query, write, control, create, batch, copy in, copy out, explain, explain write
    order: tuple = ()
    tables: tuple = ()  # stored names of tables that it may change
    data: str = ""  # of COPY .. FROM
    has_rows: bool = True
    form: str = "simple"
    total: bool = False  # the order of the rows is defined
    seed: int = 0

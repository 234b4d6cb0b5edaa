"""Generated statements, run on distributed tables and on plain ones; both must answer the same.

Read in this order: schema.py (the tables), values.py (keys and their spellings), tree.py and steps.py (statements),
conditions.py, relations.py, pins.py (statements about one key), queries.py with aggregates.py, documents.py (JSON) and
locking.py, writes.py with upserts.py, transactions.py and generator.py (which statements), session.py (how one is sent
and what counts as the same answer), runner.py (the loop), faults.py (the same while connections are cut), report.py (what
a failure prints), known.py (what is refused on purpose).
"""

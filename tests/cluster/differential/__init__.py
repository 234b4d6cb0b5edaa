"""Generated statements, run on distributed tables and on plain ones; both must answer the same.

Read in this order: schema.py (the tables), values.py (keys and their spellings), tree.py (statements as trees),
conditions.py, relations.py, queries.py, writes.py and generator.py (which statements), session.py (how one is sent and
what counts as the same answer), runner.py (the loop), report.py (what a failure prints), known.py (what is refused on
purpose).
"""

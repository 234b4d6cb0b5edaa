"""What the programs of bench/ share: figures.py prints, statements.py is what is measured, loading.py and peers.py are the
ways to the rows, pgbench.py is one run."""

"""What the programs of bench/ share: figures (what is printed), loading (rows behind every way to them), pgbench (one run)."""

\set k random(1, 200)
SELECT id, n, v FROM bench WHERE k = :k ORDER BY id;
SELECT count(*) AS three FROM bench WHERE k = :k \gset
\if :three < 3
SELECT 1 / 0 AS rows_are_missing;
\endif

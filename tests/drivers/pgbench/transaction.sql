\set a random(1, 200)
\set b random(1, 200)
BEGIN;
SELECT n FROM bench WHERE k = :a AND id = 1;
SELECT n FROM bench WHERE k IN (:a, :b) AND id = 2;
SELECT count(*) FROM bench x JOIN bench y USING (k) WHERE k = :b;
COMMIT;

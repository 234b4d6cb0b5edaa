\set k random(1, 1000000000000)
\set id random(1000, 1000000000000)
INSERT INTO bench (k, id, v) VALUES (:k, :id, 'new');
DELETE FROM bench WHERE k = :k AND id = :id;

-- Each client has keys of its own: two writers of one row get a serialization error for now, as shards are asked at
-- REPEATABLE READ.
\set k random(0, 49) * 4 + 1 + :client_id
\set id random(1, 3)
UPDATE bench SET n = n + 1 WHERE k = :k AND id = :id;

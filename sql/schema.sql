CREATE SCHEMA shardmap;

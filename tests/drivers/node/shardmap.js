// What the tests share: sessions in which an un-keyed statement is an error, and what the coordinator counted.
import pg from 'pg';

// int8 and numeric come as strings by default; the tests compare strings.
export const connect = async (options = {}) => {
  const client = new pg.Client({ options: '-c shardmap.fanout_policy=error', ...options });
  await client.connect();
  return client;
};

export const makeTable = async (client, name, keyType) => {
  await client.query(`CREATE TABLE ${name} (k ${keyType}, id int, v text, PRIMARY KEY (k, id))`);
  await client.query('SELECT shardmap.distribute_table($1, $2)', [name, 'k']);
};

// Statements by step and by shard while `work` runs.
export const counted = async (client, work) => {
  await client.query('SELECT shardmap.reset_stat_routing()');
  await work();
  const steps = await client.query('SELECT step, statements FROM shardmap.stat_routing WHERE statements > 0');
  const shards = await client.query('SELECT shard, statements FROM shardmap.stat_shards WHERE statements > 0');
  const object = (rows) => Object.fromEntries(rows.map((row) => Object.values(row)).map(([k, n]) => [k, Number(n)]));
  return { steps: object(steps.rows), shards: object(shards.rows) };
};

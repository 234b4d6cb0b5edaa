// Statements as node-postgres sends them: transactions, RETURNING, several in one string, errors, notices, a pool.
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import pg from 'pg';
import { connect, counted, makeTable } from './shardmap.js';

let client;
before(async () => {
  client = await connect();
  await makeTable(client, 'node_t', 'int8');
});
after(() => client.end());

test('writes return their rows and counts', async () => {
  const many = await client.query('INSERT INTO node_t SELECT k, 1, $1 FROM generate_series(1, 20) k RETURNING k, v', ['new']);
  assert.equal(many.rowCount, 20);
  assert.equal(new Set(many.rows.map((row) => row.k)).size, 20);
  const update = { name: 'update', text: 'UPDATE node_t SET v = $2 WHERE k = $1 RETURNING id, v' };
  for (let n = 1; n <= 10; n += 1) {
    const { rows } = await client.query({ ...update, values: [7, `run ${n}`] });
    assert.deepEqual(rows, [{ id: 1, v: `run ${n}` }]);
  }
});

test('a named statement stays keyed', async () => {
  const { steps } = await counted(client, async () => {
    for (let n = 1; n <= 12; n += 1) {
      const { rows } = await client.query({ name: 'keyed', text: 'SELECT count(*) FROM node_t WHERE k = $1', values: [n] });
      assert.equal(rows[0].count, '1');
    }
  });
  assert.equal(Object.values(steps).reduce((sum, n) => sum + n, 0), 12);
  assert.equal(steps.fan_out, undefined);
});

test('transactions', async () => {
  await client.query('BEGIN');
  await client.query('DELETE FROM node_t WHERE k = $1', [3]);
  assert.equal((await client.query('SELECT count(*) FROM node_t WHERE k = $1', [3])).rows[0].count, '0');
  await client.query('ROLLBACK');
  assert.equal((await client.query('SELECT count(*) FROM node_t WHERE k = $1', [3])).rows[0].count, '1');
});

test('several statements in one string', async () => {
  const results = await client.query('SELECT v FROM node_t WHERE k = 8; SELECT count(*) FROM node_t WHERE k IN (1, 2, 3)');
  assert.deepEqual(results.map((result) => result.rows), [[{ v: 'new' }], [{ count: '3' }]]);
});

test('errors have their fields', async () => {
  await assert.rejects(client.query('SELECT * FROM node_t'), (error) => {
    assert.equal(error.code, '0A000');
    assert.match(error.message, /asks all 4 shards/);
    assert.match(error.hint, /shardmap.fanout_policy/);
    return true;
  });
  await assert.rejects(client.query('INSERT INTO node_t VALUES ($1, 1)', [7]), { code: '23505' });
  await assert.rejects(client.query('UPDATE node_t SET k = $1 WHERE k = $2', [8, 7]), { code: '0A000' });
  assert.equal((await client.query('SELECT v FROM node_t WHERE k = 8')).rowCount, 1);
});

test('notices', async () => {
  const told = await connect({ options: '-c shardmap.fanout_policy=notice' });
  const notices = [];
  told.on('notice', (notice) => notices.push([notice.severity, notice.message]));
  const { rows } = await told.query('SELECT count(*) FROM node_t');
  assert.equal(rows[0].count, '20');
  assert.deepEqual(notices, [['NOTICE', 'query on public.node_t asks all 4 shards']]);
  await told.end();
});

test('a pool', async () => {
  const pool = new pg.Pool({ max: 6, options: '-c shardmap.fanout_policy=error' });
  await Promise.all(Array.from({ length: 120 }, async (_, n) => {
    const k = (n % 20) + 1;
    const { rows } = await pool.query({ name: 'pooled', text: 'SELECT k FROM node_t WHERE k = $1', values: [k] });
    assert.deepEqual(rows, [{ k: String(k) }]);
  }));
  await pool.end();
});

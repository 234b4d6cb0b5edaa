// Keys of every type as node-postgres binds them: text parameters, named prepared statements, arrays.
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { connect, counted, makeTable } from './shardmap.js';

const keys = {
  int4: (n) => n,
  int8: (n) => String(BigInt(n) * 1000000000000n),
  numeric: (n) => `${n}.25`,
  text: (n) => `key '${n}" \\ é`,
  varchar: (n) => `v${n}`,
  uuid: (n) => `6BA7B810-9DAD-11D1-80B4-${String(n).padStart(12, '0')}`,
  date: (n) => `2024-03-${String(n).padStart(2, '0')}`,
  timestamptz: (n) => new Date(Date.UTC(2024, 2, n, 12, 30, n, n)),
};

let client;
before(async () => { client = await connect(); });
after(() => client.end());

for (const [type, key] of Object.entries(keys)) {
  test(`${type} keys`, async () => {
    const table = `node_${type}`;
    await makeTable(client, table, type);
    const insert = { name: `insert ${type}`, text: `INSERT INTO ${table} VALUES ($1, 1, $2)` };
    for (let n = 1; n <= 20; n += 1) {
      const result = await client.query({ ...insert, values: [key(n), `v${n}`] });
      assert.equal(result.rowCount, 1);
    }
    const select = { name: `select ${type}`, text: `SELECT v FROM ${table} WHERE k = $1` };
    for (let n = 1; n <= 20; n += 1) {
      const owner = await client.query(`SELECT shard_for($1::${type}) AS shard`, [key(n)]);
      const { shards } = await counted(client, async () => {
        const unnamed = await client.query(select.text, [key(n)]);
        const named = await client.query({ ...select, values: [key(n)] });
        assert.deepEqual([unnamed.rows, named.rows], [[{ v: `v${n}` }], [{ v: `v${n}` }]]);
      });
      assert.deepEqual(shards, { [owner.rows[0].shard]: 2 });
    }
    const few = await client.query(`SELECT v FROM ${table} WHERE k = ANY ($1) ORDER BY v`, [[key(1), key(2)]]);
    assert.deepEqual(few.rows.map((row) => row.v), ['v1', 'v2']);
    const none = await client.query({ ...select, values: [null] });
    assert.deepEqual(none.rows, []);
  });
}

test('BigInt and array parameters', async () => {
  const found = await client.query('SELECT v FROM node_int8 WHERE k = $1', [7000000000000n]);
  assert.deepEqual(found.rows, [{ v: 'v7' }]);
  const many = await client.query('SELECT count(*) FROM node_int8 WHERE k = ANY ($1::int8[])', [[1000000000000n, 7000000000000n]]);
  assert.equal(many.rows[0].count, '2');
});

test('spellings of a uuid', async () => {
  for (const text of ['6ba7b810-9dad-11d1-80b4-000000000007', '{6BA7B8109DAD11D180B4000000000007}']) {
    const found = await client.query('SELECT v FROM node_uuid WHERE k = $1', [text]);
    assert.deepEqual(found.rows, [{ v: 'v7' }]);
  }
});

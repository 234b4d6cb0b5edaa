//! What the tests share: sessions on the coordinator that the environment names, in which a statement that asks every
//! shard is an error. tokio-postgres sends parameters in binary and asks for results in binary.

use std::collections::BTreeMap;
use std::env::var;

use tokio_postgres::{Client, NoTls};

/// A session on the coordinator.
///
/// # Panics
/// If PGHOST, PGPORT, PGUSER or PGDATABASE is not set, or nobody answers there.
pub async fn connect() -> Client {
    let named = |name: &str| var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let config = format!(
        "host={} port={} user={} dbname={} options='-c shardmap.fanout_policy=error'",
        named("PGHOST"),
        named("PGPORT"),
        named("PGUSER"),
        named("PGDATABASE")
    );
    let (client, connection) = tokio_postgres::connect(&config, NoTls).await.expect("a coordinator");
    tokio::spawn(connection);
    client
}

/// Makes a logical table with key `k` and columns `id` and `v`.
///
/// # Panics
/// If it cannot be made.
pub async fn make_table(client: &Client, name: &str, key_type: &str) {
    let sql = format!(
        "CREATE TABLE {name} (k {key_type}, id int, v text, PRIMARY KEY (k, id));
         SELECT shardmap.distribute_table('{name}', 'k')"
    );
    client.batch_execute(&sql).await.expect("a logical table");
}

/// Statements counted by shard since the last call.
///
/// # Panics
/// If the coordinator does not answer.
pub async fn asked(client: &Client) -> BTreeMap<String, i64> {
    let rows = client
        .query("SELECT shard, statements FROM shardmap.stat_shards WHERE statements > 0", &[])
        .await
        .expect("counters");
    client.execute("SELECT shardmap.reset_stat_routing()", &[]).await.expect("a reset");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

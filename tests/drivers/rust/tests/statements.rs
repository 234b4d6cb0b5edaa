//! Statements as tokio-postgres sends them: transactions, portals read in pieces, pipelines, COPY, errors, cancellation.

use std::time::Duration;

use drivers::{connect, make_table};
use tokio_postgres::error::SqlState;
use tokio_postgres::NoTls;

#[tokio::test]
async fn statements() {
    let mut client = connect().await;
    make_table(&client, "rust_t", "int8").await;

    let sql = "INSERT INTO rust_t SELECT k, 1, $1 FROM generate_series(1, 20) k";
    assert_eq!(client.execute(sql, &[&"new"]).await.unwrap(), 20);
    let sink = client.copy_in::<_, bytes::Bytes>("COPY rust_t FROM STDIN").await;
    copy_rows(sink.unwrap()).await;
    let count: i64 = client.query_one("SELECT count(*) FROM rust_t WHERE k IN (1, 2, 3)", &[]).await.unwrap().get(0);
    assert_eq!(count, 6);

    let transaction = client.transaction().await.unwrap();
    transaction.execute("DELETE FROM rust_t WHERE k = $1", &[&3_i64]).await.unwrap();
    transaction.rollback().await.unwrap();
    let rows = client.query("UPDATE rust_t SET v = 'x' WHERE k = $1 RETURNING id, v", &[&3_i64]).await.unwrap();
    assert_eq!(rows.len(), 2);

    // A portal that is read in pieces.
    let transaction = client.transaction().await.unwrap();
    let portal = transaction.bind("SELECT id FROM rust_t WHERE k = $1 ORDER BY id", &[&7_i64]).await.unwrap();
    let first = transaction.query_portal(&portal, 1).await.unwrap();
    let second = transaction.query_portal(&portal, 5).await.unwrap();
    assert_eq!((first[0].get::<_, i32>(0), second[0].get::<_, i32>(0)), (1, 2));
    transaction.commit().await.unwrap();

    // Pipelined: the client does not wait between them.
    let statement = client.prepare("SELECT count(*) FROM rust_t WHERE k = $1").await.unwrap();
    let (a, b, c) = tokio::join!(
        client.query_one(&statement, &[&1_i64]),
        client.query_one(&statement, &[&2_i64]),
        client.query_one(&statement, &[&99_i64])
    );
    let counts = [a, b, c].map(|row| row.unwrap().get::<_, i64>(0));
    assert_eq!(counts, [2, 2, 0]);
}

async fn copy_rows(sink: tokio_postgres::CopyInSink<bytes::Bytes>) {
    use futures_util::SinkExt;
    let mut sink = std::pin::pin!(sink);
    for k in 1..=20 {
        sink.send(bytes::Bytes::from(format!("{k}\t2\tcopied\n"))).await.unwrap();
    }
    assert_eq!(sink.finish().await.unwrap(), 20);
}

#[tokio::test]
async fn errors_and_cancellation() {
    let client = connect().await;
    make_table(&client, "rust_e", "int8").await;
    client.execute("INSERT INTO rust_e VALUES (7, 1, 'x')", &[]).await.unwrap();

    let code = |error: tokio_postgres::Error| error.code().cloned();
    let all = client.query("SELECT * FROM rust_e", &[]).await.unwrap_err();
    assert!(all.as_db_error().unwrap().hint().unwrap().contains("shardmap.fanout_policy"));
    assert_eq!(code(all), Some(SqlState::FEATURE_NOT_SUPPORTED));
    let twice = client.execute("INSERT INTO rust_e VALUES ($1, 1)", &[&7_i64]).await.unwrap_err();
    assert_eq!(code(twice), Some(SqlState::UNIQUE_VIOLATION));
    let moved = client.execute("UPDATE rust_e SET k = $1 WHERE k = $2", &[&8_i64, &7_i64]).await.unwrap_err();
    assert_eq!(code(moved), Some(SqlState::FEATURE_NOT_SUPPORTED));

    let cancel = client.cancel_token();
    let watcher = connect().await;
    let canceller = async {
        // It sleeps on the shard, or here. While it is parsed a cancel could come too early.
        let sleeps = "SELECT FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND state = 'active' \
            AND wait_event_type IN ('Extension', 'Timeout')";
        while watcher.query(sleeps, &[]).await.unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        cancel.cancel_query(NoTls).await.unwrap();
    };
    let slow = client.query("SELECT pg_sleep(3600) FROM rust_e WHERE k = 7", &[]);
    let (slow, ()) = tokio::join!(slow, canceller);
    assert_eq!(code(slow.unwrap_err()), Some(SqlState::QUERY_CANCELED));
    assert_eq!(client.query("SELECT 1 FROM rust_e WHERE k = 7", &[]).await.unwrap().len(), 1);
}

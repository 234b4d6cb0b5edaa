//! Keys of every type as tokio-postgres binds them: in binary, by their own types, in prepared statements and arrays.
//!
//! One test, in a program of its own: the counters that it reads are shared by all sessions of the coordinator.

use chrono::{DateTime, Days, NaiveDate, Utc};
use drivers::{asked, connect, make_table};
use rust_decimal::Decimal;
use tokio_postgres::types::{FromSql, ToSql};
use tokio_postgres::Client;
use uuid::Uuid;

/// Writes rows of twenty keys and reads each back: on its shard alone, prepared and not, more often than plans are custom.
async fn keys_of<K>(client: &Client, key_type: &str, key: impl Fn(i32) -> K)
where
    K: ToSql + Sync + PartialEq + std::fmt::Debug + for<'a> FromSql<'a>,
{
    let table = format!("rust_{key_type}");
    make_table(client, &table, key_type).await;
    let insert = client.prepare(&format!("INSERT INTO {table} VALUES ($1, $2, $3)")).await.unwrap();
    let select = client.prepare(&format!("SELECT k, id, v FROM {table} WHERE k = $1")).await.unwrap();
    let owner = client.prepare(&format!("SELECT shard_for($1::{key_type})")).await.unwrap();
    for n in 1..=20 {
        assert_eq!(client.execute(&insert, &[&key(n), &n, &format!("v{n}")]).await.unwrap(), 1);
    }
    asked(client).await;
    for n in 1..=20 {
        let row = client.query_one(&select, &[&key(n)]).await.unwrap();
        assert_eq!((row.get::<_, K>(0), row.get::<_, i32>(1)), (key(n), n));
        let sql = format!("SELECT v FROM {table} WHERE k = $1 AND id = $2");
        let row = client.query_one(&sql, &[&key(n), &n]).await.unwrap();
        assert_eq!(row.get::<_, String>(0), format!("v{n}"));
        let shard: String = client.query_one(&owner, &[&key(n)]).await.unwrap().get(0);
        assert_eq!(asked(client).await.into_iter().collect::<Vec<_>>(), [(shard, 2)], "{key_type} {n}");
    }
    let few = vec![key(1), key(2), key(3)];
    let rows = client.query(&format!("SELECT k FROM {table} WHERE k = ANY ($1)"), &[&few]).await.unwrap();
    assert_eq!(rows.len(), 3);
    let none: Option<K> = None;
    assert!(client.query(&select, &[&none]).await.unwrap().is_empty());
    asked(client).await;
}

#[tokio::test]
async fn keys_in_binary() {
    let client = connect().await;
    let day = NaiveDate::from_ymd_opt(2024, 2, 20).unwrap();
    keys_of(&client, "int2", |n| n as i16).await;
    keys_of(&client, "int4", |n| n * 1000).await;
    keys_of(&client, "int8", |n| i64::from(n) * 1_000_000_000_000).await;
    keys_of(&client, "text", |n| format!("key '{n}\" \\ é")).await;
    keys_of(&client, "varchar", |n| format!("v{n}")).await;
    keys_of(&client, "uuid", |n| Uuid::from_u128(n as u128 * 7919)).await;
    keys_of(&client, "numeric", |n| Decimal::new(i64::from(n) * 25, 2)).await;
    keys_of(&client, "date", |n| day + Days::new(n as u64)).await;
    keys_of(&client, "timestamptz", |n| DateTime::<Utc>::from_timestamp(1_700_000_000 + i64::from(n), 7000).unwrap())
        .await;

    // The scale of a numeric is not part of its value.
    for text in ["0.25", "0.250", "0.2500000"] {
        let value: Decimal = text.parse().unwrap();
        let row = client.query_one("SELECT id FROM rust_numeric WHERE k = $1", &[&value]).await.unwrap();
        assert_eq!(row.get::<_, i32>(0), 1);
    }
    // An int4 or int2 against an int8 key, and the other way.
    let row = client.query_one("SELECT id FROM rust_int4 WHERE k = $1::int8", &[&7000_i64]).await.unwrap();
    assert_eq!(row.get::<_, i32>(0), 7);
    let row = client.query_one("SELECT id FROM rust_int2 WHERE k = $1::int4", &[&7_i32]).await.unwrap();
    assert_eq!(row.get::<_, i32>(0), 7);
    assert!(asked(&client).await.values().sum::<i64>() <= 5);
}

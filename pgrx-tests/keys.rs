//! Canonical texts: the one computed here and the one that a shard computes in SQL are the same, for every key type.

#[pgrx::pg_schema]
mod tests {
    use pgrx::prelude::*;

    /// Types, and SQL that yields values of them: ordinary ones, and those at the edges.
    const VALUES: [(&str, &str); 13] = [
        ("int2", "SELECT (i * 97 - 32768)::int2 FROM generate_series(0, 675) i"),
        ("int4", "SELECT i * 9973 FROM generate_series(-9999, 9999, 37) i UNION VALUES (2147483647), (-2147483648)"),
        ("int8", "SELECT i * 99999999977 FROM generate_series(-9999, 9999, 37) i UNION VALUES \
                  (9223372036854775807), (-9223372036854775808)"),
        ("text", "SELECT repeat(chr(32 + i % 900), i % 90) || i FROM generate_series(1, 2000) i UNION VALUES \
                  (''), (' x '), ('007'), (E'\\\\x'), ('ä''\"')"),
        ("varchar", "SELECT ('v' || i)::varchar(3) FROM generate_series(1, 2000) i"),
        ("bpchar", "SELECT rpad('c' || i, i % 20, ' ')::char(12) FROM generate_series(1, 2000) i UNION VALUES (''::char(12))"),
        ("uuid", "SELECT md5(i::text)::uuid FROM generate_series(1, 2000) i UNION VALUES \
                  ('{A0EEBC99-9C0B4EF8-BB6D6BB9-BD380A11}'::uuid)"),
        ("numeric", "SELECT (i * 1.10)::numeric(30, 8) / 7 FROM generate_series(-900, 900) i UNION VALUES \
                     (0.00::numeric), (-0.0), (1e20), (1.000), (1e-19), ('NaN'), ('Infinity'), ('-Infinity'), (100)"),
        ("date", "SELECT date '2000-01-01' + i * 997 FROM generate_series(-700, 700) i UNION VALUES \
                  ('infinity'::date), ('-infinity'), ('4713-01-01 BC'), ('5874897-12-31')"),
        ("timestamp", "SELECT timestamp '2000-01-01' + i * interval '7 days 1.000001 seconds' FROM generate_series(-900, 900) i \
                       UNION VALUES ('infinity'::timestamp), ('-infinity'), ('4713-01-01 BC'), ('294276-12-31 23:59:59.999999')"),
        ("timestamptz", "SELECT timestamptz '2000-01-01 UTC' + i * interval '7 days 0.1 seconds' FROM generate_series(-900, 900) i \
                         UNION VALUES ('infinity'::timestamptz), ('-infinity'), ('294276-12-31 23:59:59.999999 UTC')"),
        ("bytea", "SELECT decode(md5(i::text), 'hex') FROM generate_series(1, 500) i UNION VALUES (''::bytea), ('\\x00'::bytea)"),
        ("bytea", "SELECT decode(repeat(md5(i::text), 9000), 'hex') FROM generate_series(1, 2) i"),
    ];

    fn one<T: FromDatum + IntoDatum>(sql: &str) -> T {
        Spi::get_one(sql).expect("the query runs").expect("one value that is not null")
    }

    #[pg_test]
    fn rust_and_sql_agree_on_canonical_texts() {
        for setting in ["SET timezone = 'America/New_York'", "SET datestyle = 'German'", "SET bytea_output = 'escape'"]
        {
            Spi::run(setting).expect("the setting is known");
        }
        for (key_type, values) in VALUES {
            let form: String = one(&format!("SELECT shardmap.key_sql('{key_type}'::regtype, 'v')"));
            let counted = format!(
                "SELECT count(*) FILTER (WHERE shardmap.canonical_key(v) IS DISTINCT FROM {form}) FROM ({values}) x (v)"
            );
            assert_eq!(one::<i64>(&counted), 0, "{key_type}: {form}");
            assert!(one::<i64>(&format!("SELECT count(*) FROM ({values}) x (v)")) >= 2, "{key_type} has values");
        }
    }

    #[pg_test]
    fn equal_keys_have_one_text_whatever_their_spelling() {
        for (a, b) in [
            ("7::int2", "7::int8"),
            ("7::int4", "7.00::numeric"),
            ("'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'::uuid", "'{a0eebc999c0b4ef8bb6d6bb9bd380a11}'::uuid"),
            ("'x'::char(9)", "'x'::char(3)"),
            ("'2024-02-29'::date", "'2024-02-29 00:00'::timestamp"),
            ("'2024-02-29 12:00+02'::timestamptz", "'2024-02-29 10:00+00'::timestamptz"),
        ] {
            assert!(
                one::<bool>(&format!("SELECT shardmap.canonical_key({a}) = shardmap.canonical_key({b})")),
                "{a} {b}"
            );
        }
        assert!(one::<bool>("SELECT shardmap.canonical_key('007'::text) <> shardmap.canonical_key('7'::text)"));
    }

    #[pg_test]
    fn tokens_are_the_low_32_bits_of_md5() {
        let wrong = "SELECT count(*) FROM generate_series(1, 5000) i \
                     WHERE token_for('k' || i) <> ('x' || right(md5('k' || i), 8))::bit(32)::bigint";
        assert_eq!(one::<i64>(wrong), 0);
    }

    #[pg_test(error = "type double precision cannot be a shard key")]
    fn floats_are_refused() {
        Spi::run("SELECT token_for(1.5::float8)").expect("an error of our own comes first");
    }

    #[pg_test]
    fn null_keys_have_no_owner() {
        assert_eq!(Spi::get_one::<String>("SELECT shard_for(NULL::text)"), Ok(None));
        assert_eq!(Spi::get_one::<i64>("SELECT token_for(NULL::int)"), Ok(None));
    }
}

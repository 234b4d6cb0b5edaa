//! Shapes of statements: golden texts, and what must hold for any text.

#![allow(clippy::indexing_slicing)] // tables of test data

use shardmap_core::fingerprint::{
    bounded, comments_contain, copies_table, fingerprint, fingerprints, normalize, statement, statement_with_comments,
    Backslash,
};

fn shape(sql: &str) -> String {
    normalize(sql, Backslash::Ordinary)
}

/// Frozen: a changed row here breaks the figures that users have kept under the old fingerprint.
#[test]
fn golden() {
    for (sql, want) in [
        ("", ""),
        ("SELECT 1", "SELECT $1"),
        ("select * from t where k = 'it''s'", "select * from t where k = $1"),
        ("SELECT * FROM \"T  x\"\"y\" WHERE \"K\"='a'", "SELECT * FROM \"T  x\"\"y\" WHERE \"K\" = $1"),
        // Literals of every kind.
        (r"SELECT E'a\'b', U&'d!0061' UESCAPE '!', N'x', B'01', X'1F'", "SELECT $1, $2, $3, $4, $5"),
        ("SELECT $$a'b$$, $q$ $$ $q$, $é$x$é$", "SELECT $1, $2, $3"),
        ("SELECT 1.5, .5, 1., 1e5, 1.5e-3, 1_000, 0x1F, 0b01, 0o17", "SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9"),
        ("SELECT 'a'\n  -- more\n 'b', 'c' 'd'", "SELECT $1, $2 $3"),
        ("SELECT U&\"d!0061t\" UESCAPE '!' FROM t", "SELECT U&\"d!0061t\" UESCAPE '!' FROM t"),
        ("SELECT date '2020-01-01', interval '1 day'", "SELECT date $1, interval $2"),
        // Signs belong to the number unless they stand between two values.
        ("SELECT -1, a - 1, a -1, (-1), a * -1, x = -.5", "SELECT $1, a - $2, a - $3, ($4), a * $5, x = $6"),
        ("SELECT a WHERE b=-1 AND c@-1", "SELECT a WHERE b = $1 AND c @- $2"),
        // Parameters stay; literals are numbered on from them.
        ("SELECT * FROM t WHERE a = 5 AND b = $1", "SELECT * FROM t WHERE a = $2 AND b = $1"),
        ("SELECT $2, $1, 'x'", "SELECT $2, $1, $3"),
        // Comments go, nested ones too.
        ("SELECT /* a /* b */ c */ 1 -- end", "SELECT $1"),
        ("SELECT a+--x\n1", "SELECT a + $1"),
        // Lists.
        ("SELECT 1 WHERE a IN (1, 2, 3)", "SELECT $1 WHERE a IN ($2, ...)"),
        ("SELECT 1 WHERE a in(1)", "SELECT $1 WHERE a in ($2)"),
        ("SELECT 1 WHERE a IN ($1,$2,$3) AND b = $4", "SELECT $3 WHERE a IN ($1, ...) AND b = $2"),
        ("SELECT 1 WHERE a IN ('a', NULL, true)", "SELECT $1 WHERE a IN ($2, ...)"),
        ("SELECT 1 WHERE a IN (-1, 2)", "SELECT $1 WHERE a IN ($2, ...)"),
        ("SELECT 1 WHERE a IN ('1'::int, '2'::int)", "SELECT $1 WHERE a IN ($2::int, ...)"),
        ("SELECT 1 WHERE (a,b) IN ((1,2),(3,4),(5,6))", "SELECT $1 WHERE (a, b) IN (($2, $3), ...)"),
        ("SELECT 1 WHERE a IN (b, c, 1, 2, d)", "SELECT $1 WHERE a IN (b, c, $2, ..., d)"),
        ("SELECT 1 WHERE a IN (SELECT 1, 2)", "SELECT $1 WHERE a IN (SELECT $2, $3)"),
        ("SELECT 1 WHERE a = ANY(ARRAY[1,2])", "SELECT $1 WHERE a = ANY (ARRAY[$2, ...])"),
        ("SELECT ARRAY[[1,2],[3,4]]", "SELECT ARRAY[[$1, ...], ...]"),
        (
            "INSERT INTO t(a,b) VALUES (1,'x'),(2,'y') RETURNING a",
            "INSERT INTO t(a, b) VALUES ($1, $2), ... RETURNING a",
        ),
        ("INSERT INTO t (a,b) VALUES ($1,$2),($3,$4)", "INSERT INTO t(a, b) VALUES ($1, $2), ..."),
        (
            "INSERT INTO t VALUES (1,now()),(NULL,now()),(3,DEFAULT)",
            "INSERT INTO t VALUES ($1, now()), ..., ($2, DEFAULT)",
        ),
        ("SELECT * FROM (VALUES (1),(2)) v(x), t", "SELECT * FROM (VALUES ($1), ...) v(x), t"),
        // No lists of values: arguments, type modifiers, columns.
        ("SELECT f(1, 2), a::numeric(10,2), count(*), t.*", "SELECT f($1, $2), a::numeric($3, $4), count(*), t.*"),
        ("SELECT a[1:2], b [ 3 ], f(x=>1)", "SELECT a[$1 : $2], b[$3], f(x => $4)"),
        ("SELECT a IS NULL, b AND TRUE;;", "SELECT a IS NULL, b AND TRUE"),
        ("SELECT a FROM s . t WHERE x ->> 'k' = '1'::text", "SELECT a FROM s.t WHERE x ->> $1 = $2::text"),
        ("SELECT  \t\n a\u{c}\u{b} FROM é", "SELECT a FROM é"),
        // Not SQL.
        ("'never closed", "$1"),
        ("SELECT \"never closed ", "SELECT \"never closed "),
        ("/* never closed", ""),
        ("$never$ closed", "$1"),
        ("$ 1 {\\} ...", "$ $1 { \\ } ..."),
        ("1..10 ... . .. 1abc", "$1 .. $2 ... . .. $3 abc"),
        (") ] ( [ 1", ")]([$1"),
    ] {
        assert_eq!(shape(sql), want, "{sql}");
        assert_eq!(shape(want), want, "twice: {sql}");
    }
}

#[test]
fn backslash_follows_the_setting() {
    let sql = r"SELECT 'it\'s secret', 'x'";
    assert_eq!(normalize(sql, Backslash::Escape), "SELECT $1, $2");
    assert_eq!(normalize(r"SELECT 'C:\', 'x'", Backslash::Ordinary), "SELECT $1, $2");
}

#[test]
fn length_of_lists_makes_no_new_fingerprint() {
    let list = |n: usize| (0..n).map(|i| i.to_string()).collect::<Vec<_>>().join(", ");
    let params = |n: usize| (1..=n).map(|i| format!("${i}")).collect::<Vec<_>>().join(",");
    let rows = |n: usize| (0..n).map(|i| format!("({i}, 'v{i}', NULL)")).collect::<Vec<_>>().join(", ");
    let of = |sql: String| fingerprint(&shape(&sql));
    let wants = [
        of(format!("SELECT * FROM t WHERE k IN ({}) AND a = 1", list(2))),
        of(format!("SELECT * FROM t WHERE k IN ({}) AND a = $3", params(2))),
        of(format!("INSERT INTO t VALUES {}", rows(2))),
    ];
    for n in [3, 10, 11, 1_000] {
        assert_eq!(of(format!("SELECT * FROM t WHERE k IN ({}) AND a = 1", list(n))), wants[0]);
        assert_eq!(of(format!("SELECT * FROM t WHERE k IN ({}) AND a = ${}", params(n), n + 1)), wants[1]);
        assert_eq!(of(format!("INSERT INTO t VALUES {}", rows(n))), wants[2]);
    }
}

#[test]
fn fingerprint_is_the_low_half_of_md5() {
    // RFC 1321, section A.5.
    assert_eq!(fingerprint("abc"), 0xd696_3f7d_28e1_7f72);
}

#[test]
fn bounded_cuts_no_character() {
    for (text, max, want) in [
        ("abc", 9, "abc"),
        ("abc", 2, "ab"),
        ("aé", 2, "a"),
        ("é", 1, ""),
        ("😀x", 4, "😀"),
        ("😀", 3, ""),
        ("", 0, ""),
    ] {
        assert_eq!(bounded(text, max), want, "{text} {max}");
    }
}

#[test]
fn statement_takes_its_part() {
    let text = "SELECT 1; SELECT é ;SELECT 3";
    for (location, length, want) in [
        (-1, 0, text),
        (0, 8, "SELECT 1"),
        (9, 11, "SELECT é"),
        (21, 0, "SELECT 3"),
        (17, 2, "é"),
        // What does not fit, or would cut a character.
        (17, 1, text),
        (18, 2, text),
        (0, i32::MAX, text),
        (i32::MAX, 5, text),
        (0, -1, text),
    ] {
        assert_eq!(statement(text, location, length), want, "{location} {length}");
    }
}

/// Numbers of a fixed sequence: a failure can be run again.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

#[test]
fn any_text_is_taken_and_twice_changes_nothing() {
    const PIECES: [&str; 74] = [
        "SELECT",
        "VALUES",
        "IN",
        "ARRAY",
        "NULL",
        "true",
        "UESCAPE",
        "U",
        "E",
        "a",
        "é",
        "b1$",
        "\"q\"",
        "\"",
        "\"\"",
        "U&\"x\"",
        "'s'",
        "'",
        "''",
        "E'\\''",
        "U&'!'",
        "B'1'",
        "N'",
        "X'",
        "$$",
        "$t$",
        "$",
        "$1",
        "$22",
        "$0",
        "$99999999999999999999",
        "1",
        "1.5",
        ".5",
        "1.",
        "1e5",
        "1e",
        "0x",
        "0b1",
        "1_0",
        "(",
        ")",
        "[",
        "]",
        ",",
        ",",
        ";",
        ".",
        "..",
        "...",
        ":",
        "::",
        ":=",
        "=",
        "-",
        "+",
        "*",
        "/",
        "<-",
        "@-",
        "--",
        "/*",
        "*/",
        " ",
        " ",
        " ",
        "\n",
        "\t",
        "\0",
        "{",
        "\\",
        "😀",
        "?",
        "(1,2)",
    ];
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    for round in 0..200_000 {
        let count = 1 + numbers.below(24);
        let sql: String = (0..count).map(|_| PIECES[numbers.below(PIECES.len())]).collect();
        for backslash in [Backslash::Ordinary, Backslash::Escape] {
            let once = normalize(&sql, backslash);
            assert_eq!(normalize(&once, backslash), once, "round {round}: {sql:?}");
        }
    }
}

#[test]
fn no_literal_survives() {
    let mut numbers = Numbers(42);
    let literals = [
        "'SECRET'",
        "E'\\'SECRET'",
        "$$SECRET$$",
        "$a$SECRET$a$",
        "U&'SECRET'",
        "N'SECRET'",
        "'x'\n'SECRET'",
        "'a''SECRET'",
    ];
    let between = [
        " ",
        ", ",
        " = ",
        "(",
        ")",
        " IN (",
        " VALUES (",
        "::text ",
        " a ",
        " \"b\" ",
        " /* c */ ",
        " -- d\n",
        "-",
        " ARRAY[",
        "]",
        "1",
    ];
    for _ in 0..50_000 {
        let mut sql = String::from("SELECT ");
        for _ in 0..numbers.below(8) {
            sql.push_str(literals[numbers.below(literals.len())]);
            sql.push_str(between[numbers.below(between.len())]);
        }
        let text = shape(&sql);
        assert!(!text.contains("SECRET"), "{sql} -> {text}");
    }
}

#[test]
fn time_is_linear() {
    let big = 2_000_000;
    for piece in [
        "(",
        "VALUES (",
        "IN (",
        "'a'\n",
        "$a",
        "/*",
        "\"",
        "1,",
        "(1,",
        "((1),",
        "-",
        "$$ ",
        "IN (1, 1) VALUES (1), (1), ",
        "[1,",
    ] {
        let sql = piece.repeat(big / piece.len());
        let start = std::time::Instant::now();
        let _ = shape(&sql);
        assert!(start.elapsed().as_secs() < 5, "{piece}");
    }
}

#[test]
fn a_statement_has_the_comments_before_it() {
    let source = "SELECT 1 /* a */; /* b */ SELECT ';' /* c */; SELECT 3";
    let at = source.find("SELECT ';'").unwrap();
    let text = statement_with_comments(source, Backslash::Ordinary, at as i32, 18);
    assert_eq!(text, " /* b */ SELECT ';' /* c */");
    assert!(comments_contain(text, Backslash::Ordinary, "/* b */"));
    assert!(comments_contain(text, Backslash::Ordinary, "/* c */"));
    assert!(!comments_contain(text, Backslash::Ordinary, "/* a */"));
    assert!(!comments_contain(r#"SELECT '/* d */', "/* d */""#, Backslash::Ordinary, "/* d */"));
    assert_eq!(statement_with_comments("/* x */ SELECT 1", Backslash::Ordinary, 8, 0), "/* x */ SELECT 1");
}

#[test]
fn copies_of_tables() {
    for sql in
        ["COPY t TO STDOUT", " -- out\ncopy/**/s.\"t\" (a) to stdout", "Copy \"(\" TO '/x'", "COPY BINARY t TO STDOUT"]
    {
        assert!(copies_table(sql, Backslash::Ordinary), "{sql}");
    }
    for sql in
        ["COPY (SELECT 1) TO STDOUT", "copy /* ( */(TABLE ONLY t) to stdout", "SELECT 1", "TABLE copy", "", "COPY"]
    {
        assert!(!copies_table(sql, Backslash::Ordinary), "{sql}");
    }
}

#[test]
fn lists_of_fingerprints() {
    for (list, want) in [
        ("", Some(vec![])),
        ("  ", Some(vec![])),
        ("7", Some(vec![7])),
        (" -1 ,\t9223372036854775807,-9223372036854775808", Some(vec![u64::MAX, i64::MAX as u64, 1 << 63])),
        ("7,", None),
        (",", None),
        ("7 8", None),
        ("7.0", None),
        ("seven", None),
        ("9223372036854775808", None),
    ] {
        assert_eq!(fingerprints(list), want, "{list:?}");
    }
}

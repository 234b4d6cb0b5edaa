//! MD5 of canonical text, and tokens.
//!
//! Decides where a key and a vnode stand. What always holds: a token is the low 32 bits of the digest read as one
//! big-endian number, which are its last eight hex digits, so that plain SQL finds the same one ([`token_sql`]). MD5
//! spreads keys here and protects nothing. Read [`crate::key`] for canonical text, [`crate::ring`] for the use of tokens.

use md5::{Digest, Md5};

use crate::ids::Token;

/// Returns MD5 of `bytes` as a number, most significant byte first.
///
/// Source: RFC 1321; Python's `int(hashlib.md5(b).hexdigest(), 16)`.
#[must_use]
pub fn md5_u128(bytes: &[u8]) -> u128 {
    u128::from_be_bytes(Md5::digest(bytes).into())
}

/// Returns the token of vnode `index` of a shard: MD5 of `shard#index`, mod 2^32. No allocation.
#[must_use]
pub fn vnode_token(shard: &str, index: u32) -> Token {
    let mut digits = [b'0'; 10];
    let mut start = digits.len();
    let mut rest = index;
    for (at, digit) in digits.iter_mut().enumerate().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
        start = at;
        if rest == 0 {
            break;
        }
    }
    let mut md5 = Md5::new();
    md5.update(shard.as_bytes());
    md5.update(b"#");
    md5.update(digits.get(start..).unwrap_or_default());
    Token::from_digest(u128::from_be_bytes(md5.finalize().into()))
}

/// Returns the SQL expression of the token of canonical text `text_sql`, of built-ins only, as int8.
#[must_use]
pub fn token_sql(text_sql: &str) -> String {
    format!(
        "('x' OPERATOR(pg_catalog.||) pg_catalog.right(pg_catalog.md5({text_sql}), 8))\
         ::pg_catalog.bit(32)::pg_catalog.int8"
    )
}

impl Token {
    /// Returns the token of a key's canonical text.
    #[must_use]
    pub fn of(canonical: &[u8]) -> Self {
        Self::from_digest(md5_u128(canonical))
    }

    /// Returns the token that belongs to a digest: its low 32 bits.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // the low 32 bits are the definition
    pub fn from_digest(digest: u128) -> Self {
        Self(digest as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_is_the_big_endian_number() {
        // RFC 1321, section A.5.
        assert_eq!(md5_u128(b""), 0xd41d_8cd9_8f00_b204_e980_0998_ecf8_427e);
        assert_eq!(md5_u128(b"abc"), 0x9001_5098_3cd2_4fb0_d696_3f7d_28e1_7f72);
        assert_eq!(Token::of(b"abc"), Token(0x28e1_7f72));
    }

    #[test]
    fn vnode_token_is_md5_of_name_and_index() {
        for index in [0, 7, 10, 99, 1_000, u32::MAX] {
            assert_eq!(
                vnode_token("shard-3", index),
                Token::of(format!("shard-3#{index}").as_bytes()),
                "index={index}"
            );
        }
    }
}

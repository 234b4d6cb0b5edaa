//! A pooler that stands before a shard and gives each transaction whatever connection is free.
//!
//! Decides what of a session may be relied on from one transaction to the next: with such a pooler nothing, unless it
//! keeps its clients' prepared statements for them. What always holds then: settings go with each transaction, or with a
//! statement that stands alone, in the same message, and end with it; so nothing is left for the next one who gets
//! the connection, and nothing that another one left is relied on. (`None` is a session of one's own.)

use std::ffi::CStr;

/// The option of a foreign server that says so.
pub const OPTION: &CStr = c"pooler";

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Pooler {
    #[default]
    None,
    Transaction {
        /// It keeps prepared statements.
        prepared: bool,
    },
}

impl Pooler {
    /// Reads the option's value.
    pub fn parse(value: &CStr) -> Option<Self> {
        match value.to_bytes() {
            b"none" => Some(Self::None),
            b"transaction" => Some(Self::Transaction { prepared: false }),
            b"transaction_prepared" => Some(Self::Transaction { prepared: true }),
            _ => None,
        }
    }

    /// The session is the same in the next transaction.
    pub fn keeps_session(self) -> bool {
        self == Self::None
    }

    /// A statement is still there, under its name.
    pub fn keeps_statements(self) -> bool {
        self != Self::Transaction { prepared: false }
    }
}

//! Why a statement did not take a higher step of the ladder, in words for its user.
//!
//! There is no reason "different keyspaces" for a fan-out, and none is needed: a key that an equality carries from one
//! table to another is a value, and each keyspace finds its own shard for it. Two keyspaces only keep a statement from
//! being on one shard ([`Spread::Keyspaces`]).

/// Why a reference could not be narrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Nothing is said about the key.
    NoCondition,
    /// The key is compared, but not for equality with a value that is known.
    UnknownValue,
    /// The key is named in one arm of an OR, not in all.
    OrWithOther,
    /// The key is named only in the ON of an outer join, which does not restrict the table.
    OuterJoinOnly,
}

impl Reason {
    /// The reason as a sentence about key column `key` of `table`.
    #[must_use]
    pub fn sentence(self, table: &str, key: &str) -> String {
        match self {
            Self::NoCondition => format!("No condition on the key \"{key}\" of {table}."),
            Self::UnknownValue => {
                format!("The key \"{key}\" of {table} is not compared for equality with a value known when the statement starts.")
            }
            Self::OrWithOther => {
                format!("The key \"{key}\" of {table} is named in one arm of an OR, not in all.")
            }
            Self::OuterJoinOnly => {
                format!("The key \"{key}\" of {table} is named only in the condition of an outer join, which keeps its other rows.")
            }
        }
    }
}

/// Why a statement that is narrowed is not on one shard, in place of its logical tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Spread {
    /// Keys of several shards are named.
    Keys,
    /// A key becomes known only when the statement starts.
    Late,
    /// No key passes the conditions: there is no shard to be on.
    Nothing,
    /// Each table is on one shard, but not all on the same.
    Tables,
    /// Tables are in different keyspaces, which share no shard.
    Keyspaces,
    /// Routing is turned off.
    Off,
    /// A sample of the table is read.
    Sample,
    /// Rows of the table are values.
    WholeRow,
    /// The partition's columns are not the table's.
    Layout,
    /// Writes to the table fire triggers on it.
    Triggers,
}

impl Spread {
    /// The reason as a sentence about key column `key` of `table`.
    #[must_use]
    pub fn sentence(self, table: &str, key: &str) -> String {
        match self {
            Self::Keys => format!("The keys named of {table} are on several shards."),
            Self::Late => format!("The key \"{key}\" of {table} is known only when the statement starts."),
            Self::Nothing => format!("No row of {table} can match."),
            Self::Tables => "The tables' keys are on different shards.".to_owned(),
            Self::Keyspaces => "The tables are in different keyspaces.".to_owned(),
            Self::Off => "shardmap.enable_routing is off.".to_owned(),
            Self::Sample => format!("A sample of {table} is read."),
            Self::WholeRow => format!("Rows of {table} are used as values."),
            Self::Layout => format!("The columns of {table} and of its partition differ."),
            Self::Triggers => format!("Table {table} has triggers."),
        }
    }
}

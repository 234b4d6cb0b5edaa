//! What a shard answered to statements of ours: the last one's rows, as text, and its command tag.

#[derive(Debug, Default)]
pub struct Answer {
    /// Such as `INSERT 0 3`.
    pub tag: String,
    /// In the database's encoding; `None` is NULL.
    pub rows: Vec<Vec<Option<Box<[u8]>>>>,
}

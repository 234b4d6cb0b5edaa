//! Which server may answer a read, so that nobody misses his own write or sees time run backwards.
//!
//! [`token`] is what a session must not read behind: a position of each shard's write-ahead log, as a text that travels
//! with a request. [`position`] compares positions across failovers. [`choice`] picks a server. What always holds: clock
//! and chance are passed in; a server of which too little is known is never chosen where a token matters. Read
//! [`position`] first.

pub mod choice;
pub mod position;
pub mod token;

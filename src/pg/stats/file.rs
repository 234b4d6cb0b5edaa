//! The file that keeps the statistics while the server is down.
//!
//! Decides when it is written (at an orderly end of the server) and read (at its start, and removed then, so that neither
//! a crash nor a base backup brings stale figures back). What always holds: a file is complete or not there, for it
//! gets its name when it is safely on disk; a file that cannot be read or understood costs one line in the log and the
//! figures, never the start. As with Postgres' own statistics, a crash loses them.
//! Read next: `shardmap_core::statistics` for the layout.

use std::fs;
use std::io::{self, Read, Write};
use std::sync::atomic::Ordering;

use pgrx::prelude::*;
use shardmap_core::statistics::{decode, encode, Statistics};

use super::shared::Shared;
use super::{fanout, routing};

/// In the data folder, which is the server's working directory. Postgres keeps its own statistics there too.
const PATH: &str = "pg_stat/pg_shardmap.stat";
const PART: &str = "pg_stat/pg_shardmap.stat.tmp";

/// More than the greatest table can fill.
const MAX_BYTES: u64 = 1 << 30;

/// Fills the fresh area from the file, if there is one. The caller is alone.
pub fn load(shared: &Shared) {
    let bytes = match read() {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => return ignored(&error.to_string()),
    };
    match decode(&bytes) {
        Ok(kept) => {
            shared.evicted.store(kept.evicted, Ordering::Relaxed);
            shared.fanout_since.store(kept.fanout_since, Ordering::Relaxed);
            shared.routing_since.store(kept.routing_since, Ordering::Relaxed);
            fanout::restore(shared, kept.fanout);
            routing::restore(shared, &kept.steps, &kept.shards);
        }
        Err(error) => ignored(&error.to_string()),
    }
    if let Err(error) = fs::remove_file(PATH) {
        log!("could not remove file \"{PATH}\": {error}");
    }
}

fn read() -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(PATH)?.take(MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn ignored(reason: &str) {
    log!("ignoring file \"{PATH}\": {reason}");
}

/// Writes the file. The caller is alone.
pub fn save(shared: &Shared) {
    let statistics = Statistics {
        fanout: fanout::all(shared, None),
        steps: routing::steps(shared, None),
        shards: routing::shards(shared, None),
        evicted: shared.evicted.load(Ordering::Relaxed),
        fanout_since: shared.fanout_since.load(Ordering::Relaxed),
        routing_since: shared.routing_since.load(Ordering::Relaxed),
    };
    if let Err(error) = write(&statistics) {
        log!("could not write file \"{PATH}\": {error}");
        let _ = fs::remove_file(PART);
    }
}

fn write(statistics: &Statistics) -> io::Result<()> {
    let text = encode(statistics)?;
    let mut file = fs::File::create(PART)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(PART, PATH)?;
    fs::File::open("pg_stat")?.sync_all()
}

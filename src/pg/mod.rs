//! The only place that names Postgres' internals: hooks, catalog access, the foreign data wrapper, SQL functions.
//!
//! Pointers from Postgres are read once, at the edge, into plain Rust values; what to do with them is decided in
//! `shardmap_core`. Read next: [`error`] for how a refusal is raised, then the module of the part you care about.

mod alone;
mod area;
mod audits;
mod barrier;
pub mod catalog;
mod clock;
mod discard;
mod encoding;
pub mod error;
pub mod fdw;
mod flag;
pub mod functions;
pub mod keys;
mod moves;
mod planner;
mod query;
mod raw;
pub mod reads;
mod reference;
pub mod remote;
pub mod replicas;
mod resolver;
mod router;
mod savepoint;
pub mod settings;
pub mod stats;
mod transfer;
mod worker;

static AREAS: [&dyn area::Shared; 4] = [&stats::Area, &remote::CONNECTIONS, &replicas::shared::AREA, &resolver::AREA];

/// Registers settings, hooks and callbacks. Runs once per process, in this order.
pub fn init() {
    // Errors are meant for the users of the database: no stack traces of ours in them, whatever the server's environment.
    std::env::set_var("RUST_BACKTRACE", "0");
    area::init(&AREAS);
    catalog::init();
    stats::init();
    remote::init();
    reads::servers::init();
    reference::init();
    replicas::init();
    resolver::init();
    audits::init();
    settings::init();
    router::init();
    planner::init();
    flag::init();
    discard::init();
}

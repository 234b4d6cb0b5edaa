//! pg_shardmap: routes plain SQL to the shard that holds the key, inside the database.
//!
//! This file holds the library's magic block, the SQL that makes the extension, and `_PG_init`, which calls each
//! module's `init` in a fixed order. Decisions are made in `shardmap_core` (`src/core`); `src/pg` carries them out.

use pgrx::prelude::*;

mod pg;

::pgrx::pg_module_magic!(name, version);

extension_sql_file!("../sql/schema.sql", name = "schema", bootstrap);
extension_sql_file!("../sql/routing.sql", name = "routing", requires = ["schema"]);
extension_sql_file!("../sql/remote.sql", name = "remote", requires = ["routing"]);
extension_sql_file!("../sql/key_classes.sql", name = "key_classes", requires = ["remote"]);
extension_sql_file!("../sql/keyspaces.sql", name = "keyspaces", requires = ["key_classes"]);
extension_sql_file!("../sql/shards_check.sql", name = "shards_check", requires = ["keyspaces"]);
extension_sql_file!("../sql/shards.sql", name = "shards", requires = ["shards_check"]);
extension_sql_file!("../sql/preview.sql", name = "preview", requires = ["shards"]);
extension_sql_file!("../sql/map_parts.sql", name = "map_parts", requires = ["preview"]);
extension_sql_file!("../sql/shards_change.sql", name = "shards_change", requires = ["map_parts"]);
extension_sql_file!("../sql/pins.sql", name = "pins", requires = ["shards_change"]);
extension_sql_file!("../sql/ranges.sql", name = "ranges", requires = ["pins"]);
extension_sql_file!("../sql/tables_checks.sql", name = "tables_checks", requires = ["ranges"]);
extension_sql_file!("../sql/tables_ddl.sql", name = "tables_ddl", requires = ["tables_checks"]);
extension_sql_file!("../sql/tables_local.sql", name = "tables_local", requires = ["tables_ddl"]);
extension_sql_file!("../sql/tables.sql", name = "tables", requires = ["tables_local"]);
extension_sql_file!("../sql/tables_undo.sql", name = "tables_undo", requires = ["tables"]);
extension_sql_file!("../sql/tables_grants.sql", name = "tables_grants", requires = ["tables_undo"]);
extension_sql_file!("../sql/tables_drop.sql", name = "tables_drop", requires = ["tables_grants"]);
extension_sql_file!("../sql/tables_guard.sql", name = "tables_guard", requires = ["tables_drop"]);
extension_sql_file!("../sql/reference.sql", name = "reference", requires = ["tables_guard"]);
extension_sql_file!("../sql/reference_copies.sql", name = "reference_copies", requires = ["reference"]);
extension_sql_file!("../sql/reference_guard.sql", name = "reference_guard", requires = ["reference_copies"]);
extension_sql_file!("../sql/planning.sql", name = "planning", requires = ["reference_guard"]);
extension_sql_file!("../sql/export.sql", name = "export", requires = ["planning"]);
extension_sql_file!("../sql/views.sql", name = "views", requires = ["export"]);
extension_sql_file!("../sql/stats.sql", name = "stats", requires = ["views"]);
extension_sql_file!("../sql/transactions.sql", name = "transactions", requires = ["stats"]);
extension_sql_file!("../sql/replicas.sql", name = "replicas", requires = ["transactions"]);
extension_sql_file!("../sql/connections.sql", name = "connections", requires = ["replicas"]);
extension_sql_file!("../sql/reads.sql", name = "reads", requires = ["connections"]);
extension_sql_file!("../sql/shippable.sql", name = "shippable", requires = ["reads"]);
extension_sql_file!("../sql/lag.sql", name = "lag", requires = ["shippable"]);
extension_sql_file!("../sql/lag_objectives.sql", name = "lag_objectives", requires = ["lag"]);
extension_sql_file!("../sql/verify.sql", name = "verify", requires = ["lag_objectives"]);
extension_sql_file!("../sql/verify_shards.sql", name = "verify_shards", requires = ["verify"]);
extension_sql_file!("../sql/map_entries.sql", name = "map_entries", requires = ["verify_shards"]);
extension_sql_file!("../sql/verify_table.sql", name = "verify_table", requires = ["map_entries"]);
extension_sql_file!("../sql/coordinators.sql", name = "coordinators", requires = ["verify_table"]);
extension_sql_file!("../sql/audit.sql", name = "audit", requires = ["coordinators"]);
extension_sql_file!("../sql/audit_look.sql", name = "audit_look", requires = ["audit"]);
extension_sql_file!("../sql/audit_run.sql", name = "audit_run", requires = ["audit_look"]);
extension_sql_file!("../sql/audit_alerts.sql", name = "audit_alerts", requires = ["audit_run"]);
extension_sql_file!("../sql/audit_schedule.sql", name = "audit_schedule", requires = ["audit_alerts"]);
extension_sql_file!("../sql/audit_correct.sql", name = "audit_correct", requires = ["audit_schedule"]);
extension_sql_file!("../sql/audit_repair.sql", name = "audit_repair", requires = ["audit_correct"]);
extension_sql_file!("../sql/moves.sql", name = "moves", requires = ["audit_repair"]);
extension_sql_file!("../sql/move_parts.sql", name = "move_parts", requires = ["moves"]);
extension_sql_file!("../sql/moves_plan.sql", name = "moves_plan", requires = ["move_parts"]);
extension_sql_file!("../sql/moves_alone.sql", name = "moves_alone", requires = ["moves_plan"]);
extension_sql_file!("../sql/moves_floors.sql", name = "moves_floors", requires = ["moves_alone", "replicas"]);
extension_sql_file!("../sql/moves_rows.sql", name = "moves_rows", requires = ["moves_floors"]);
extension_sql_file!("../sql/moves_steps.sql", name = "moves_steps", requires = ["moves_rows"]);
extension_sql_file!("../sql/moves_pace.sql", name = "moves_pace", requires = ["moves_steps"]);
extension_sql_file!("../sql/moves_run.sql", name = "moves_run", requires = ["moves_pace"]);
extension_sql_file!("../sql/verification.sql", name = "verification", requires = ["moves_run"]);
extension_sql_file!("../sql/verify_move.sql", name = "verify_move", requires = ["verification"]);
extension_sql_file!("../sql/moves_back.sql", name = "moves_back", requires = ["verify_move"]);
extension_sql_file!("../sql/hot_cold.sql", name = "hot_cold", requires = ["moves_back"]);
extension_sql_file!("../sql/moves_checks.sql", name = "moves_checks", requires = ["hot_cold"]);
extension_sql_file!("../sql/rebalance.sql", name = "rebalance", requires = ["moves_checks"]);
extension_sql_file!("../sql/canary.sql", name = "canary", requires = ["rebalance"]);
extension_sql_file!("../sql/canary_run.sql", name = "canary_run", requires = ["canary"]);
extension_sql_file!("../sql/moves_logical.sql", name = "moves_logical", requires = ["canary_run"]);
extension_sql_file!("../sql/moves_logical_checks.sql", name = "moves_logical_checks", requires = ["moves_logical"]);

/// Called once by Postgres when the library is loaded: at server start if it is preloaded, else in the first session
/// that uses one of its functions.
#[pg_guard]
pub extern "C-unwind" fn _PG_init() {
    pg::init();
}

#[cfg(any(test, feature = "pg_test"))]
#[path = "../pgrx-tests/keys.rs"]
mod key_tests;
#[cfg(any(test, feature = "pg_test"))]
#[path = "../pgrx-tests/stats.rs"]
mod stats_tests;

/// How `cargo pgrx test` sets up its server.
#[cfg(test)]
pub mod pg_test {
    pub fn setup(_options: Vec<&str>) {}

    #[must_use]
    pub fn postgresql_conf_options() -> Vec<&'static str> {
        vec!["shared_preload_libraries = 'pg_shardmap'"]
    }
}

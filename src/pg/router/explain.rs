//! What EXPLAIN says about a routed statement.
//!
//! ANALYZE adds what it cost on the way. ANALYZE with VERBOSE adds the shard's plan, as a plain EXPLAIN there says it after
//! the statement has run: nothing is ever executed for the sake of its plan. What always holds: only an EXPLAIN statement
//! asks the shard; auto_explain, which may look at a statement that must not fail any more, never does.

use std::ffi::{CStr, CString};
use std::rc::Rc;

use pgrx::pg_sys;
use shardmap_core::route::Step;

use super::plan::{OneKey, Private};
use super::run::{plan_of, route_of, shard, table, Route};
use crate::pg::encoding;
use crate::pg::query::tree::{cast, items};
use crate::pg::raw::explain_text;
use crate::pg::reads::explain;
use crate::pg::remote::carried::Needs;
use crate::pg::remote::failure::Result;
use crate::pg::remote::guard;
use crate::pg::remote::portal::Request;
use crate::pg::remote::prepared::Statement;
use crate::pg::remote::traffic::Traffic;
use crate::pg::remote::wire::decode;

/// # Safety
/// Called by EXPLAIN.
pub unsafe extern "C-unwind" fn explain(
    node: *mut pg_sys::CustomScanState,
    _ancestors: *mut pg_sys::List,
    es: *mut pg_sys::ExplainState,
) {
    guard(|| {
        let Some(private) = Private::read((*plan_of(node)).custom_private) else { return Ok(()) };
        let Some(table) = table(&private) else { return Ok(()) };
        let is_known = !matches!(private.key, OneKey::Late) || !(*(*node).ss.ps.state).es_param_list_info.is_null();
        match is_known.then(|| shard(node, &private, &table)).transpose()?.flatten() {
            Some(shard) => {
                explain_text(es, c"Shard", &encoding::server(&table.keyspace.shard_name(shard)));
                let used = route_of(node).map(|route| &route.reader);
                if let Some(server) = table.servers.get(&shard) {
                    explain::server(*server, used, private.reads_only, es)?;
                }
            }
            None => explain_text(es, c"Shard", b"that of the key, known when the statement starts"),
        }
        explain_text(es, c"Routing", Step::Routed.describe().as_bytes());
        if (*es).verbose {
            explain_text(es, c"Remote SQL", &private.sql);
        }
        if (*es).analyze {
            analyzed(node, &private, es)?;
        }
        Ok(())
    });
}

/// What is known once it has run.
unsafe fn analyzed(node: *mut pg_sys::CustomScanState, private: &Private, es: *mut pg_sys::ExplainState) -> Result<()> {
    let Some(route) = route_of(node) else {
        Traffic::default().explain(es);
        return Ok(());
    };
    let planned = (*(*node).ss.ps.state).es_plannedstmt;
    if let (false, Some(portal)) = (private.written.is_empty(), &route.portal) {
        if !(*planned).hasReturning && (*planned).commandType != pg_sys::CmdType::CMD_SELECT {
            pg_sys::ExplainPropertyInteger(c"Rows Written".as_ptr(), std::ptr::null(), portal.affected() as i64, es);
        }
    }
    route.traffic().explain(es);
    if (*es).verbose && is_explained() && !route.alone {
        show_plan(&shards_plan(route, es)?, es);
    }
    Ok(())
}

/// Whether the client's statement is an EXPLAIN.
unsafe fn is_explained() -> bool {
    let portal = pg_sys::ActivePortal;
    !portal.is_null()
        && items::<pg_sys::PlannedStmt>((*portal).stmts)
            .any(|own| cast::<pg_sys::ExplainStmt>((*own).utilityStmt, pg_sys::NodeTag::T_ExplainStmt).is_some())
}

/// The plan that the shard has for the statement, without running it.
unsafe fn shards_plan(route: &Route, es: *mut pg_sys::ExplainState) -> Result<Vec<u8>> {
    let Some(portal) = &route.portal else { return Ok(Vec::new()) };
    let own = portal.request();
    let before: &[u8] = if (*es).costs { b"EXPLAIN " } else { b"EXPLAIN (COSTS OFF) " };
    let statement = Statement {
        sql: [before, &own.statement.sql].concat().into(),
        types: own.statement.types.clone(),
        formats: [0].into(),
        wanted: [pg_sys::InvalidOid].into(),
    };
    let portal = route.reader.connection.start(Request {
        statement: Rc::new(statement),
        params: own.params.clone(),
        chunk: 0,
        begin: true,
        writes: false,
        needs: Needs::Ours,
        commits: false,
    })?;
    let (mut lines, mut row) = (Vec::new(), Vec::new());
    while portal.next(&mut row)? {
        lines.push(decode::values(&row).next().flatten().unwrap_or_default().to_vec());
    }
    Ok(lines.join(&b'\n'))
}

/// Adds a plan to EXPLAIN's output: line by line in text, as one value in other formats.
unsafe fn show_plan(plan: &[u8], es: *mut pg_sys::ExplainState) {
    const LABEL: &CStr = c"Shard Plan";
    if (*es).format != pg_sys::ExplainFormat::EXPLAIN_FORMAT_TEXT {
        return explain_text(es, LABEL, plan);
    }
    explain_text(es, LABEL, b"");
    for line in plan.split(|byte| *byte == b'\n') {
        let line = CString::new(line).unwrap_or_default();
        pg_sys::appendStringInfoSpaces((*es).str_, (*es).indent * 2 + 2);
        pg_sys::appendStringInfoString((*es).str_, line.as_ptr());
        pg_sys::appendStringInfoChar((*es).str_, b'\n' as _);
    }
}

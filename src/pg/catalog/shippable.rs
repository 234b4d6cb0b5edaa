//! Functions, types and operators that are not built in, and that the shards know all the same.
//!
//! Decides by the marks of `shardmap.mark_shippable()` and by the option `extensions` of the shards' servers. What always
//! holds: what is not known to all shards of a keyspace is not known to it; what does not exist here is not known.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ffi::CStr;

use pgrx::pg_sys;

use super::Catalog;
use crate::pg::encoding;
use crate::pg::fdw::options;
use crate::pg::query::tree::items;
use crate::pg::transfer::FIRST_VARIABLE;

/// An object: the catalog that it is in, and its OID there.
type Object = (pg_sys::Oid, pg_sys::Oid);

/// What the shards know, besides what is built in.
#[derive(Default)]
pub struct Shippable {
    marked: HashSet<Object>,
    /// By keyspace: the extensions that all its servers list.
    extensions: HashMap<String, HashSet<pg_sys::Oid>>,
    /// The extension that an object belongs to, once looked up.
    members: RefCell<HashMap<Object, pg_sys::Oid>>,
}

/// What the shards of one keyspace know.
pub struct Known<'a> {
    all: &'a Shippable,
    extensions: Option<&'a HashSet<pg_sys::Oid>>,
}

impl Shippable {
    /// Takes up a mark, as the catalog spells it.
    pub fn mark(&mut self, kind: &str, name: &str, argument_types: &str) {
        let mut types = argument_types.lines();
        if !types.all(|name| find(pg_sys::to_regtype, name).is_some()) {
            return;
        }
        let functions = match kind {
            "function" => vec![find(pg_sys::to_regprocedure, name)],
            "operator" => {
                let operator = find(pg_sys::to_regoperator, name);
                self.marked.extend(operator.map(|operator| (pg_sys::OperatorRelationId, operator)));
                // SAFETY: a cache look-up.
                vec![operator.map(|operator| unsafe { pg_sys::get_opcode(operator) })]
            }
            _ => {
                let kind = find(pg_sys::to_regtype, name);
                self.marked.extend(kind.map(|kind| (pg_sys::TypeRelationId, kind)));
                kind.map_or_else(Vec::new, |kind| input_and_output(kind).map(Some).to_vec())
            }
        };
        self.marked.extend(functions.into_iter().flatten().map(|function| (pg_sys::ProcedureRelationId, function)));
    }

    /// Takes up the extensions that all of a keyspace's servers list.
    pub fn list(&mut self, keyspace: &str, servers: impl Iterator<Item = pg_sys::Oid>) {
        let common = servers.map(listed).reduce(|all, own| all.intersection(&own).copied().collect());
        self.extensions.insert(keyspace.to_owned(), common.unwrap_or_default());
    }
}

/// What `function` finds under a name, if there is such a thing.
fn find(function: unsafe fn(pg_sys::FunctionCallInfo) -> pg_sys::Datum, name: &str) -> Option<pg_sys::Oid> {
    let text = encoding::server(name).into_owned();
    // SAFETY: a built-in function that takes a text, and gives NULL if there is nothing of that name.
    unsafe { pgrx::direct_function_call(function, &[pgrx::IntoDatum::into_datum(text)]) }
}

/// A type's input and output functions.
fn input_and_output(kind: pg_sys::Oid) -> [pg_sys::Oid; 2] {
    let (mut input, mut output) = (pg_sys::InvalidOid, pg_sys::InvalidOid);
    let (mut parameter, mut is_varlena) = (pg_sys::InvalidOid, false);
    // SAFETY: cache look-ups of a type that exists.
    unsafe {
        pg_sys::getTypeInputInfo(kind, &mut input, &mut parameter);
        pg_sys::getTypeOutputInfo(kind, &mut output, &mut is_varlena);
    }
    [input, output]
}

/// The extensions that a foreign server lists, and that are here.
fn listed(server: pg_sys::Oid) -> HashSet<pg_sys::Oid> {
    // SAFETY: cache look-ups; the option's text is copied before it is taken apart.
    unsafe {
        let server = pg_sys::GetForeignServerExtended(server, pg_sys::FSV_MISSING_OK as _);
        let Some(text) = (!server.is_null()).then(|| options::find((*server).options, c"extensions")).flatten() else {
            return HashSet::new();
        };
        let mut names = std::ptr::null_mut();
        if !pg_sys::SplitIdentifierString(pg_sys::pstrdup(text), b',' as _, &mut names) {
            return HashSet::new();
        }
        items::<std::ffi::c_char>(names)
            .map(|name| pg_sys::get_extension_oid(CStr::from_ptr(name).as_ptr(), true))
            .filter(|extension| *extension != pg_sys::InvalidOid)
            .collect()
    }
}

/// The built-in type under a domain.
pub fn domain_base(kind: pg_sys::Oid) -> Option<pg_sys::Oid> {
    // SAFETY: a cache look-up.
    let base = unsafe { pg_sys::getBaseType(kind) };
    (base != kind && base.to_u32() < FIRST_VARIABLE).then_some(base)
}

impl Catalog {
    /// What the shards of keyspace `name` know.
    pub fn known(&self, name: &str) -> Known<'_> {
        Known { all: &self.shippable, extensions: self.shippable.extensions.get(name).filter(|own| !own.is_empty()) }
    }
}

impl Known<'_> {
    /// Whether a function that is not built in, or whose meaning depends on the session, is known all the same.
    pub fn function(&self, function: pg_sys::Oid) -> bool {
        self.holds((pg_sys::ProcedureRelationId, function))
    }

    pub fn operator(&self, operator: pg_sys::Oid) -> bool {
        operator.to_u32() < FIRST_VARIABLE || self.holds((pg_sys::OperatorRelationId, operator))
    }

    /// A type, or an array of it.
    pub fn kind(&self, kind: pg_sys::Oid) -> bool {
        if kind.to_u32() < FIRST_VARIABLE {
            return true;
        }
        // SAFETY: a cache look-up.
        let element = unsafe { pg_sys::get_element_type(kind) };
        let own = if element == pg_sys::InvalidOid { kind } else { element };
        own.to_u32() < FIRST_VARIABLE || self.holds((pg_sys::TypeRelationId, own))
    }

    /// A type whose values can come and go, though its name may be unknown there: also a domain over a built-in type.
    pub fn values(&self, kind: pg_sys::Oid) -> bool {
        self.kind(kind) || domain_base(kind).is_some()
    }

    fn holds(&self, object: Object) -> bool {
        if self.all.marked.contains(&object) {
            return true;
        }
        let Some(extensions) = self.extensions else { return false };
        if object.1.to_u32() < FIRST_VARIABLE {
            return false;
        }
        let mut members = self.all.members.borrow_mut();
        // SAFETY: a catalog look-up, inside a transaction.
        let look_up = || unsafe { pg_sys::getExtensionOfObject(object.0, object.1) };
        extensions.contains(members.entry(object).or_insert_with(look_up))
    }
}

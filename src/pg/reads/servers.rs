//! What is known of a shard's servers without asking.
//!
//! Observations come from the worker that samples all servers; what this session has heard itself counts until a newer one
//! is there. A replica that was waited for in vain is not asked again for a while. The list of replicas is read anew when
//! a foreign server or the table of replicas has changed; the callback only sets a flag.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pgrx::pg_sys::{self, Oid};
use shardmap_core::reads::choice::{observations_hold, Admission, Candidate, Heard};
use shardmap_core::reads::position::{Fork, Position};
use shardmap_core::reads::token::System;
use shardmap_core::replica::{Observation, Rotation, Standing, Unknown};

use crate::pg::clock::moment as now;
use crate::pg::encoding;
use crate::pg::fdw::scan::server_name;
use crate::pg::replicas::{registry, shared};

/// How long a replica is not asked after it was waited for in vain.
const IN_VAIN: Duration = Duration::from_millis(500);
/// How long a replica that was lost is not tried again.
const LOST_HOLDS: Duration = Duration::from_secs(1);

/// A registered replica.
struct Replica {
    server: Oid,
    weight: f64,
    zone: String,
    is_drained: bool,
}

/// The replicas by their shards' servers.
struct List {
    generation: u64,
    by_shard: HashMap<Oid, Rc<[Replica]>>,
}

/// A server of a shard, and what is known of it.
pub struct Server {
    oid: Oid,
    is_primary: bool,
    weight: f64,
    zone: String,
    admission: Admission,
    heard: Option<Heard>,
    may_ask: bool,
}

thread_local! {
    static LIST: RefCell<Option<List>> = const { RefCell::new(None) };
    /// The table of replicas has changed since the list was read.
    static IS_STALE: Cell<bool> = const { Cell::new(false) };
    /// That table.
    static TABLE: Cell<Oid> = const { Cell::new(pg_sys::InvalidOid) };
    /// What was heard, and when.
    static HEARD: RefCell<HashMap<Oid, (Instant, Heard)>> = RefCell::default();
    static LOST: RefCell<HashMap<Oid, Instant>> = RefCell::default();
    static ASKED_IN_VAIN: RefCell<HashMap<Oid, Instant>> = RefCell::default();
}

impl Server {
    pub fn candidate(&self) -> Candidate<'_> {
        Candidate {
            server: self.oid.to_u32(),
            is_primary: self.is_primary,
            weight: self.weight,
            zone: &self.zone,
            admission: self.admission,
            heard: self.heard,
            may_ask: self.may_ask,
        }
    }
}

/// Registers the callback. Once per process.
pub fn init() {
    // SAFETY: the callback has the declared type and stays loaded for the life of the process.
    unsafe { pg_sys::CacheRegisterRelcacheCallback(Some(on_relation), pg_sys::Datum::from(0)) }
}

unsafe extern "C-unwind" fn on_relation(_: pg_sys::Datum, relation: Oid) {
    if relation == pg_sys::InvalidOid || relation == TABLE.get() {
        IS_STALE.set(true);
    }
}

/// The name of a foreign server. Inside a transaction.
pub fn name(server: Oid) -> String {
    // SAFETY: a system cache look-up.
    unsafe { server_name(server) }.unwrap_or_default()
}

/// Whether there is a foreign server of that number. Inside a transaction.
pub fn exists(server: Oid) -> bool {
    let cache = pg_sys::SysCacheIdentifier::FOREIGNSERVEROID as i32;
    // SAFETY: a system cache look-up.
    unsafe { pg_sys::SearchSysCacheExists(cache, server.into(), 0.into(), 0.into(), 0.into()) }
}

/// How old an observation may be.
pub fn heard_within() -> Duration {
    observations_hold(crate::pg::replicas::settings::interval())
}

/// The shard's servers, its primary first.
pub fn of(shard: Oid) -> Vec<Server> {
    let primary = Server {
        oid: shard,
        is_primary: true,
        weight: 1.0,
        zone: String::new(),
        admission: Admission::All,
        heard: heard_of(shard, shared::observation(shard)),
        may_ask: true,
    };
    let replica = |replica: &Replica| {
        let observation = shared::observation(replica.server);
        Server {
            oid: replica.server,
            is_primary: false,
            weight: replica.weight,
            zone: replica.zone.clone(),
            admission: match observation.map(|observation| observation.rotation) {
                _ if replica.is_drained => Admission::None,
                Some(Rotation::Out | Rotation::Drained) => Admission::None,
                Some(Rotation::OutOfReadYourWrites) => Admission::WithoutToken,
                Some(Rotation::In) | None => Admission::All,
            },
            heard: heard_of(replica.server, observation),
            may_ask: !was_asked_in_vain(replica.server),
        }
    };
    std::iter::once(primary).chain(replicas(shard).iter().map(replica)).collect()
}

/// The shard's replicas, promoted ones too, of which anything is known.
pub fn replicas_heard(shard: Oid) -> Vec<(Oid, Heard)> {
    let replicas = replicas(shard);
    replicas.iter().filter_map(|replica| Some((replica.server, heard(replica.server)?))).collect()
}

/// Whether any replica of the shard is registered.
pub fn has_replicas(shard: Oid) -> bool {
    !replicas(shard).is_empty()
}

/// The newest that is known of a server.
pub fn heard(server: Oid) -> Option<Heard> {
    heard_of(server, shared::observation(server))
}

/// The newest that is known of a server, by what the sampler has heard or this session.
fn heard_of(server: Oid, sampled: Option<Observation>) -> Option<Heard> {
    let age = sampled.map(|observation| now().since(observation.taken_at));
    let own = HEARD.with_borrow(|heard| heard.get(&server).map(|(when, heard)| (when.elapsed(), *heard)));
    let sampled = sampled.zip(age).map(|(observation, age)| (age, of_observation(&observation, age)));
    match (own, sampled) {
        (Some((own_age, own)), Some((age, sampled))) if own_age < age => {
            // An answer tells of the position; how that lags, the worker has known.
            let lag = sampled.and_then(|sampled| sampled.lag).map(|lag| lag + (age - own_age));
            Some(Heard { lag, age: own_age, ..own })
        }
        (_, Some((_, sampled))) => sampled,
        (Some((age, own)), None) => Some(Heard { age, ..own }),
        (None, None) => None,
    }
}

/// Whether a server was asked in vain when it was last asked.
pub fn is_silent(server: Oid) -> bool {
    shared::observation(server).is_some_and(|observation| {
        matches!(observation.standing, Standing::Unknown(Unknown::Unreachable | Unknown::NoAnswer))
    })
}

/// `None`: it has not answered, or not said enough.
fn of_observation(observation: &Observation, age: Duration) -> Option<Heard> {
    let position = Position { timeline: observation.timeline?, lsn: observation.replayed? };
    let is_valid = !matches!(observation.standing, Standing::Invalid(_));
    Some(Heard {
        system: System::of(observation.system?.0),
        position,
        in_recovery: is_valid && observation.in_recovery?,
        lag: match observation.standing {
            Standing::Replica { lag } => Some(lag),
            _ => None,
        },
        round_trip: observation.round_trip,
        age,
    })
}

/// The forks of a log that are known of this shard.
pub fn forks(shard: Oid, system: System) -> Vec<Fork> {
    let forks = shared::forks(shard).filter(|forks| System::of(forks.system.0) == system);
    forks.map(|forks| forks.list().to_vec()).unwrap_or_default()
}

/// Notes what a server has said.
pub fn note_heard(server: Oid, heard: Heard) {
    HEARD.with_borrow_mut(|all| all.insert(server, (Instant::now(), heard)));
}

/// Notes that a replica was lost.
pub fn note_lost(server: Oid) {
    LOST.with_borrow_mut(|all| all.insert(server, Instant::now()));
}

/// The replicas that were lost lately.
pub fn lost_lately() -> Vec<u32> {
    LOST.with_borrow_mut(|all| {
        all.retain(|_, when| when.elapsed() < LOST_HOLDS);
        all.keys().map(|server| server.to_u32()).collect()
    })
}

/// Notes that a replica was waited for in vain.
pub fn note_in_vain(server: Oid) {
    ASKED_IN_VAIN.with_borrow_mut(|all| all.insert(server, Instant::now()));
}

fn was_asked_in_vain(server: Oid) -> bool {
    ASKED_IN_VAIN.with_borrow(|all| all.get(&server).is_some_and(|when| when.elapsed() < IN_VAIN))
}

/// The shard's replicas.
fn replicas(shard: Oid) -> Rc<[Replica]> {
    let generation = crate::pg::remote::generation();
    let known = LIST.with_borrow(|list| {
        let current = |list: &&List| list.generation == generation && !IS_STALE.get();
        list.as_ref().filter(current).map(|list| list.by_shard.get(&shard).cloned())
    });
    let found = known.unwrap_or_else(|| {
        // What changes while the list is read makes it stale again.
        IS_STALE.set(false);
        let by_shard = read_list();
        let found = by_shard.get(&shard).cloned();
        LIST.set(Some(List { generation, by_shard }));
        found
    });
    found.unwrap_or_else(|| Rc::new([]))
}

fn read_list() -> HashMap<Oid, Rc<[Replica]>> {
    let mut by_shard: HashMap<Oid, Vec<Replica>> = HashMap::new();
    TABLE.set(registry::table(c"replica").unwrap_or(pg_sys::InvalidOid));
    let server = |name: &str| {
        let name = encoding::server_string(name);
        // SAFETY: a system cache look-up, inside a transaction.
        unsafe { pg_sys::get_foreign_server_oid(name.as_ptr(), true) }
    };
    for replica in registry::all() {
        let (shard, own) = (server(&replica.shard), server(&replica.name));
        if shard != pg_sys::InvalidOid && own != pg_sys::InvalidOid {
            by_shard.entry(shard).or_default().push(Replica {
                server: own,
                weight: replica.weight,
                zone: replica.zone,
                is_drained: replica.drained,
            });
        }
    }
    by_shard.into_iter().map(|(shard, replicas)| (shard, replicas.into())).collect()
}

/// A random number; not for secrets.
pub fn chance() -> u64 {
    // SAFETY: this process' own generator, which Postgres has seeded.
    unsafe { pg_sys::pg_prng_uint64(std::ptr::addr_of_mut!(pg_sys::pg_global_prng_state)) }
}

//! From which server a statement reads of one shard.
//!
//! Decides whether the transaction may use replicas at all, what a read must not miss, and whom to ask when that is not
//! known. What always holds: under REPEATABLE READ a shard is read from one server until the transaction ends, and from a
//! replica only if the transaction can never write; where an answer fails or comes too late, the primary answers.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pgrx::pg_sys::{self, Oid};
use pgrx::PgSqlErrorCode;
use shardmap_core::reads::choice::{choose, wanted, Decision, Floor, Heard, Preference, Reason, Verdict, Want, Why};
use shardmap_core::reads::position::{Fork, Position, Timeline};
use shardmap_core::reads::token::{Mark, ReadToken, ShardPrint};

use super::session::{self, Note, Track, PRIMARY};
use super::settings::{self, Consistency, CONSISTENCY, READ_PREFERENCE, STICKY_READS};
use super::{ask, fence, servers, snapshot};
use crate::pg::catalog;
use crate::pg::query::tree::{items, tag};
use crate::pg::remote::transaction::give_up;
use crate::pg::remote::{any_wrote, generation, Connection, Failure, Result};

/// What a read wants of one shard.
pub struct Demand {
    pub preference: Preference,
    pub max_lag: Option<Duration>,
    pub token: Option<Rc<ReadToken>>,
    pub session: bool,
}

impl Demand {
    /// That of the settings.
    pub fn of_settings() -> Result<Self> {
        let consistency = CONSISTENCY.get();
        let token = match consistency {
            Consistency::Eventual => None,
            Consistency::Session | Consistency::Token => settings::read_token()?,
        };
        Ok(Self {
            preference: READ_PREFERENCE.get().into(),
            max_lag: settings::max_lag(),
            token,
            session: consistency == Consistency::Session,
        })
    }
}

/// The server that answers.
pub struct Chosen {
    pub server: Oid,
    pub is_replica: bool,
    pub connection: Connection,
    pub reason: &'static str,
    pub waited: Duration,
    /// The replica that was waited for in vain.
    pub in_vain: Option<Oid>,
    /// Replicas that were tried and did not answer.
    pub lost: Vec<Oid>,
    /// It is the primary, for want of a replica.
    pub is_fallback: bool,
    pub considered: Vec<(u32, Verdict)>,
}

/// Whether reads may go to replicas, as far as the settings say.
pub fn is_on() -> bool {
    READ_PREFERENCE.get() != settings::ReadPreference::Primary
}

/// Why the transaction may not read from replicas, if it may not.
pub fn obstacle() -> Option<&'static str> {
    // SAFETY: reads variables of the transaction; a portal's statements are planned when it runs.
    unsafe {
        if any_wrote() || pg_sys::GetTopTransactionIdIfAny() != pg_sys::InvalidTransactionId {
            return Some("the transaction has written");
        }
        match pg_sys::XactIsoLevel as u32 {
            pg_sys::XACT_SERIALIZABLE => return Some("the transaction is SERIALIZABLE"),
            pg_sys::XACT_REPEATABLE_READ if !pg_sys::XactReadOnly => {
                return Some("the transaction is REPEATABLE READ and may write");
            }
            _ => {}
        }
        let portal = pg_sys::ActivePortal;
        let writes = |planned: *mut pg_sys::PlannedStmt| {
            let reads = [pg_sys::CmdType::CMD_SELECT, pg_sys::CmdType::CMD_UTILITY];
            !reads.contains(&(*planned).commandType) || (*planned).hasModifyingCTE
        };
        let makes_table = |planned: *mut pg_sys::PlannedStmt| {
            let makers = [pg_sys::NodeTag::T_CreateTableAsStmt, pg_sys::NodeTag::T_RefreshMatViewStmt];
            makers.contains(&tag((*planned).utilityStmt))
        };
        let statements = || items::<pg_sys::PlannedStmt>((*portal).stmts);
        if !portal.is_null() && (statements().any(writes) || statements().any(makes_table)) {
            return Some("the statement writes");
        }
    }
    None
}

/// Picks the server for a read of `shard` as `user`, and connects. Asks servers where it must.
///
/// # Errors
/// 22023: the token is none. 25001: it came after the snapshot. 55000: only replicas are wanted and none will do; or the primary is a former one. Those of
/// connecting to the primary.
pub fn pick(shard: Oid, user: Oid, demand: &Demand) -> Result<Chosen> {
    let mut lost = Vec::new();
    let is_first = session::pinned(shard).is_none();
    let mut chosen = pick_leaving(shard, user, demand, &mut lost)?;
    if is_first && is_repeatable() {
        snapshot::note(shard, chosen.server, demand);
    }
    chosen.lost.append(&mut lost);
    Ok(chosen)
}

/// As [`pick`]; `lost` gets the replicas that could not be connected to.
fn pick_leaving(shard: Oid, user: Oid, demand: &Demand, lost: &mut Vec<Oid>) -> Result<Chosen> {
    let pinned = session::pinned(shard);
    if let Some(server) = pinned.filter(|server| *server == shard || is_repeatable()) {
        snapshot::check(shard, demand)?;
        return Chosen::new(shard, server, user, SAME);
    }
    let wrote_at = session::look(shard, |past| past.wrote_at).flatten();
    if wrote_at.is_some_and(|wrote| wrote.elapsed() < settings::primary_after_write()) {
        return Chosen::new(shard, shard, user, "the session has just written there");
    }
    let mut is_resolved = false;
    loop {
        let decision = decide(shard, demand);
        if demand.session && !is_resolved && is_left_behind(shard, &decision) {
            catch_up_with_session(shard, user)?;
            is_resolved = true;
            continue;
        }
        let Some(server) = decision.server.map(Oid::from) else { return Err(none(shard, &decision.considered)) };
        if server == shard {
            let reason = decision.reason.describe();
            return to_primary(shard, user, demand, decision, reason);
        }
        let Ok(chosen) = Chosen::new(shard, server, user, decision.reason.describe()) else {
            servers::note_lost(server);
            lost.push(server);
            continue;
        };
        if demand.session && is_to_be_resolved(shard, &chosen) {
            catch_up_with_session(shard, user)?;
            // What was not known a moment ago may ask for another server.
            continue;
        }
        return settle(shard, user, demand, decision, chosen);
    }
}

/// Finds out what the session must not miss, of which only the server is known.
fn catch_up_with_session(shard: Oid, user: Oid) -> Result<()> {
    resolve(&[shard], user, &[Which::Written, Which::Seen]).map_err(|failure| {
        let class = failure.code.text();
        match class.starts_with("08") || class.starts_with("57P") {
            true => failure.hint(
                "The session has used this shard's primary, or a replica that is lost; how far that was only the primary can \
                 tell, and a replica might show less. Bring the primary back, or promote a replica; or SET shardmap.consistency = \
                 'eventual', or 'token' with shardmap.read_token for what must not be missed.",
            ),
            false => failure,
        }
    })
}

fn to_primary(shard: Oid, user: Oid, demand: &Demand, decision: Decision, reason: &'static str) -> Result<Chosen> {
    let mut chosen = Chosen::new(shard, shard, user, reason)?;
    chosen.is_fallback = demand.preference != Preference::Primary && decision.reason != Reason::Nearest;
    if let Some(token) = needed(shard, demand) {
        let is_fine = |(system, timeline)| system == token.system && timeline >= token.position.timeline;
        let is_old = token.position.timeline > fence::FIRST
            && !fence::known(&chosen.connection, shard, user).is_some_and(is_fine);
        if decision.doubtful || is_old {
            chosen.connection = check_primary(chosen.connection, shard, user, token)?;
        }
    }
    chosen.considered = decision.considered;
    Ok(chosen)
}

const SILENT: &str =
    "the session has used it, and while it does not answer replicas may show less (shardmap.consistency)";
/// Why a statement may not use replicas.
pub const NOT_ONLY_READ: &str = "the statement writes, locks rows or calls volatile functions";
const SAME: &str = "the server that the transaction has read from";

fn is_repeatable() -> bool {
    // SAFETY: reads a variable of the transaction.
    unsafe { pg_sys::XactIsoLevel as u32 == pg_sys::XACT_REPEATABLE_READ }
}

/// What is decided without asking anybody.
pub fn decide(shard: Oid, demand: &Demand) -> Decision {
    let known = servers::of(shard);
    let candidates: Vec<_> = known.iter().map(servers::Server::candidate).collect();
    let zone = settings::zone();
    let last = || session::look(shard, |past| past.last).flatten().filter(|_| STICKY_READS.get());
    let last = session::pinned(shard).or_else(last);
    let token = needed(shard, demand);
    let mut heard = candidates.iter().filter_map(|candidate| candidate.heard);
    let forks =
        forks(shard, token.filter(|token| heard.any(|heard| heard.position.timeline > token.position.timeline)));
    let want = Want {
        preference: demand.preference,
        heard_within: servers::heard_within(),
        max_lag: demand.max_lag,
        token,
        floor: floor(shard),
        last: last.map(Oid::to_u32),
        lost: &servers::lost_lately(),
        zone: &zone,
        may_ask: !settings::catchup_timeout().is_zero(),
    };
    choose(&candidates, &want, &forks, [servers::chance(), servers::chance()])
}

/// What the shard's replicas must have replayed, whoever reads.
fn floor(shard: Oid) -> Option<Floor> {
    catalog::current().and_then(|catalog| catalog.floors.get(&shard).copied())
}

/// The forks of the token's log. They matter only to a server on a later timeline than the token's.
fn forks(shard: Oid, token: Option<Mark>) -> Vec<Fork> {
    token.map_or_else(Vec::new, |token| servers::forks(shard, token.system))
}

/// What the read must not miss, as far as its position is known.
fn needed(shard: Oid, demand: &Demand) -> Option<Mark> {
    let token = demand.token.as_ref().and_then(|token| token.mark(print(shard)));
    let of_session = || {
        let known = session::look(shard, |past| [past.written.mark, past.seen.mark]).unwrap_or_default();
        known.into_iter().chain([session::observed_mark(|| print(shard))])
    };
    let marks = demand.session.then(of_session).into_iter().flatten().chain([token]);
    marks.flatten().reduce(Mark::merge)
}

thread_local! {
    /// By the shard's server: the generation of the catalog, and how tokens name the shard.
    static PRINTS: RefCell<HashMap<Oid, (u64, ShardPrint)>> = RefCell::default();
}

/// A shard as tokens name it.
pub fn print(shard: Oid) -> ShardPrint {
    let generation = generation();
    let known = PRINTS.with_borrow(|prints| prints.get(&shard).copied());
    if let Some((_, print)) = known.filter(|(own, _)| *own == generation) {
        return print;
    }
    let print = ShardPrint::of(&servers::name(shard));
    PRINTS.with_borrow_mut(|prints| prints.insert(shard, (generation, print)));
    print
}

/// Whether the session knows of an older timeline only, and has used the shard since: where that is now may be on a newer
/// one, which replicas have.
fn is_left_behind(shard: Oid, decision: &Decision) -> bool {
    let is_newer = |(_, verdict): &(u32, Verdict)| *verdict == Verdict::Not(Why::NewerTimeline);
    let has_notes = |past: &session::Past| !past.seen.pending.is_empty() || !past.written.pending.is_empty();
    session::look(shard, has_notes).unwrap_or(false) && decision.considered.iter().any(is_newer)
}

/// Whether the session has written or seen something of which only the primary knows where it is.
fn has_used_primary(shard: Oid) -> bool {
    let has_used =
        |past: &session::Past| past.seen.pending.iter().chain(&past.written.pending).any(|note| note.link == PRIMARY);
    session::look(shard, has_used).unwrap_or(false)
}

/// Whether something was written or seen of which only the server is known, another one than the chosen one.
fn is_to_be_resolved(shard: Oid, chosen: &Chosen) -> bool {
    let is_elsewhere = |past: &session::Past| {
        past.seen.pending.iter().any(|note| !note.is_on(&chosen.connection)) || !past.written.pending.is_empty()
    };
    session::look(shard, is_elsewhere).unwrap_or(false)
}

/// Waits for the replica decided on if it is to be asked.
fn settle(shard: Oid, user: Oid, demand: &Demand, decision: Decision, mut chosen: Chosen) -> Result<Chosen> {
    let Some(wanted) = decision.ask.or_else(|| is_new(&chosen).then(|| to_be_shown(shard, demand, &chosen)).flatten())
    else {
        chosen.considered = decision.considered;
        return Ok(chosen);
    };
    let since = Instant::now();
    let known = servers::heard(chosen.server).map_or(Timeline(0), |heard| heard.position.timeline);
    let forks = forks(shard, needed(shard, demand));
    let heard = ask::wait_for(&chosen.connection, wanted, known, &forks, settings::catchup_timeout());
    chosen.waited = since.elapsed();
    match heard {
        Ok(Some(heard)) => {
            servers::note_heard(chosen.server, heard);
            chosen.considered = decision.considered;
            return Ok(chosen);
        }
        Ok(None) => {
            servers::note_in_vain(chosen.server);
            chosen.in_vain = Some(chosen.server);
        }
        Err(_) => {
            give_up(chosen.connection.link());
            servers::note_lost(chosen.server);
            chosen.lost.push(chosen.server);
        }
    }
    if demand.preference == Preference::Replica {
        return Err(none(shard, &decision.considered));
    }
    let primary = to_primary(shard, user, demand, decision, "no replica has caught up in time")?;
    Ok(Chosen { waited: chosen.waited, in_vain: chosen.in_vain, lost: chosen.lost, is_fallback: true, ..primary })
}

/// Whether the connection was made after the server was last heard of: it may have been restarted since, and be behind what
/// it had replayed then. A pooler would not let us know.
fn is_new(chosen: &Chosen) -> bool {
    let is_pooled = !chosen.connection.link().target.pooler.keeps_session();
    is_pooled
        || servers::heard(chosen.server).is_none_or(|heard| chosen.connection.link().made_at.elapsed() <= heard.age)
}

/// What a server has to show before it is trusted, if anything depends on how far it is.
fn to_be_shown(shard: Oid, demand: &Demand, chosen: &Chosen) -> Option<Position> {
    let token = needed(shard, demand).map(|token| token.position);
    let Some(heard) = servers::heard(chosen.server) else { return token };
    wanted(floor(shard), token, &heard).or_else(|| demand.max_lag.map(|_| heard.position))
}

/// Makes sure that a primary which may be on an older timeline than the token is not a former one; the connection to be used.
fn check_primary(primary: Connection, shard: Oid, user: Oid, token: Mark) -> Result<Connection> {
    let has_it = |heard: Heard| {
        heard.system == token.system && heard.position.timeline >= token.position.timeline && !heard.in_recovery
    };
    let (connection, heard) = fence::ask_again(primary, shard, user, has_it)?;
    if has_it(heard) {
        return Ok(connection);
    }
    let name = servers::name(shard);
    Err(Failure::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("shard \"{name}\" does not have what the read must not miss"),
    )
    .detail(format!("Its server is at {}, the token at {}.", heard.position, token.position))
    .hint(
        "The server may be a former primary, or the shard was made anew since the token was given. Look where the \
         shard's foreign server leads; or read without the token.",
    ))
}

fn none(shard: Oid, considered: &[(u32, Verdict)]) -> Failure {
    let found: Vec<_> = considered
        .iter()
        .filter(|(server, _)| *server != shard.to_u32())
        .map(|(server, verdict)| format!("\"{}\": {}", servers::name(Oid::from(*server)), describe(*verdict)))
        .collect();
    let detail = if found.is_empty() { "It has no replicas.".to_owned() } else { format!("{}.", found.join("; ")) };
    Failure::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("no replica of shard \"{}\" can answer this read", servers::name(shard)),
    )
    .detail(detail)
    .hint("SET shardmap.read_preference = 'prefer_replica' lets the primary answer then.")
}

/// A verdict in a few words.
pub fn describe(verdict: Verdict) -> String {
    match verdict {
        Verdict::Serves => "would do".to_owned(),
        Verdict::Asked(_) => "had not replayed up to the token, or the last move, when last heard of".to_owned(),
        Verdict::Not(why) => why.to_string(),
    }
}

impl Chosen {
    fn new(shard: Oid, server: Oid, user: Oid, reason: &'static str) -> Result<Self> {
        let is_replica = server != shard;
        let connection = match is_replica {
            true => ask::open(server, user, true)?,
            false => fence::primary(shard, user)?,
        };
        let (waited, considered) = (Duration::ZERO, Vec::new());
        let (in_vain, lost, is_fallback) = (None, Vec::new(), false);
        Ok(Self { server, is_replica, connection, reason, waited, in_vain, lost, is_fallback, considered })
    }
}

/// The two things that a session's past is made of.
#[derive(Clone, Copy, PartialEq)]
pub enum Which {
    Written,
    Seen,
}

impl Which {
    pub fn of(self, past: &mut session::Past) -> &mut Track {
        match self {
            Self::Written => &mut past.written,
            Self::Seen => &mut past.seen,
        }
    }
}

/// Finds the positions of what was written or seen on these shards and is known by its server only. A replica that cannot
/// tell any more is stood for by its primary, which is at least as far.
pub fn resolve(shards: &[Oid], user: Oid, which: &[Which]) -> Result<()> {
    let mut wanted: Vec<(Oid, Note)> = Vec::new();
    for shard in shards {
        let mut past = session::past(*shard);
        for which in which {
            for note in &which.of(&mut past).pending {
                let note = if can_tell(*shard, user, *note) { *note } else { Note { server: *shard, link: PRIMARY } };
                if !wanted.contains(&(*shard, note)) {
                    wanted.push((*shard, note));
                }
            }
        }
    }
    let asked: Vec<_> = wanted.iter().map(|(shard, note)| (note.server, *shard != note.server)).collect();
    let answers = ask::positions(&asked, user);
    let mut marks: HashMap<Oid, Vec<Mark>> = HashMap::new();
    for ((shard, note), answer) in wanted.into_iter().zip(answers) {
        let is_replica = note.server != shard;
        let heard = match answer {
            // A replica that was promoted meanwhile, or is lost.
            Ok(heard) if is_replica && !heard.in_recovery => ask::position(&ask::open(shard, user, false)?)?,
            Err(_) if is_replica => ask::position(&ask::open(shard, user, false)?)?,
            answer => answer?,
        };
        marks.entry(shard).or_default().push(Mark { system: heard.system, position: heard.position });
    }
    for (shard, marks) in marks {
        session::with(shard, |past| {
            for which in which {
                let track = which.of(past);
                if !std::mem::take(&mut track.pending).is_empty() {
                    marks.iter().for_each(|mark| track.raise(*mark));
                }
            }
        });
    }
    Ok(())
}

/// Whether the server of a note still stands for it: the primary, or the same connection to a replica.
fn can_tell(shard: Oid, user: Oid, note: Note) -> bool {
    note.server == shard || ask::open(note.server, user, true).is_ok_and(|connection| note.is_on(&connection))
}

/// For EXPLAIN: the server that a statement would use now, as far as is known without asking, and why.
pub fn expected(shard: Oid, may_use_replica: bool) -> Result<(Oid, String)> {
    let to_primary = |why: &str| Ok((shard, why.to_owned()));
    if !may_use_replica {
        return to_primary(NOT_ONLY_READ);
    }
    if let Some(obstacle) = obstacle() {
        return to_primary(obstacle);
    }
    let demand = Demand::of_settings()?;
    let decision = decide(shard, &demand);
    let is_replica = decision.server.is_some_and(|server| Oid::from(server) != shard);
    if demand.session && is_replica && has_used_primary(shard) && servers::is_silent(shard) {
        return to_primary(SILENT);
    }
    Ok((decision.server.map_or(shard, Oid::from), decision.reason.describe().to_owned()))
}

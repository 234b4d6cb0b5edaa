//! Which of a shard's servers answers a read.
//!
//! Decides from what was last heard of each, without asking anybody. What always holds: a position that was heard of is a
//! lower bound, so a replica past the token serves without a question; one that is behind it may have caught up, and is
//! asked before it serves; what is too old, unknown or not valid serves nothing that has a bound. The primary is the way
//! out, unless only replicas are wanted. Each candidate gets a verdict, for those who want to know why.

use std::fmt;
use std::time::Duration;

use super::position::{holds, Fork, Holds, Position};
use super::token::{Mark, System};

/// How long an observation says something about lag, and about who is the primary, at least.
pub const OBSERVATIONS_HOLD: Duration = Duration::from_secs(10);

/// How long observations hold that are made once in `interval`: until three are missing.
#[must_use]
pub fn observations_hold(interval: Duration) -> Duration {
    OBSERVATIONS_HOLD.max(interval * 3)
}
/// Round trips that differ by less are equal.
const NEAR: Duration = Duration::from_micros(200);

/// Which servers the reader would like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preference {
    /// The primary alone.
    Primary,
    /// A replica that will do, else the primary.
    PreferReplica,
    /// A replica, else none.
    Replica,
    /// Whichever is nearest, the primary included.
    Nearest,
}

/// Whether a replica gets reads at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admission {
    /// All reads.
    #[default]
    All,
    /// Only those without a token: its lag has been too bad lately.
    WithoutToken,
    /// None: it is drained, or its lag is bad for long.
    None,
}

/// What was last heard of a server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heard {
    /// Whose log it replays, or writes.
    pub system: System,
    /// Up to where it had replayed, or written.
    pub position: Position,
    /// It was replaying the shard's log.
    pub in_recovery: bool,
    /// How far behind it was in time; `None`: unknown.
    pub lag: Option<Duration>,
    /// How long its answer took.
    pub round_trip: Option<Duration>,
    /// How long ago that was.
    pub age: Duration,
}

/// What all replicas of a shard must have replayed, whoever reads: a move has brought rows there, or taken some away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Floor {
    /// Whose log; `None`: not known.
    pub system: Option<System>,
    /// Where in it.
    pub position: Position,
}

/// The position from which on a server shows what is above the floor and what a token at `token` stands for; `None`:
/// anywhere. A shard that was made anew since has no floor. After a failover, who is as far in the log has what his
/// primary has kept of the floor: more there is not.
#[must_use]
pub fn wanted(floor: Option<Floor>, token: Option<Position>, heard: &Heard) -> Option<Position> {
    let floor = floor.filter(|floor| floor.system.is_none_or(|system| system == heard.system));
    let Some(Floor { position: floor, .. }) = floor else { return token };
    Some(match token {
        Some(token) => Position { timeline: floor.timeline.max(token.timeline), lsn: floor.lsn.max(token.lsn) },
        None => Position { timeline: floor.timeline.max(heard.position.timeline), lsn: floor.lsn },
    })
}

/// A server that might answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate<'a> {
    /// Names it in the decision.
    pub server: u32,
    /// It is the shard's primary.
    pub is_primary: bool,
    /// Its share of the reads; 0: none.
    pub weight: f64,
    /// Where it stands.
    pub zone: &'a str,
    /// Whether it gets reads.
    pub admission: Admission,
    /// `None`: nothing, or no answer when it was last asked.
    pub heard: Option<Heard>,
    /// Whether it may be asked how far it is.
    pub may_ask: bool,
}

/// What the reader wants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Want<'a> {
    /// Which servers.
    pub preference: Preference,
    /// How old an observation may be; see [`observations_hold`].
    pub heard_within: Duration,
    /// How far behind at most; `None`: no matter.
    pub max_lag: Option<Duration>,
    /// What it must not read behind.
    pub token: Option<Mark>,
    /// What no replica may be behind.
    pub floor: Option<Floor>,
    /// The server that answered last, to be stayed with.
    pub last: Option<u32>,
    /// Servers not to be tried again.
    pub lost: &'a [u32],
    /// Where the reader stands; empty: nowhere.
    pub zone: &'a str,
    /// Whether servers may be asked, and waited for.
    pub may_ask: bool,
}

/// Why a server does not serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The preference leaves it out.
    NotWanted,
    /// It has just failed.
    Lost,
    /// Nothing recent is known of it.
    Unknown,
    /// It is no replica of this primary: another system, or not in recovery.
    Invalid,
    /// It is taken out of rotation, has weight 0, or has it for reads without a token only.
    Out,
    /// It is further behind in time than allowed.
    Lag,
    /// It has not replayed what the token stands for, as far as is known, and may not be asked.
    Behind,
    /// It has not replayed the last move from or to its shard, and may not be asked.
    BehindMove,
    /// It is on an older timeline than the token.
    OlderTimeline,
    /// It is on a newer timeline, which may lack what the token stands for.
    NewerTimeline,
    /// The token is of another system than the shard's.
    OtherSystem,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotWanted => "not wanted by the read preference",
            Self::Lost => "has just failed",
            Self::Unknown => "not heard of lately",
            Self::Invalid => "is not a replica of this primary",
            Self::Out => "out of rotation",
            Self::Lag => "lags more than allowed",
            Self::Behind => "has not replayed up to the token",
            Self::BehindMove => "has not replayed the last move from or to its shard",
            Self::OlderTimeline => "on an older timeline than the token",
            Self::NewerTimeline => "on a newer timeline, which may lack what the token stands for",
            Self::OtherSystem => "the token is of another system",
        })
    }
}

/// What was found about a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may serve as it is.
    Serves,
    /// It may serve once it has replayed up to here.
    Asked(Position),
    /// It may not.
    Not(Why),
}

/// Why the chosen server was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Reads go to primaries.
    PrimaryWanted,
    /// The same as last time.
    Sticky,
    /// A replica that is fresh enough.
    Fresh,
    /// A replica that is to be asked whether it is.
    ToBeAsked,
    /// The nearest.
    Nearest,
    /// No replica will do.
    NoReplica,
}

impl Reason {
    /// In a few words.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            Self::PrimaryWanted => "reads go to the primary",
            Self::Sticky => "the replica that answered last",
            Self::Fresh => "a replica that is fresh enough",
            Self::ToBeAsked => "a replica that has caught up",
            Self::Nearest => "the nearest server",
            Self::NoReplica => "no replica will do",
        }
    }
}

/// Who answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The server; `None`: there is none, not even the primary.
    pub server: Option<u32>,
    /// Why it.
    pub reason: Reason,
    /// Ask it first whether it has replayed up to here, and wait a little if it has not.
    pub ask: Option<Position>,
    /// The primary is on an older timeline than the token, as far as is known: it may be a former one.
    pub doubtful: bool,
    /// What was found about each candidate.
    pub considered: Vec<(u32, Verdict)>,
}

/// Picks a server. `forks`: of the shard's log, as far as known; `chance`: two random numbers.
#[must_use]
pub fn choose(candidates: &[Candidate<'_>], want: &Want<'_>, forks: &[Fork], chance: [u64; 2]) -> Decision {
    let considered: Vec<_> = candidates.iter().map(|candidate| (candidate, verdict(candidate, want, forks))).collect();
    let primary = candidates.iter().find(|candidate| candidate.is_primary);
    let decide = |server: Option<u32>, reason, ask| Decision {
        server,
        reason,
        ask,
        doubtful: server == primary.map(|primary| primary.server)
            && primary.is_some_and(|primary| is_doubtful(primary, want.token)),
        considered: considered.iter().map(|(candidate, verdict)| (candidate.server, *verdict)).collect(),
    };
    let to_primary = |reason| decide(primary.map(|primary| primary.server), reason, None);
    if want.preference == Preference::Primary {
        return to_primary(Reason::PrimaryWanted);
    }
    let serving: Vec<&Candidate<'_>> =
        considered.iter().filter(|(_, verdict)| *verdict == Verdict::Serves).map(|(candidate, _)| *candidate).collect();
    if let Some(last) = serving.iter().find(|candidate| Some(candidate.server) == want.last) {
        return decide(Some(last.server), Reason::Sticky, None);
    }
    let nearest = want.preference == Preference::Nearest;
    let equals = if nearest { near(&serving, want.zone) } else { in_zone(&serving, want.zone) };
    if let Some(chosen) = pick(&equals, chance) {
        return decide(Some(chosen), if nearest { Reason::Nearest } else { Reason::Fresh }, None);
    }
    let asked = considered.iter().filter_map(|(candidate, verdict)| match verdict {
        Verdict::Asked(position) => Some((*candidate, *position)),
        _ => None,
    });
    // The one that was furthest has the shortest way.
    let furthest = asked.max_by_key(|(candidate, _)| candidate.heard.map(|heard| heard.position));
    if let Some((candidate, position)) = furthest {
        return decide(Some(candidate.server), Reason::ToBeAsked, Some(position));
    }
    match want.preference {
        Preference::Replica => decide(None, Reason::NoReplica, None),
        _ => to_primary(Reason::NoReplica),
    }
}

fn verdict(candidate: &Candidate<'_>, want: &Want<'_>, forks: &[Fork]) -> Verdict {
    match judge(candidate, want, forks) {
        Ok(verdict) => verdict,
        Err(why) => Verdict::Not(why),
    }
}

fn judge(candidate: &Candidate<'_>, want: &Want<'_>, forks: &[Fork]) -> Result<Verdict, Why> {
    let check = |holds: bool, why: Why| if holds { Ok(()) } else { Err(why) };
    check(candidate.is_primary || !want.lost.contains(&candidate.server), Why::Lost)?;
    if candidate.is_primary {
        let wanted = matches!(want.preference, Preference::Nearest | Preference::Primary);
        check(wanted, Why::NotWanted)?;
        check(!is_doubtful(candidate, want.token), Why::OlderTimeline)?;
        return Ok(Verdict::Serves);
    }
    check(want.preference != Preference::Primary, Why::NotWanted)?;
    check(candidate.weight > 0.0, Why::Out)?;
    match candidate.admission {
        Admission::All => {}
        Admission::WithoutToken => check(want.token.is_none(), Why::Out)?,
        Admission::None => return Err(Why::Out),
    }
    let heard = candidate.heard.filter(|heard| heard.age <= want.heard_within).ok_or(Why::Unknown)?;
    check(heard.in_recovery, Why::Invalid)?;
    if let Some(most) = want.max_lag {
        // It may have stood still since.
        check(heard.lag.ok_or(Why::Unknown)? + heard.age <= most, Why::Lag)?;
    }
    let ask = |position, why| if want.may_ask && candidate.may_ask { Ok(Verdict::Asked(position)) } else { Err(why) };
    if let Some(token) = want.token {
        check(heard.system == token.system, Why::OtherSystem)?;
        match holds(heard.position, token.position, forks) {
            Holds::All => {}
            Holds::NotYet => {
                return ask(wanted(want.floor, Some(token.position), &heard).unwrap_or(token.position), Why::Behind)
            }
            Holds::Older => return Err(Why::OlderTimeline),
            Holds::Lost => return Err(Why::NewerTimeline),
        }
    }
    // Without the token, which it has.
    let Some(floor) = wanted(want.floor, None, &heard) else { return Ok(Verdict::Serves) };
    check(heard.position.timeline >= floor.timeline, Why::OlderTimeline)?;
    match heard.position.lsn >= floor.lsn {
        true => Ok(Verdict::Serves),
        false => ask(floor, Why::BehindMove),
    }
}

/// Whether a primary may be a former one, that lacks what the token stands for.
fn is_doubtful(primary: &Candidate<'_>, token: Option<Mark>) -> bool {
    let Some(token) = token else { return false };
    primary.heard.is_some_and(|heard| heard.system != token.system || heard.position.timeline < token.position.timeline)
}

/// Those of the reader's zone, if there are any.
fn in_zone<'a, 'b>(serving: &[&'b Candidate<'a>], zone: &str) -> Vec<&'b Candidate<'a>> {
    let own: Vec<_> = serving.iter().copied().filter(|candidate| !zone.is_empty() && candidate.zone == zone).collect();
    match own.is_empty() {
        true => serving.to_vec(),
        false => own,
    }
}

/// Those that are about as near as the nearest, by zone and then by round trip.
fn near<'a, 'b>(serving: &[&'b Candidate<'a>], zone: &str) -> Vec<&'b Candidate<'a>> {
    let own = in_zone(serving, zone);
    let trip = |candidate: &Candidate<'_>| candidate.heard.and_then(|heard| heard.round_trip);
    let Some(shortest) = own.iter().filter_map(|candidate| trip(candidate)).min() else { return own };
    own.into_iter().filter(|candidate| trip(candidate).is_some_and(|trip| trip <= shortest + NEAR)).collect()
}

/// The better of two that chance picks by weight: the one that lags less.
fn pick(equals: &[&Candidate<'_>], chance: [u64; 2]) -> Option<u32> {
    let [first, second] = chance.map(|chance| by_weight(equals, chance));
    let (first, second) = (first?, second?);
    let lag = |candidate: &Candidate<'_>| candidate.heard.and_then(|heard| heard.lag).unwrap_or(Duration::MAX);
    Some(if lag(second) < lag(first) { second.server } else { first.server })
}

/// Who owns the point of the weights that `chance` falls on.
#[allow(clippy::cast_precision_loss)] // a share of a weight need not be exact
fn by_weight<'a, 'b>(equals: &[&'b Candidate<'a>], chance: u64) -> Option<&'b Candidate<'a>> {
    let weight = |candidate: &Candidate<'_>| candidate.weight.max(f64::MIN_POSITIVE);
    let total: f64 = equals.iter().map(|candidate| weight(candidate)).sum();
    let mut point = total * (chance as f64 / (u64::MAX as f64 + 1.0));
    for candidate in equals {
        point -= weight(candidate);
        if point < 0.0 {
            return Some(candidate);
        }
    }
    equals.last().copied()
}

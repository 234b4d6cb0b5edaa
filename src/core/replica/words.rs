//! An observation as words, the way it stands in shared memory.
//!
//! What always holds: [`Observation::of_words`] gives back what [`Observation::words`] was given, but for times of more than
//! half a million years; words of all zeros are no observation.

use std::time::Duration;

use super::{Invalid, Lsn, Moment, Observation, Receiver, Rotation, Standing, SystemIdentifier, Timeline, Unknown};

/// Words that an observation takes.
pub const WORDS: usize = 10;

/// Marks a time that is not known.
const NO_TIME: u64 = u64::MAX;

/// Which fields are known, and the small ones. Bit 0 is always set.
mod bits {
    pub const WRITTEN: u64 = 1;
    pub const SYSTEM: u64 = 1 << 1;
    pub const TIMELINE: u64 = 1 << 2;
    pub const REPLAYED: u64 = 1 << 3;
    pub const RECEIVED: u64 = 1 << 4;
    pub const BEHIND: u64 = 1 << 5;
    pub const ROTATION: u32 = 8;
    pub const RECEIVER: u32 = 16;
    pub const RECOVERY: u32 = 24;
    pub const PAUSED: u32 = 28;
}

impl Observation {
    /// Returns the words for it.
    #[must_use]
    pub fn words(&self) -> [u64; WORDS] {
        let flag = |known: bool, bit: u64| if known { bit } else { 0 };
        let head = bits::WRITTEN
            | flag(self.system.is_some(), bits::SYSTEM)
            | flag(self.timeline.is_some(), bits::TIMELINE)
            | flag(self.replayed.is_some(), bits::REPLAYED)
            | flag(self.received.is_some(), bits::RECEIVED)
            | flag(self.behind.is_some(), bits::BEHIND)
            | self.rotation.code() << bits::ROTATION
            | self.receiver.map_or(0, Receiver::code) << bits::RECEIVER
            | answer(self.in_recovery) << bits::RECOVERY
            | answer(self.paused) << bits::PAUSED;
        let (kind, value) = match self.standing {
            Standing::Primary => (0, 0),
            Standing::Replica { lag } => (1, micros(lag)),
            Standing::Unknown(why) => (2, why.code()),
            Standing::Invalid(why) => (3, why.code()),
        };
        [
            head | kind << 32,
            value,
            self.taken_at.0.cast_unsigned(),
            self.round_trip.map_or(NO_TIME, micros),
            self.system.map_or(0, |system| system.0),
            self.timeline.map_or(0, |timeline| u64::from(timeline.0)),
            self.replayed.map_or(0, |lsn| lsn.0),
            self.received.map_or(0, |lsn| lsn.0),
            self.behind.unwrap_or(0),
            0,
        ]
    }

    /// Returns what the words stand for; `None` if they are not an observation's.
    #[must_use]
    pub fn of_words(words: &[u64; WORDS]) -> Option<Self> {
        let [head, value, taken_at, round_trip, system, timeline, replayed, received, behind, _] = *words;
        if head & bits::WRITTEN == 0 {
            return None;
        }
        let known = |bit: u64| head & bit != 0;
        let standing = match head >> 32 {
            0 => Standing::Primary,
            1 => Standing::Replica { lag: Duration::from_micros(value) },
            2 => Standing::Unknown(Unknown::of_code(value)?),
            3 => Standing::Invalid(Invalid::of_code(value)?),
            _ => return None,
        };
        Some(Self {
            taken_at: Moment(taken_at.cast_signed()),
            standing,
            rotation: Rotation::of_code(head >> bits::ROTATION & 0xff)?,
            round_trip: (round_trip != NO_TIME).then_some(Duration::from_micros(round_trip)),
            in_recovery: answered(head >> bits::RECOVERY),
            system: known(bits::SYSTEM).then_some(SystemIdentifier(system)),
            timeline: known(bits::TIMELINE).then_some(Timeline(u32::try_from(timeline).ok()?)),
            replayed: known(bits::REPLAYED).then_some(Lsn(replayed)),
            received: known(bits::RECEIVED).then_some(Lsn(received)),
            behind: known(bits::BEHIND).then_some(behind),
            receiver: Receiver::of_code(head >> bits::RECEIVER & 0xff),
            paused: answered(head >> bits::PAUSED),
        })
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX).min(NO_TIME - 1)
}

fn answer(known: Option<bool>) -> u64 {
    known.map_or(0, |yes| 1 + u64::from(yes))
}

fn answered(code: u64) -> Option<bool> {
    match code & 0xf {
        1 => Some(false),
        2 => Some(true),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_observation() -> impl Strategy<Value = Observation> {
        let standing = prop_oneof![
            Just(Standing::Primary),
            any::<u64>().prop_map(|lag| Standing::Replica { lag: Duration::from_micros(lag >> 1) }),
            proptest::sample::select(Unknown::ALL).prop_map(Standing::Unknown),
            proptest::sample::select(Invalid::ALL).prop_map(Standing::Invalid),
        ];
        let places = (any::<Option<u64>>(), any::<Option<u32>>(), any::<Option<u64>>(), any::<Option<u64>>());
        let small = (
            proptest::sample::select(Rotation::ALL),
            proptest::option::of(proptest::sample::select(Receiver::ALL)),
            any::<Option<bool>>(),
            any::<Option<bool>>(),
        );
        (standing, any::<i64>(), any::<Option<u32>>(), places, any::<Option<u64>>(), small).prop_map(
            |(standing, taken_at, round_trip, (system, timeline, replayed, received), behind, small)| Observation {
                taken_at: Moment(taken_at),
                standing,
                rotation: small.0,
                round_trip: round_trip.map(|micros| Duration::from_micros(micros.into())),
                in_recovery: small.2,
                system: system.map(SystemIdentifier),
                timeline: timeline.map(Timeline),
                replayed: replayed.map(Lsn),
                received: received.map(Lsn),
                behind,
                receiver: small.1,
                paused: small.3,
            },
        )
    }

    proptest! {
        #[test]
        fn words_give_back_the_observation(observation in any_observation()) {
            prop_assert_eq!(Observation::of_words(&observation.words()), Some(observation));
        }

        #[test]
        fn any_words_are_taken_without_panic(words in any::<[u64; WORDS]>()) {
            let _ = Observation::of_words(&words);
        }
    }

    #[test]
    fn empty_memory_is_no_observation() {
        assert_eq!(Observation::of_words(&[0; WORDS]), None);
    }

    #[test]
    fn codes_are_distinct_and_kept() {
        let codes: Vec<_> = Unknown::ALL.iter().map(|each| each.code()).collect();
        assert_eq!(codes, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(Invalid::ALL.iter().map(|each| each.code()).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
        assert_eq!(Rotation::ALL.iter().map(|each| each.code()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    }
}

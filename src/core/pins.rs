//! Pins: keys with a shard of their own choosing, ahead of the rule.
//!
//! Decides the owner of a pinned key. What always holds: a pin is found by the key's digest and confirmed by its bytes.
//! Refuses nothing: [`crate::map`] has validated the pins. Built there only.

use crate::hash::md5_u128;
use crate::ids::ShardNumber;

#[derive(Clone, Debug)]
struct Pin {
    digest: u128,
    key: Box<[u8]>,
    shard: ShardNumber,
}

/// The pins of a keyspace, by digest.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pins(Vec<Pin>);

impl Pins {
    pub(crate) fn build<'a>(pins: impl Iterator<Item = (&'a str, ShardNumber)>) -> Self {
        let mut pins: Vec<Pin> = pins
            .map(|(key, shard)| Pin { digest: md5_u128(key.as_bytes()), key: key.as_bytes().into(), shard })
            .collect();
        pins.sort_unstable_by(|a, b| (a.digest, &a.key).cmp(&(b.digest, &b.key)));
        Self(pins)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the shard of a pinned key. O(log pins), no allocation.
    pub(crate) fn owner(&self, digest: u128, canonical: &[u8]) -> Option<ShardNumber> {
        let first = self.0.partition_point(|pin| pin.digest < digest);
        let mut same = self.0.get(first..)?.iter().take_while(|pin| pin.digest == digest);
        same.find(|pin| *pin.key == *canonical).map(|pin| pin.shard)
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().map(|pin| &*pin.key)
    }
}

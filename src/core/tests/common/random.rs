//! Chance that can be repeated.

/// A small generator, so that a run can be repeated.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (self.0 ^ self.0 >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mixed ^ mixed >> 33
    }

    pub fn pair(&mut self) -> [u64; 2] {
        [self.next(), self.next()]
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

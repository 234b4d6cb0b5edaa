//! The standard normal distribution.
//!
//! Decides nothing. What always holds: relative error of the quantile about 1e-16. Refuses nothing: a probability outside
//! (0, 1) has no quantile, and gives NaN or an infinity.

/// Returns the x that a standard normal variable exceeds with probability `tail`.
///
/// `tail`: above 0, at most 0.5 in good precision; it is the small number, so that x far out loses no digits.
///
/// Source: Wichura, Algorithm AS 241 (PPND16), Applied Statistics 37, 1988.
#[must_use]
pub fn quantile_of_tail(tail: f64) -> f64 {
    let q = 0.5 - tail;
    if q.abs() <= 0.425 {
        let r = 0.180_625 - q * q;
        return q * polynomial(&CENTRE_A, r) / polynomial(&CENTRE_B, r);
    }
    let r = (-tail.min(1.0 - tail).ln()).sqrt();
    let x = if r <= 5.0 {
        polynomial(&MIDDLE_C, r - 1.6) / polynomial(&MIDDLE_D, r - 1.6)
    } else {
        polynomial(&FAR_E, r - 5.0) / polynomial(&FAR_F, r - 5.0)
    };
    if q < 0.0 {
        -x
    } else {
        x
    }
}

/// Returns the density at `x`.
#[must_use]
pub fn density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt()
}

/// Coefficients in ascending order.
fn polynomial(coefficients: &[f64; 8], x: f64) -> f64 {
    coefficients.iter().rev().fold(0.0, |sum, coefficient| sum * x + coefficient)
}

const CENTRE_A: [f64; 8] = [
    3.387_132_872_796_366_5,
    1.331_416_678_917_843_8e2,
    1.971_590_950_306_551_3e3,
    1.373_169_376_550_946e4,
    4.592_195_393_154_987e4,
    6.726_577_092_700_87e4,
    3.343_057_558_358_813e4,
    2.509_080_928_730_122_7e3,
];
const CENTRE_B: [f64; 8] = [
    1.0,
    4.231_333_070_160_091e1,
    6.871_870_074_920_579e2,
    5.394_196_021_424_751e3,
    2.121_379_430_158_659_7e4,
    3.930_789_580_009_271e4,
    2.872_908_573_572_194_3e4,
    5.226_495_278_852_854e3,
];
const MIDDLE_C: [f64; 8] = [
    1.423_437_110_749_683_5,
    4.630_337_846_156_546,
    5.769_497_221_460_691,
    3.647_848_324_763_204_5,
    1.270_458_252_452_368_4,
    2.417_807_251_774_506e-1,
    2.272_384_498_926_918_4e-2,
    7.745_450_142_783_414e-4,
];
const MIDDLE_D: [f64; 8] = [
    1.0,
    2.053_191_626_637_759,
    1.676_384_830_183_803_8,
    6.897_673_349_851e-1,
    1.481_039_764_274_800_8e-1,
    1.519_866_656_361_645_7e-2,
    5.475_938_084_995_345e-4,
    1.050_750_071_644_416_9e-9,
];
const FAR_E: [f64; 8] = [
    6.657_904_643_501_103,
    5.463_784_911_164_114,
    1.784_826_539_917_291_3,
    2.965_605_718_285_048_7e-1,
    2.653_218_952_657_612_4e-2,
    1.242_660_947_388_078_4e-3,
    2.711_555_568_743_487_6e-5,
    2.010_334_399_292_288_1e-7,
];
const FAR_F: [f64; 8] = [
    1.0,
    5.998_322_065_558_88e-1,
    1.369_298_809_227_358e-1,
    1.487_536_129_085_061_5e-2,
    7.868_691_311_456_133e-4,
    1.846_318_317_510_054_8e-5,
    1.421_511_758_316_446e-7,
    2.044_263_103_389_939_8e-15,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles() {
        for (tail, want) in [
            (0.5, 0.0),
            (0.01, 2.326_347_874_040_841),
            (0.975, -1.959_963_984_540_054),
            (0.1, 1.281_551_565_544_600_5),
            (1e-9, 5.997_807_015_007_686_5),
            (1e-20, 9.262_340_089_798_408),
        ] {
            assert!((quantile_of_tail(tail) - want).abs() < 1e-14 * want.abs().max(1.0), "tail={tail}");
        }
    }
}

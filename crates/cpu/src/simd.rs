//! Which vector instructions the kernels use: found out once at run time, or forced through the
//! environment. It knows processors only, not what is computed with them.

use std::fmt;

/// A level of vector instructions that this processor has.
///
/// Outside this crate a level can only come from [`Simd::detect`], [`Simd::from_env`] or
/// [`Simd::available`]; inside, a value other than `Portable` must not be made by hand: holding it
/// is the proof that the instructions exist.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Simd {
    /// Plain Rust, on any processor.
    Portable,
    /// AVX2, FMA and F16C: x86 processors since about 2013.
    #[non_exhaustive]
    Avx2,
    /// As `Avx2`, with the int8 products of AVX-VNNI: Intel since Alder Lake, AMD since Zen 5.
    #[non_exhaustive]
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL and VNNI: AMD since Zen 4, Intel servers since Ice Lake.
    #[non_exhaustive]
    Avx512,
    /// As `Avx512`, with products of BF16 weights by the dot instruction for pairs of them, which
    /// rounds activations to bfloat16.
    #[non_exhaustive]
    Avx512Bf16,
}

/// The environment variable that forces a level.
const VARIABLE: &str = "BODKIN_CPU";

impl Simd {
    const ALL: [Simd; 5] =
        [Simd::Portable, Simd::Avx2, Simd::AvxVnni, Simd::Avx512, Simd::Avx512Bf16];

    /// The level's name, as `BODKIN_CPU` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Simd::Portable => "portable",
            Simd::Avx2 => "avx2",
            Simd::AvxVnni => "avx-vnni",
            Simd::Avx512 => "avx512",
            Simd::Avx512Bf16 => "avx512-bf16",
        }
    }

    /// The highest level that is worth its while on this processor. The dot instruction for
    /// bfloat16 is on AMD's, where it does twice the work of a fused multiply-add in its time;
    /// Intel's servers do half of it.
    pub fn detect() -> Simd {
        let pays = |level: &Simd| *level != Simd::Avx512Bf16 || is_from_amd();
        Simd::available().rev().find(pays).unwrap_or(Simd::Portable)
    }

    /// All levels that this processor has, lowest first.
    pub fn available() -> impl DoubleEndedIterator<Item = Simd> {
        Simd::ALL.into_iter().filter(|level| level.is_supported())
    }

    /// The level named by the environment variable `BODKIN_CPU`, or the highest one without it.
    ///
    /// # Errors
    /// One line, if the name is unknown or the processor lacks the level.
    pub fn from_env() -> Result<Simd, String> {
        match std::env::var_os(VARIABLE) {
            None => Ok(Simd::detect()),
            Some(name) => Simd::from_name(&name.to_string_lossy()),
        }
    }

    /// The level called `name`.
    ///
    /// # Errors
    /// One line, if the name is unknown or the processor lacks the level.
    pub fn from_name(name: &str) -> Result<Simd, String> {
        let names =
            |levels: &[Simd]| levels.iter().map(|l| l.name()).collect::<Vec<_>>().join(", ");
        let level = Simd::ALL.into_iter().find(|level| level.name() == name).ok_or_else(|| {
            format!("{VARIABLE}: expected one of {}, found \"{name}\"", names(&Simd::ALL))
        })?;
        if level.is_supported() {
            return Ok(level);
        }
        let available: Vec<Simd> = Simd::available().collect();
        Err(format!("{VARIABLE}: this processor has {}, not {name}", names(&available)))
    }

    /// Whether products of BF16 weights are made of pairs of them.
    pub(crate) fn pairs_bf16(self) -> bool {
        self == Simd::Avx512Bf16
    }

    /// The level whose kernels expand vectors by masks, or permute bytes across them: this one, or
    /// a lower one where the processor lacks the instructions for it.
    pub(crate) fn expanding(self) -> Simd {
        #[cfg(target_arch = "x86_64")]
        if matches!(self, Simd::Avx512 | Simd::Avx512Bf16)
            && !(is_x86_feature_detected!("avx512vbmi")
                && is_x86_feature_detected!("avx512vbmi2")
                && is_x86_feature_detected!("bmi2"))
        {
            return Simd::Avx2;
        }
        self
    }

    #[cfg(target_arch = "x86_64")]
    fn is_supported(self) -> bool {
        let avx2 = || {
            is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
                && is_x86_feature_detected!("popcnt")
        };
        let avx512 = || {
            avx2()
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
        };
        match self {
            Simd::Portable => true,
            Simd::Avx2 => avx2(),
            Simd::AvxVnni => avx2() && is_x86_feature_detected!("avxvnni"),
            Simd::Avx512 => avx512(),
            Simd::Avx512Bf16 => avx512() && is_x86_feature_detected!("avx512bf16"),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_supported(self) -> bool {
        self == Simd::Portable
    }
}

/// Whether AMD made this processor.
#[cfg(target_arch = "x86_64")]
fn is_from_amd() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_from_amd() -> bool {
    false
}

impl fmt::Display for Simd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_found_by_its_name_and_errors_name_what_was_asked() {
        for level in Simd::available() {
            assert_eq!(Simd::from_name(level.name()), Ok(level));
        }
        let error = Simd::from_name("sse9").expect_err("no such level");
        assert!(error.contains("sse9") && error.contains("portable"), "{error}");
    }

    #[test]
    fn the_portable_level_is_always_there_and_lowest() {
        assert_eq!(Simd::available().next(), Some(Simd::Portable));
    }
}

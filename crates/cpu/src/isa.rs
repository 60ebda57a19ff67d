//! Instruction sets: detected once at run time, or forced through the environment variable
//! `BODKIN_CPU`.

use std::fmt;

/// A set of vector instructions that this processor has.
///
/// Outside this crate a value can only come from [`Isa::detect`], [`Isa::from_env`] or
/// [`Isa::available`]. Inside, a value other than `Portable` must not be constructed: holding it is
/// the proof that the instructions exist.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust, on any processor.
    Portable,
    /// AVX2, FMA and F16C: x86 processors since about 2013.
    #[cfg(target_arch = "x86_64")]
    #[non_exhaustive]
    Avx2,
    /// As `Avx2`, with the int8 dot product of AVX-VNNI: Intel since Alder Lake, AMD since Zen 5.
    #[cfg(target_arch = "x86_64")]
    #[non_exhaustive]
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL and VNNI: AMD since Zen 4, Intel servers since Ice Lake.
    #[cfg(target_arch = "x86_64")]
    #[non_exhaustive]
    Avx512,
    /// As `Avx512`, with the BF16 dot product for BF16 weights, which rounds activations to
    /// bfloat16.
    #[cfg(target_arch = "x86_64")]
    #[non_exhaustive]
    Avx512Bf16,
    /// As `Avx512`, with the tiles of AMX for prefill rows, which rounds to bfloat16: Intel servers
    /// since Sapphire Rapids.
    #[cfg(target_arch = "x86_64")]
    #[non_exhaustive]
    Amx,
    /// As `Amx`, with tiles in plain Rust: slow, to test the rest on processors without them.
    #[cfg(target_arch = "x86_64")]
    #[non_exhaustive]
    AmxEmulated,
    /// NEON: all 64-bit Arm processors.
    #[cfg(target_arch = "aarch64")]
    #[non_exhaustive]
    Neon,
    /// As `Neon`, with the int8 dot product: Arm's server cores since Neoverse N1, Apple since M1.
    #[cfg(target_arch = "aarch64")]
    #[non_exhaustive]
    DotProd,
}

/// The environment variable that forces an instruction set.
const VARIABLE: &str = "BODKIN_CPU";

impl Isa {
    #[cfg(target_arch = "x86_64")]
    const ALL: &[Isa] = &[
        Isa::Portable,
        Isa::AmxEmulated,
        Isa::Avx2,
        Isa::AvxVnni,
        Isa::Avx512,
        Isa::Avx512Bf16,
        Isa::Amx,
    ];
    #[cfg(target_arch = "aarch64")]
    const ALL: &[Isa] = &[Isa::Portable, Isa::Neon, Isa::DotProd];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    const ALL: &[Isa] = &[Isa::Portable];

    /// The name, as `BODKIN_CPU` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => "avx-vnni",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => "avx512-bf16",
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => "amx",
            #[cfg(target_arch = "x86_64")]
            Isa::AmxEmulated => "amx-emulated",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => "neon",
            #[cfg(target_arch = "aarch64")]
            Isa::DotProd => "dotprod",
        }
    }

    /// The fastest instruction set of this processor. The BF16 dot product has twice the throughput
    /// of a fused multiply-add on AMD's processors, and half of it on Intel's servers.
    pub fn detect() -> Isa {
        let pays = |isa: &Isa| !(isa.has_bf16_dot() && !is_from_amd() || isa.is_emulated());
        Isa::available().rev().find(pays).unwrap_or(Isa::Portable)
    }

    /// All instruction sets that this processor has, the smallest first.
    pub fn available() -> impl DoubleEndedIterator<Item = Isa> {
        Isa::ALL.iter().copied().filter(|isa| isa.is_supported())
    }

    /// The instruction set named by the environment variable `BODKIN_CPU`, or the detected one.
    ///
    /// # Errors
    /// One line, if the name is unknown or the processor lacks the instructions.
    pub fn from_env() -> Result<Isa, String> {
        match std::env::var_os(VARIABLE) {
            None => Ok(Isa::detect()),
            Some(name) => Isa::from_name(&name.to_string_lossy()),
        }
    }

    /// The instruction set called `name`.
    ///
    /// # Errors
    /// One line, if the name is unknown or the processor lacks the instructions.
    pub fn from_name(name: &str) -> Result<Isa, String> {
        let names = |isas: &[Isa]| isas.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ");
        let isa = Isa::ALL.iter().copied().find(|isa| isa.name() == name).ok_or_else(|| {
            format!("{VARIABLE}: expected one of {}, found \"{name}\"", names(Isa::ALL))
        })?;
        if isa.is_supported() {
            return Ok(isa);
        }
        let available: Vec<Isa> = Isa::available().collect();
        Err(format!("{VARIABLE}: this processor has {}, not {name}", names(&available)))
    }

    /// Whether BF16 weights use the BF16 dot product.
    pub(crate) fn has_bf16_dot(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self == Isa::Avx512Bf16;
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Whether prefill rows are multiplied by tiles.
    pub(crate) fn has_tiles(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self, Isa::Amx | Isa::AmxEmulated);
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Whether it is for tests alone.
    fn is_emulated(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self == Isa::AmxEmulated;
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// The instruction set for kernels that expand vectors by masks or permute bytes across lanes:
    /// this one, or AVX2 where the processor lacks these instructions.
    pub(crate) fn for_expansion(self) -> Isa {
        #[cfg(target_arch = "x86_64")]
        if matches!(self, Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx | Isa::AmxEmulated)
            && !(is_x86_feature_detected!("avx512vbmi")
                && is_x86_feature_detected!("avx512vbmi2")
                && is_x86_feature_detected!("bmi2"))
        {
            return Isa::Avx2;
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
            Isa::Portable => true,
            Isa::Avx2 => avx2(),
            Isa::AvxVnni => avx2() && is_x86_feature_detected!("avxvnni"),
            Isa::Avx512 => avx512(),
            Isa::Avx512Bf16 | Isa::AmxEmulated => {
                avx512() && is_x86_feature_detected!("avx512bf16")
            }
            Isa::Amx => {
                avx512() && is_x86_feature_detected!("avx512bf16") && crate::amx::is_available()
            }
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn is_supported(self) -> bool {
        match self {
            Isa::Portable | Isa::Neon => true,
            Isa::DotProd => std::arch::is_aarch64_feature_detected!("dotprod"),
        }
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn is_supported(self) -> bool {
        self == Isa::Portable
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

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_isa_is_found_by_its_name_and_errors_name_the_wrong_one() {
        for isa in Isa::available() {
            assert_eq!(Isa::from_name(isa.name()), Ok(isa));
        }
        let error = Isa::from_name("sse9").expect_err("no such name");
        assert!(error.contains("sse9") && error.contains("portable"), "{error}");
    }

    #[test]
    fn the_portable_isa_is_always_available_and_first() {
        assert_eq!(Isa::available().next(), Some(Isa::Portable));
    }
}

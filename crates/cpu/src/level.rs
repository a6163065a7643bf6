//! Which instruction set kernels may use.
//!
//! Detection happens once. An [`Isa`] can only be made for a level that this processor has, so holding one
//! is the safety condition of every kernel.

use std::fmt;

/// An instruction set that kernels are written for, the better ones later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    /// Plain Rust: any processor.
    Scalar,
    /// Any aarch64.
    Neon,
    /// aarch64 with the dot products of bytes (`sdot`).
    NeonDot,
    /// The above and products of matrices of bytes (`smmla`).
    NeonI8mm,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-VNNI beside the above.
    AvxVnni,
    /// AVX-512 F, BW, VL and DQ beside AVX2, FMA and F16C.
    Avx512,
}

impl Level {
    /// Every level, in the order of declaration.
    pub const ALL: [Level; 7] = [
        Level::Scalar,
        Level::Neon,
        Level::NeonDot,
        Level::NeonI8mm,
        Level::Avx2,
        Level::AvxVnni,
        Level::Avx512,
    ];

    /// Whether this processor has the level.
    pub fn is_here(self) -> bool {
        match self {
            Level::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Level::AvxVnni => Level::Avx2.is_here() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                Level::Avx2.is_here()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
            // The target's compilers use it everywhere.
            #[cfg(target_arch = "aarch64")]
            Level::Neon => true,
            #[cfg(target_arch = "aarch64")]
            Level::NeonDot => std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "aarch64")]
            Level::NeonI8mm => Level::NeonDot.is_here() && std::arch::is_aarch64_feature_detected!("i8mm"),
            #[allow(unreachable_patterns, reason = "levels of other processors")]
            _ => false,
        }
    }

    /// The levels of this processor, the best last.
    pub fn here() -> impl DoubleEndedIterator<Item = Level> {
        Level::ALL.into_iter().filter(|level| level.is_here())
    }

    /// The best level of this processor.
    pub fn detect() -> Level {
        Level::here().next_back().unwrap_or(Level::Scalar)
    }

    /// The level of a name.
    pub fn named(name: &str) -> Option<Level> {
        Level::ALL.into_iter().find(|level| level.name() == name)
    }

    /// The name used in flags and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Neon => "neon",
            Level::NeonDot => "neon-dotprod",
            Level::NeonI8mm => "neon-i8mm",
            Level::Avx2 => "avx2",
            Level::AvxVnni => "avx-vnni",
            Level::Avx512 => "avx512",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Proof that this processor has a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Isa {
    level: Level,
    vnni: bool,
    bf16: bool,
}

impl Isa {
    /// `wanted`, or the best level; `None` where this processor lacks it.
    pub fn new(wanted: Option<Level>) -> Option<Isa> {
        let level = wanted.unwrap_or_else(Level::detect);
        let avx512 = level == Level::Avx512;
        level.is_here().then(|| Isa { level, vnni: avx512 && has_vnni(), bf16: avx512 && has_bf16() })
    }

    /// The same without instructions that round their inputs.
    pub fn exact(self) -> Isa {
        Isa { bf16: false, ..self }
    }

    /// The levels of this processor.
    #[cfg(test)]
    pub fn here() -> impl Iterator<Item = Isa> {
        Level::here().filter_map(|level| Isa::new(Some(level)))
    }

    /// The level.
    pub fn level(self) -> Level {
        self.level
    }

    /// Whether AVX-512 VNNI may be used beside the level.
    #[cfg(target_arch = "x86_64")]
    pub fn vnni(self) -> bool {
        self.vnni
    }

    /// Whether AVX-512 BF16, and VBMI that feeds it, may be used beside the level.
    pub fn bf16(self) -> bool {
        self.bf16
    }
}

fn has_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vbmi")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

fn has_vnni() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        is_x86_feature_detected!("avx512vnni")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Compiles one plain function for every level and picks at run time. The body contracts no product and sum
/// into one rounding, so its bits are the same at every level; only its speed differs. Every aarch64 has NEON, so
/// there the plain form is the one.
macro_rules! for_level {
    ($(#[$meta:meta])* pub fn $name:ident($($a:ident: $t:ty),* $(,)?) $(-> $r:ty)? $body:block) => {
        $(#[$meta])*
        pub fn $name(isa: $crate::level::Isa, $($a: $t),*) $(-> $r)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn plain($($a: $t),*) $(-> $r)? $body
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::level::Level;
                #[target_feature(enable = "avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments)]
                fn avx2($($a: $t),*) $(-> $r)? {
                    plain($($a),*)
                }
                #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
                #[allow(clippy::too_many_arguments)]
                fn avx512($($a: $t),*) $(-> $r)? {
                    plain($($a),*)
                }
                match isa.level() {
                    // SAFETY: an `Isa` of this level exists only where its features were detected.
                    Level::Avx2 | Level::AvxVnni => return unsafe { avx2($($a),*) },
                    // SAFETY: as above.
                    Level::Avx512 => return unsafe { avx512($($a),*) },
                    _ => {}
                }
            }
            let _ = isa;
            plain($($a),*)
        }
    };
}
pub(crate) use for_level;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_level_is_here_and_a_missing_one_gives_no_proof() {
        assert!(Level::detect().is_here());
        assert_eq!(Level::here().next(), Some(Level::Scalar));
        for level in Level::ALL {
            assert_eq!(Level::named(level.name()), Some(level));
            assert_eq!(Isa::new(Some(level)).map(Isa::level), level.is_here().then_some(level));
        }
    }
}

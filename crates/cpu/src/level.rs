//! Which instruction set kernels may use.
//!
//! Detection happens once. An [`Isa`] can only be made for a level that this processor has, so holding one
//! is the safety condition of every kernel.

use std::fmt;

/// An instruction set that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Plain Rust: any processor, and every processor that is not x86-64.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ beside the above.
    Avx512,
}

impl Level {
    /// The best level of this processor.
    pub fn detect() -> Level {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq");
            if avx2 && avx512 {
                return Level::Avx512;
            }
            if avx2 {
                return Level::Avx2;
            }
        }
        Level::Scalar
    }

    /// The name used in flags and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
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
        let best = Level::detect();
        let level = wanted.unwrap_or(best);
        let avx512 = level == Level::Avx512;
        (level <= best).then_some(Isa { level, vnni: avx512 && has_vnni(), bf16: avx512 && has_bf16() })
    }

    /// The same without instructions that round their inputs.
    pub fn exact(self) -> Isa {
        Isa { bf16: false, ..self }
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
/// into one rounding, so its bits are the same at every level; only its speed differs.
macro_rules! for_level {
    ($(#[$meta:meta])* pub fn $name:ident($($a:ident: $t:ty),* $(,)?) $(-> $r:ty)? $body:block) => {
        $(#[$meta])*
        pub fn $name(isa: $crate::level::Isa, $($a: $t),*) $(-> $r)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn plain($($a: $t),*) $(-> $r)? $body
            #[cfg(target_arch = "x86_64")]
            {
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
                    $crate::level::Level::Avx2 => return unsafe { avx2($($a),*) },
                    // SAFETY: as above.
                    $crate::level::Level::Avx512 => return unsafe { avx512($($a),*) },
                    $crate::level::Level::Scalar => {}
                }
            }
            let _ = isa;
            plain($($a),*)
        }
    };
}
pub(crate) use for_level;

//! The vector operations of the int8 kernel, and their plain form.
//!
//! A vector is 16 lanes of 32 bits, one lane for each row of a tile: as [`Lanes::B`] four bytes a lane, as
//! [`Lanes::I`] an integer, as [`Lanes::F`] a float32. A level implements them with whatever registers it has.

use half::{bf16, f16};

/// Rows of a tile.
pub(crate) const LANES: usize = 16;

/// One level's vectors.
///
/// # Safety
/// Every function needs the level's features, and pointers good for the bytes that the function names.
pub(crate) trait Lanes: Copy {
    /// 64 bytes.
    type B: Copy;
    /// 16 i32.
    type I: Copy;
    /// 16 f32.
    type F: Copy;
    /// What [`dot_signed`](Lanes::dot_signed) adds to each weight.
    const BIAS: i32;
    /// Rows of activations whose sums are made side by side; a power of two.
    const ROWS: usize;

    /// Whether two rows of activations are multiplied together by [`dot_pair`](Lanes::dot_pair).
    const PAIRED: bool = false;

    /// Eight vectors of weights as `dot_pair` takes them.
    #[inline(always)]
    unsafe fn pair(w: [Self::B; 8]) -> [Self::B; 8] {
        w
    }
    /// Adds to the two sums at `acc` what `dot_signed` of vectors `from .. to`, both even, adds, for one row of x each.
    #[inline(always)]
    unsafe fn dot_pair(_acc: *mut Self::I, _w: &[Self::B; 8], _from: usize, _to: usize, _x: [*const i8; 2]) {
        unreachable!("rows are paired only where a level has products of matrices")
    }
    /// 64 bytes at `p`.
    unsafe fn load(p: *const u8) -> Self::B;
    /// Stores 64 bytes at `p`.
    unsafe fn save(b: Self::B, p: *mut u8);
    /// Every byte `and` mask.
    unsafe fn and(a: Self::B, mask: u8) -> Self::B;
    unsafe fn or(a: Self::B, b: Self::B) -> Self::B;
    /// Shifts 16-bit words right: bits cross bytes, a mask must follow.
    unsafe fn right<const N: i32>(a: Self::B) -> Self::B;
    /// Shifts 16-bit words left: bits cross bytes, a mask must follow.
    unsafe fn left<const N: i32>(a: Self::B) -> Self::B;
    /// `table[byte]` for bytes below 16.
    unsafe fn lookup(table: &[i8; 16], index: Self::B) -> Self::B;
    /// `acc + sum of 4 (w * x)` in each lane, bytes w in 0 ..= 127 and the four i8 of x at `p`, the same for
    /// all lanes.
    unsafe fn dot_unsigned(acc: Self::I, w: Self::B, p: *const i8) -> Self::I;
    /// Signed bytes as `dot_signed` takes them.
    unsafe fn lift(a: Self::B) -> Self::B;
    /// `acc + sum of 4 ((w + BIAS) * x)` with lifted signed bytes w; x is at least -127.
    unsafe fn dot_signed(acc: Self::I, w: Self::B, p: *const i8) -> Self::I;
    unsafe fn ints(v: i32) -> Self::I;
    unsafe fn add_ints(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn mul_ints(a: Self::I, b: Self::I) -> Self::I;
    /// 16 i8 at `p`.
    unsafe fn load_i8(p: *const u8) -> Self::I;
    /// 16 u8 at `p`.
    unsafe fn load_u8(p: *const u8) -> Self::I;
    /// The low four bits of each of 16 bytes.
    unsafe fn low_nibbles(a: Self::I) -> Self::I;
    /// The high four bits of each of 16 bytes.
    unsafe fn high_nibbles(a: Self::I) -> Self::I;
    /// 16 f16 at `p`.
    unsafe fn load_f16(p: *const u8) -> Self::F;
    /// 16 bf16 at `p`.
    unsafe fn load_bf16(p: *const u8) -> Self::F;
    /// 16 E4M3 bytes at `p`, each as `2^-8` of its number; a NaN is none.
    unsafe fn load_e4m3(p: *const u8) -> Self::F;
    /// 16 E8M0 bytes at `p`, each as `2^(e - 128)`, half the scale that it stands for.
    unsafe fn load_half_e8m0(p: *const u8) -> Self::F;
    unsafe fn floats(v: f32) -> Self::F;
    unsafe fn to_floats(a: Self::I) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, in one rounding where the level can.
    unsafe fn mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Stores 16 f32 at `p`.
    unsafe fn store(a: Self::F, p: *mut f32);
}

/// Plain Rust.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain;

/// Implements [`Lanes`] functions as inlined unsafe expressions.
macro_rules! operations {
    ($(fn $name:ident $(<const $n:ident: i32>)? ($($a:ident: $t:ty),*) $(-> $r:ty)? $body:block)*) => {
        $(
            #[inline(always)]
            #[allow(unused_unsafe, reason = "not every body has an unsafe operation")]
            unsafe fn $name $(<const $n: i32>)? ($($a: $t),*) $(-> $r)? {
                // SAFETY: the caller's, as `Lanes` states it.
                unsafe { $body }
            }
        )*
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) use operations;

#[inline(always)]
fn words(a: [u8; 64], f: impl Fn(u16) -> u16) -> [u8; 64] {
    let mut out = [0; 64];
    for (o, v) in out.as_chunks_mut::<2>().0.iter_mut().zip(a.as_chunks::<2>().0) {
        *o = f(u16::from_le_bytes(*v)).to_le_bytes();
    }
    out
}

#[inline(always)]
fn lanes<T: Copy, U: Copy + Default>(a: [T; 16], f: impl Fn(usize, T) -> U) -> [U; 16] {
    let mut out = [U::default(); 16];
    for l in 0..16 {
        out[l] = f(l, a[l]);
    }
    out
}

impl Lanes for Plain {
    type B = [u8; 64];
    type I = [i32; 16];
    type F = [f32; 16];
    const BIAS: i32 = 0;
    const ROWS: usize = 2;

    operations! {
        fn load(p: *const u8) -> [u8; 64] { p.cast::<[u8; 64]>().read() }
        fn save(b: [u8; 64], p: *mut u8) { p.cast::<[u8; 64]>().write(b) }
        fn and(a: [u8; 64], mask: u8) -> [u8; 64] { a.map(|v| v & mask) }
        fn or(a: [u8; 64], b: [u8; 64]) -> [u8; 64] {
            let mut out = a;
            out.iter_mut().zip(b).for_each(|(o, v)| *o |= v);
            out
        }
        fn right<const N: i32>(a: [u8; 64]) -> [u8; 64] { words(a, |v| v >> N) }
        fn left<const N: i32>(a: [u8; 64]) -> [u8; 64] { words(a, |v| v << N) }
        fn lookup(table: &[i8; 16], index: [u8; 64]) -> [u8; 64] { index.map(|i| table[i as usize & 15] as u8) }
        fn dot_unsigned(acc: [i32; 16], w: [u8; 64], p: *const i8) -> [i32; 16] {
            let x = p.cast::<[i8; 4]>().read();
            lanes(acc, |l, a| a + (0..4).map(|i| i32::from(w[4 * l + i]) * i32::from(x[i])).sum::<i32>())
        }
        fn lift(a: [u8; 64]) -> [u8; 64] { a }
        fn dot_signed(acc: [i32; 16], w: [u8; 64], p: *const i8) -> [i32; 16] {
            let x = p.cast::<[i8; 4]>().read();
            lanes(acc, |l, a| a + (0..4).map(|i| i32::from(w[4 * l + i] as i8) * i32::from(x[i])).sum::<i32>())
        }
        fn ints(v: i32) -> [i32; 16] { [v; 16] }
        fn add_ints(a: [i32; 16], b: [i32; 16]) -> [i32; 16] { lanes(a, |l, v| v + b[l]) }
        fn mul_ints(a: [i32; 16], b: [i32; 16]) -> [i32; 16] { lanes(a, |l, v| v * b[l]) }
        fn load_i8(p: *const u8) -> [i32; 16] { lanes(p.cast::<[i8; 16]>().read(), |_, v| i32::from(v)) }
        fn load_u8(p: *const u8) -> [i32; 16] { lanes(p.cast::<[u8; 16]>().read(), |_, v| i32::from(v)) }
        fn low_nibbles(a: [i32; 16]) -> [i32; 16] { lanes(a, |_, v| v & 15) }
        fn high_nibbles(a: [i32; 16]) -> [i32; 16] { lanes(a, |_, v| v >> 4) }
        fn load_f16(p: *const u8) -> [f32; 16] {
            lanes(p.cast::<[[u8; 2]; 16]>().read(), |_, v| f16::from_le_bytes(v).to_f32())
        }
        fn load_bf16(p: *const u8) -> [f32; 16] {
            lanes(p.cast::<[[u8; 2]; 16]>().read(), |_, v| bf16::from_le_bytes(v).to_f32())
        }
        fn load_e4m3(p: *const u8) -> [f32; 16] {
            lanes(p.cast::<[u8; 16]>().read(), |_, v| lapidary_formats::fp8::e4m3_to_f32(v) / 256.0)
        }
        fn load_half_e8m0(p: *const u8) -> [f32; 16] {
            lanes(p.cast::<[u8; 16]>().read(), |_, e| lapidary_formats::codec::mxfp4::half_scale(e))
        }
        fn floats(v: f32) -> [f32; 16] { [v; 16] }
        fn to_floats(a: [i32; 16]) -> [f32; 16] { lanes(a, |_, v| v as f32) }
        fn mul(a: [f32; 16], b: [f32; 16]) -> [f32; 16] { lanes(a, |l, v| v * b[l]) }
        fn mul_add(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] { lanes(a, |l, v| v * b[l] + c[l]) }
        fn store(a: [f32; 16], p: *mut f32) { p.cast::<[f32; 16]>().write(a) }
    }
}

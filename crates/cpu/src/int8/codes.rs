//! How the codes of a tile lie in memory, by their width.
//!
//! A block is 32 inputs of 16 rows. A kernel wants eight vectors of it: lane `r` of vector `v` holds the codes
//! of inputs `4v .. 4v + 4` of row `r`, one a byte. So a row's block is handed about as eight words of four
//! codes. Words wider than the codes are packed without waste:
//!
//! ```text
//! nibbles  4 vectors: vector u holds low half bytes of vector u and, in the high half, those of vector u + 4
//! pairs    2 vectors: bits 2s, 2s + 1 of vector p hold two bits of vector 4p + s
//! bits     1 vector: bit v holds one bit of vector v
//! ```

use super::lanes::{LANES, Lanes};

/// Words of a row's block.
pub(crate) type Words = [u32; 8];

/// A layout of codes.
pub(crate) trait Codes {
    /// Bytes of one block of 16 rows.
    const BYTES: usize;
    /// Stores a row's block in a `block` of [`BYTES`](Codes::BYTES).
    fn put(words: &Words, row: usize, block: &mut [u8]);
    /// Reads back what `put` stored.
    fn get(block: &[u8], row: usize) -> Words;
    /// The eight vectors of the block at `p`.
    ///
    /// # Safety
    /// The level's features, and [`BYTES`](Codes::BYTES) bytes at `p`.
    unsafe fn unpack<S: Lanes>(p: *const u8) -> [S::B; 8];
}

const VECTOR: usize = 64;
const NIBBLES: usize = 4 * VECTOR;
const PAIRS: usize = 2 * VECTOR;
const BITS: usize = VECTOR;

/// The block, with its length and the row checked once for all that is stored.
#[inline(always)]
fn exactly(row: usize, block: &mut [u8], bytes: usize) -> &mut [u8] {
    assert!(row < LANES && block.len() == bytes);
    block
}

#[inline(always)]
fn put_word(word: u32, vector: usize, row: usize, block: &mut [u8]) {
    block[vector * VECTOR + 4 * row..][..4].copy_from_slice(&word.to_le_bytes());
}

#[inline(always)]
fn get_word(vector: usize, row: usize, block: &[u8]) -> u32 {
    u32::from_le_bytes(block[vector * VECTOR + 4 * row..][..4].try_into().expect("four bytes"))
}

#[inline(always)]
fn put_nibbles(words: &Words, row: usize, block: &mut [u8]) {
    for u in 0..4 {
        put_word(words[u] & 0x0F0F_0F0F | (words[u + 4] & 0x0F0F_0F0F) << 4, u, row, block);
    }
}

fn get_nibbles(block: &[u8], row: usize) -> Words {
    std::array::from_fn(|v| get_word(v % 4, row, block) >> (4 * (v / 4)) & 0x0F0F_0F0F)
}

/// Bits `from` and `from + 1` of each code.
#[inline(always)]
fn put_pairs(words: &Words, from: u32, row: usize, block: &mut [u8]) {
    for p in 0..2 {
        let word = (0..4).fold(0, |word, s| word | (words[4 * p + s] >> from & 0x0303_0303) << (2 * s));
        put_word(word, p, row, block);
    }
}

fn get_pairs(block: &[u8], from: u32, row: usize) -> Words {
    std::array::from_fn(|v| (get_word(v / 4, row, block) >> (2 * (v % 4)) & 0x0303_0303) << from)
}

/// Bit `from` of each code.
#[inline(always)]
fn put_bits(words: &Words, from: u32, row: usize, block: &mut [u8]) {
    let word = (0..8).fold(0, |word, v| word | (words[v] >> from & 0x0101_0101) << v);
    put_word(word, 0, row, block);
}

fn get_bits(block: &[u8], from: u32, row: usize) -> Words {
    std::array::from_fn(|v| (get_word(0, row, block) >> v & 0x0101_0101) << from)
}

fn joined(a: Words, b: Words) -> Words {
    std::array::from_fn(|v| a[v] | b[v])
}

/// # Safety
/// The level's features, and `NIBBLES` bytes at `p`.
#[inline(always)]
unsafe fn nibbles<S: Lanes>(p: *const u8) -> [S::B; 8] {
    // SAFETY: the caller's.
    unsafe {
        let q = [S::load(p), S::load(p.add(64)), S::load(p.add(128)), S::load(p.add(192))];
        [
            S::and(q[0], 15),
            S::and(q[1], 15),
            S::and(q[2], 15),
            S::and(q[3], 15),
            S::and(S::right::<4>(q[0]), 15),
            S::and(S::right::<4>(q[1]), 15),
            S::and(S::right::<4>(q[2]), 15),
            S::and(S::right::<4>(q[3]), 15),
        ]
    }
}

/// Codes of four bits.
pub(crate) struct Four;
/// Codes of five bits: nibbles and bits.
pub(crate) struct Five;
/// Codes of six bits: nibbles and pairs.
pub(crate) struct Six;
/// Codes of two bits: pairs.
pub(crate) struct Two;
/// Codes of three bits: pairs and bits.
pub(crate) struct Three;
/// Codes of a byte, as they are.
pub(crate) struct Eight;

impl Codes for Four {
    const BYTES: usize = NIBBLES;
    #[inline(always)]
    fn put(words: &Words, row: usize, block: &mut [u8]) {
        let block = exactly(row, block, Self::BYTES);
        put_nibbles(words, row, block);
    }
    fn get(block: &[u8], row: usize) -> Words {
        get_nibbles(block, row)
    }
    #[inline(always)]
    unsafe fn unpack<S: Lanes>(p: *const u8) -> [S::B; 8] {
        // SAFETY: the caller's.
        unsafe { nibbles::<S>(p) }
    }
}

impl Codes for Five {
    const BYTES: usize = NIBBLES + BITS;
    #[inline(always)]
    fn put(words: &Words, row: usize, block: &mut [u8]) {
        let block = exactly(row, block, Self::BYTES);
        put_nibbles(words, row, block);
        put_bits(words, 4, row, &mut block[NIBBLES..]);
    }
    fn get(block: &[u8], row: usize) -> Words {
        joined(get_nibbles(block, row), get_bits(&block[NIBBLES..], 4, row))
    }
    #[inline(always)]
    unsafe fn unpack<S: Lanes>(p: *const u8) -> [S::B; 8] {
        // SAFETY: the caller's.
        unsafe {
            let (w, h) = (nibbles::<S>(p), S::load(p.add(NIBBLES)));
            [
                S::or(w[0], S::and(S::left::<4>(h), 16)),
                S::or(w[1], S::and(S::left::<3>(h), 16)),
                S::or(w[2], S::and(S::left::<2>(h), 16)),
                S::or(w[3], S::and(S::left::<1>(h), 16)),
                S::or(w[4], S::and(h, 16)),
                S::or(w[5], S::and(S::right::<1>(h), 16)),
                S::or(w[6], S::and(S::right::<2>(h), 16)),
                S::or(w[7], S::and(S::right::<3>(h), 16)),
            ]
        }
    }
}

impl Codes for Six {
    const BYTES: usize = NIBBLES + PAIRS;
    #[inline(always)]
    fn put(words: &Words, row: usize, block: &mut [u8]) {
        let block = exactly(row, block, Self::BYTES);
        put_nibbles(words, row, block);
        put_pairs(words, 4, row, &mut block[NIBBLES..]);
    }
    fn get(block: &[u8], row: usize) -> Words {
        joined(get_nibbles(block, row), get_pairs(&block[NIBBLES..], 4, row))
    }
    #[inline(always)]
    unsafe fn unpack<S: Lanes>(p: *const u8) -> [S::B; 8] {
        // SAFETY: the caller's.
        unsafe {
            let w = nibbles::<S>(p);
            let h = [S::load(p.add(NIBBLES)), S::load(p.add(NIBBLES + 64))];
            [
                S::or(w[0], S::and(S::left::<4>(h[0]), 48)),
                S::or(w[1], S::and(S::left::<2>(h[0]), 48)),
                S::or(w[2], S::and(h[0], 48)),
                S::or(w[3], S::and(S::right::<2>(h[0]), 48)),
                S::or(w[4], S::and(S::left::<4>(h[1]), 48)),
                S::or(w[5], S::and(S::left::<2>(h[1]), 48)),
                S::or(w[6], S::and(h[1], 48)),
                S::or(w[7], S::and(S::right::<2>(h[1]), 48)),
            ]
        }
    }
}

/// # Safety
/// The level's features, and `PAIRS` bytes at `p`.
#[inline(always)]
unsafe fn pairs<S: Lanes>(p: *const u8) -> [S::B; 8] {
    // SAFETY: the caller's.
    unsafe {
        let h = [S::load(p), S::load(p.add(64))];
        [
            S::and(h[0], 3),
            S::and(S::right::<2>(h[0]), 3),
            S::and(S::right::<4>(h[0]), 3),
            S::and(S::right::<6>(h[0]), 3),
            S::and(h[1], 3),
            S::and(S::right::<2>(h[1]), 3),
            S::and(S::right::<4>(h[1]), 3),
            S::and(S::right::<6>(h[1]), 3),
        ]
    }
}

impl Codes for Two {
    const BYTES: usize = PAIRS;
    #[inline(always)]
    fn put(words: &Words, row: usize, block: &mut [u8]) {
        let block = exactly(row, block, Self::BYTES);
        put_pairs(words, 0, row, block);
    }
    fn get(block: &[u8], row: usize) -> Words {
        get_pairs(block, 0, row)
    }
    #[inline(always)]
    unsafe fn unpack<S: Lanes>(p: *const u8) -> [S::B; 8] {
        // SAFETY: the caller's.
        unsafe { pairs::<S>(p) }
    }
}

impl Codes for Three {
    const BYTES: usize = PAIRS + BITS;
    #[inline(always)]
    fn put(words: &Words, row: usize, block: &mut [u8]) {
        let block = exactly(row, block, Self::BYTES);
        put_pairs(words, 0, row, block);
        put_bits(words, 2, row, &mut block[PAIRS..]);
    }
    fn get(block: &[u8], row: usize) -> Words {
        joined(get_pairs(block, 0, row), get_bits(&block[PAIRS..], 2, row))
    }
    #[inline(always)]
    unsafe fn unpack<S: Lanes>(p: *const u8) -> [S::B; 8] {
        // SAFETY: the caller's.
        unsafe {
            let (w, h) = (pairs::<S>(p), S::load(p.add(PAIRS)));
            [
                S::or(w[0], S::and(S::left::<2>(h), 4)),
                S::or(w[1], S::and(S::left::<1>(h), 4)),
                S::or(w[2], S::and(h, 4)),
                S::or(w[3], S::and(S::right::<1>(h), 4)),
                S::or(w[4], S::and(S::right::<2>(h), 4)),
                S::or(w[5], S::and(S::right::<3>(h), 4)),
                S::or(w[6], S::and(S::right::<4>(h), 4)),
                S::or(w[7], S::and(S::right::<5>(h), 4)),
            ]
        }
    }
}

impl Codes for Eight {
    const BYTES: usize = 8 * VECTOR;
    #[inline(always)]
    fn put(words: &Words, row: usize, block: &mut [u8]) {
        let block = exactly(row, block, Self::BYTES);
        for (v, &word) in words.iter().enumerate() {
            put_word(word, v, row, block);
        }
    }
    fn get(block: &[u8], row: usize) -> Words {
        std::array::from_fn(|v| get_word(v, row, block))
    }
    #[inline(always)]
    unsafe fn unpack<S: Lanes>(p: *const u8) -> [S::B; 8] {
        // SAFETY: the caller's.
        unsafe {
            [
                S::load(p),
                S::load(p.add(64)),
                S::load(p.add(128)),
                S::load(p.add(192)),
                S::load(p.add(256)),
                S::load(p.add(320)),
                S::load(p.add(384)),
                S::load(p.add(448)),
            ]
        }
    }
}

//! Top-k and top-p without sorting the vocabulary.
//!
//! Both filters keep a prefix of the order "higher logit first, equal logits by lower id". They find the last
//! entry of that prefix by selection and then keep, in order of token id, everything up to it. The order in
//! which selection happens to leave its scratch therefore never reaches the draw.

use std::cmp::Ordering;

use super::SamplingParams;

/// A token that is still in the running.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Entry {
    pub token: u32,
    pub logit: f32,
    /// exp((logit - best logit) / temperature).
    pub weight: f32,
}

/// `Less` when `a` is the better token. Logits are never NaN here, and the two zeros are equal.
pub(super) fn rank(a: &Entry, b: &Entry) -> Ordering {
    #[cfg(test)]
    tests::count_comparison();
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.token.cmp(&b.token))
}

/// Fills `kept` with the `k` best tokens that aren't -inf, by token id, weights unset.
///
/// One scan holds the best so far in a buffer of 2k. Whenever that is full, selection halves it and its
/// worst survivor becomes the bar that later logits must exceed: constant amortised work a token even if all
/// of them pass the bar, and for typical logits one comparison a block.
pub(super) fn top_k(row: &[f32], k: usize, buffer: &mut Vec<Entry>, kept: &mut Vec<Entry>) {
    /// Logits that are compared with the bar at once.
    const BLOCK: usize = 64;
    let capacity = 2 * k.max(BLOCK);
    buffer.clear();
    // A later token with the bar's own logit ranks behind it, so passing means exceeding.
    let mut bar = f32::NEG_INFINITY;
    for (b, block) in row.chunks(BLOCK).enumerate() {
        if !any(block, |x| x > bar) {
            continue;
        }
        for (i, logit) in block.iter().enumerate() {
            if *logit > bar {
                buffer.push(Entry { token: (b * BLOCK + i) as u32, logit: *logit, weight: 0.0 });
                if buffer.len() == capacity {
                    bar = cut_to(buffer, k).logit;
                }
            }
        }
    }
    kept.clear();
    if buffer.len() > k {
        cut_to(buffer, k);
    }
    if buffer.len() <= SORTED {
        kept.extend_from_slice(buffer);
        kept.sort_unstable_by_key(|e| e.token);
        return;
    }
    let Some(last) = buffer.iter().max_by(|a, b| rank(a, b)).copied() else { return };
    let up_to_last =
        |token: u32, logit: f32| logit > last.logit || (logit == last.logit && token <= last.token);
    for (b, block) in row.chunks(BLOCK).enumerate() {
        if !any(block, |x| x >= last.logit) {
            continue;
        }
        for (i, logit) in block.iter().enumerate() {
            let token = (b * BLOCK + i) as u32;
            if up_to_last(token, *logit) {
                kept.push(Entry { token, logit: *logit, weight: 0.0 });
            }
        }
    }
}

/// Survivors that are put in the order of their ids by sorting; more, by another scan of the vocabulary.
const SORTED: usize = 4096;

/// Whether any value passes. Without an early end, so that the compiler looks at many values at once.
#[inline(always)]
fn any(block: &[f32], passes: impl Fn(f32) -> bool) -> bool {
    block.iter().fold(0, |any, x| any | u32::from(passes(*x))) != 0
}

/// Leaves the `k` best entries, in no particular order, and returns the worst of them.
fn cut_to(entries: &mut Vec<Entry>, k: usize) -> Entry {
    entries.select_nth_unstable_by(k - 1, rank);
    entries.truncate(k);
    entries[k - 1]
}

/// The weight below which no token needs a closer look.
///
/// With top-p, tokens below `(1 - top_p) * total / vocab` weigh less than `(1 - top_p) * total` together, so
/// the prefix that reaches `top_p * total` lies among the others. Without it, min-p itself is the floor.
pub(super) fn floor(params: &SamplingParams, total: f64, vocab: usize) -> f32 {
    if params.top_p < 1.0 {
        // Rounded down by a few units in the last place of float32, to stay on the safe side of the bound.
        ((1.0 - f64::from(params.top_p)) * total / vocab as f64 * (1.0 - 1e-6)) as f32
    } else {
        params.min_p
    }
}

/// Fills `kept` with the tokens that weigh at least `floor` and more than nothing, by token id.
pub(super) fn above(row: &[f32], weights: &[f32], floor: f32, kept: &mut Vec<Entry>) {
    const BLOCK: usize = 64;
    let floor = floor.max(f32::MIN_POSITIVE);
    kept.clear();
    for (b, (logits, weights)) in row.chunks(BLOCK).zip(weights.chunks(BLOCK)).enumerate() {
        if !any(weights, |w| w >= floor) {
            continue;
        }
        for (i, (logit, weight)) in logits.iter().zip(weights).enumerate() {
            if *weight >= floor {
                kept.push(Entry { token: (b * BLOCK + i) as u32, logit: *logit, weight: *weight });
            }
        }
    }
}

/// Cuts `kept` to the shortest prefix of the ranking whose weights reach `mass`, at least one token.
///
/// Each round splits what is left at its median by selection and goes on in the half where the sum reaches
/// `mass`: n + n/2 + n/4 + ... entries in all.
pub(super) fn top_p(kept: &mut Vec<Entry>, order: &mut Vec<Entry>, mass: f64) {
    order.clear();
    order.extend_from_slice(kept);
    let mut rest = order.as_mut_slice();
    let mut missing = mass;
    while rest.len() > 1 {
        let middle = rest.len() / 2;
        rest.select_nth_unstable_by(middle - 1, rank);
        let (better, worse) = rest.split_at_mut(middle);
        let sum: f64 = better.iter().map(|e| f64::from(e.weight)).sum();
        if sum >= missing {
            rest = better;
        } else {
            missing -= sum;
            rest = worse;
        }
    }
    let Some(last) = rest.first().copied() else { return };
    kept.retain(|e| rank(e, &last) != Ordering::Greater);
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! { static COMPARISONS: Cell<usize> = const { Cell::new(0) }; }

    pub(super) fn count_comparison() {
        COMPARISONS.set(COMPARISONS.get() + 1);
    }

    const VOCAB: usize = 262_144;

    fn rows() -> Vec<(&'static str, Vec<f32>)> {
        let noise = |i: usize| crate::sampling::uniform(9, i as u64) as f32;
        vec![
            ("random", (0..VOCAB).map(|i| 8.0 * noise(i)).collect()),
            ("rising", (0..VOCAB).map(|i| i as f32 * 1e-4).collect()),
            ("falling", (0..VOCAB).map(|i| i as f32 * -1e-4).collect()),
            ("equal", vec![1.5; VOCAB]),
            ("both zeros", (0..VOCAB).map(|i| if noise(i) < 0.5 { 0.0 } else { -0.0 }).collect()),
            ("few values", (0..VOCAB).map(|i| (noise(i) * 5.0).floor()).collect()),
        ]
    }

    fn ranked(row: &[f32]) -> Vec<u32> {
        let mut ids: Vec<u32> = (0..row.len() as u32).collect();
        ids.sort_by(|a, b| row[*b as usize].partial_cmp(&row[*a as usize]).unwrap().then(a.cmp(b)));
        ids
    }

    /// A sort of the vocabulary takes at least about n log2 n - 1.44 n = 16.6 n comparisons of random input.
    /// Selection is linear: the scan's amortised cost is that of selecting k of 2k for every k that pass the
    /// bar. Bounds of 8 n leave a sort no room.
    #[test]
    fn selection_is_right_and_takes_fewer_comparisons_than_a_sort() {
        for (name, row) in rows() {
            let ids = ranked(&row);
            let (mut buffer, mut kept) = (Vec::new(), Vec::new());
            for k in [1, 2, 64, 1000, 200_001, VOCAB - 1] {
                COMPARISONS.set(0);
                top_k(&row, k, &mut buffer, &mut kept);
                let spent = COMPARISONS.get();
                assert!(spent < 8 * VOCAB, "{name}: top_k {k} took {spent} comparisons");
                let mut expected = ids[..k].to_vec();
                expected.sort_unstable();
                assert_eq!(kept.iter().map(|e| e.token).collect::<Vec<_>>(), expected, "{name}: top_k {k}");
            }

            let mut weights = Vec::new();
            let max = row[ids[0] as usize];
            let total = crate::sampling::softmax::weights(&row, max, 1.0, &mut weights);
            for p in [1e-6f32, 0.3, 0.95, 0.9999] {
                let params = SamplingParams { top_p: p, ..SamplingParams::default() };
                COMPARISONS.set(0);
                above(&row, &weights, floor(&params, total, VOCAB), &mut kept);
                top_p(&mut kept, &mut buffer, f64::from(p) * total);
                let spent = COMPARISONS.get();
                assert!(spent < 8 * VOCAB, "{name}: top_p {p} took {spent} comparisons");
                let sum = |ids: &[u32]| ids.iter().map(|i| f64::from(weights[*i as usize])).sum::<f64>();
                // Float64 sums of up to 2^18 float32 weights in another order: within 2^18 * 2^-53 of the total.
                let slack = total * 3e-11;
                let n = kept.len();
                assert!(sum(&ids[..n]) >= f64::from(p) * total - slack, "{name}: top_p {p} keeps too few");
                assert!(
                    n == 1 || sum(&ids[..n - 1]) < f64::from(p) * total + slack,
                    "{name}: too many at {p}"
                );
                let mut expected = ids[..n].to_vec();
                expected.sort_unstable();
                assert_eq!(kept.iter().map(|e| e.token).collect::<Vec<_>>(), expected, "{name}: top_p {p}");
            }
        }
    }
}

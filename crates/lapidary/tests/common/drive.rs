//! Checkpoints, prompts and comparison bit by bit, for tests that drive a stepper.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use lapidary_engine::{Prompt, SoftKind, SoftSpan, Stepper};
use lapidary_ops::Outcome;
use lapidary_reference::Golden;
use lapidary_reference::tiny::{self, Variant};

/// The tiny variants that differ in more than the spelling of their config.
pub const TINY: [Variant; 5] =
    [Variant::Dense, Variant::Moe, Variant::PerLayerInputs, Variant::Unified, Variant::Gemma3];

static TINY_FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let dir = tempfile::tempdir().expect("a folder for checkpoints");
    for variant in Variant::ALL {
        tiny::write(variant, &dir.path().join(variant.name())).expect("a checkpoint is written");
    }
    dir
});

/// The folder of a tiny checkpoint.
pub fn tiny_folder(variant: Variant) -> PathBuf {
    TINY_FOLDER.path().join(variant.name())
}

/// Golden checkpoints of every variant, then the tiny ones.
pub fn every_folder() -> Vec<PathBuf> {
    let goldens = Golden::VARIANTS.iter().filter(|v| golden(v).is_some()).map(|v| Golden::root().join(v));
    goldens.chain(TINY.map(tiny_folder)).collect()
}

/// `n` token ids, different for each seed, that are neither special nor placeholders.
pub fn tokens(stepper: &Stepper, seed: u64, n: usize) -> Vec<u32> {
    let vocab = stepper.model().config.vocab as u64;
    let mut random = Random::new(seed);
    (0..n).map(|_| (3 + random.next() % (vocab - 20)) as u32).collect()
}

/// `n` values of about unit size.
pub fn values(seed: u64, n: usize) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..n).map(|_| (random.next() % 2001) as f32 / 577.0 - 1.73).collect()
}

/// SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x9e37_79b9)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Logits of the last head row.
pub fn logits(stepper: &mut Stepper) -> Vec<f32> {
    let mut out = vec![0.0; stepper.model().config.vocab];
    stepper.logits_into(&mut out).expect("a step with a head ran");
    out
}

/// Logits of every row of a prompt, fed from the cursor on, and what each batch captured.
pub fn score(stepper: &mut Stepper, prompt: &Prompt) -> (Vec<f32>, Vec<Outcome>) {
    let (mut all, mut outcomes) = (Vec::new(), Vec::new());
    stepper
        .score(prompt, &mut |_, row| all.extend_from_slice(row), &mut |_, o| outcomes.push(o.clone()))
        .expect("the prompt runs");
    (all, outcomes)
}

/// Every value has the same bits, and is finite.
#[track_caller]
pub fn assert_bits(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}: as many values");
    assert!(!found.is_empty(), "{what}: nothing to compare");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!(b.is_finite(), "{what}: value {i} is {b}");
        assert!(a.to_bits() == b.to_bits(), "{what}: value {i} of {} is {a}, not {b}", found.len());
    }
}

/// Whether all bits agree.
pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// A golden; `None` only for a binary that was taken elsewhere with a part of them, and then it says so.
pub fn golden(variant: &str) -> Option<Golden> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens");
    if !workspace.is_dir() && !Golden::root().join(variant).is_dir() {
        println!("skipped: golden {variant} was not brought along");
        return None;
    }
    Some(Golden::variant(variant).expect("the golden is whole"))
}

/// A golden's token ids.
pub fn golden_ids(golden: &Golden, name: &str) -> Vec<u32> {
    golden.tokens(name).expect("tokens").iter().map(|&t| t as u32).collect()
}

/// A golden's prompt with soft rows.
pub fn golden_soft(golden: &Golden) -> Prompt {
    let positions = golden.i64("soft.positions").expect("positions");
    let types = golden.i64("soft.token_types").expect("types");
    let embeds = golden.f32("soft.embeds").expect("embeds");
    let soft = positions.values.iter().enumerate().map(|(i, &p)| SoftSpan {
        start: p as usize,
        values: embeds.at(i).to_vec(),
        kind: if types.values[p as usize] == 3 { SoftKind::Audio } else { SoftKind::Vision },
    });
    Prompt { tokens: golden_ids(golden, "soft.input_ids"), soft: soft.collect() }
}

/// What a folder stands for, in messages.
pub fn name(folder: &Path) -> String {
    folder.file_name().map_or(String::new(), |n| n.to_string_lossy().into_owned())
}

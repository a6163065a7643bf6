//! A device for the scheduler's tests that computes nothing and still depends on everything: its "keys" are
//! hashes that chain through the pages, and a token is a hash of every key that its row sees. A page that is
//! missing, stale, somebody else's or out of order changes the answer.
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod drive;

use lapidary_engine::generate::FinishReason;
use lapidary_engine::scheduler::{EndReason, Plan, Produced, Submission};
use lapidary_engine::{Prompt, SoftKind, SoftSpan};
use lapidary_model::{Config, Family, LayerConfig, Rope, VisionBlocks};
use lapidary_ops::{
    Activation, Batch, GROUPS, Group, KvFormat, KvGroupPlan, KvLayerShape, KvPlan, PAGE_TOKENS,
};

pub const VOCAB: usize = 211;
pub const HIDDEN: usize = 3;
pub const STOP: u32 = 7;
/// One head row in so many fails.
const FAILS: u64 = 401;

/// SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(mix(seed))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

fn mix(x: u64) -> u64 {
    let z = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A model as far as prompts are checked against it.
pub fn config(window: usize, vision: VisionBlocks) -> Config {
    let layer = |group| LayerConfig {
        group,
        kv_heads: 1,
        head_dim: 2,
        intermediate: 5,
        donor: None,
        values_are_keys: false,
    };
    let rope = Rope { theta: 1e4, rotated: 1.0, factor: 1.0 };
    Config {
        family: Family::Gemma4,
        model_type: "fake".into(),
        vocab: VOCAB,
        hidden: HIDDEN,
        heads: 1,
        layers: vec![layer(Group::Sliding), layer(Group::Full)],
        window,
        max_positions: 1 << 20,
        eps: 1e-6,
        final_softcap: None,
        attn_softcap: None,
        score_scale: 1.0,
        activation: Activation::GeluTanh,
        rope: [rope, rope],
        vision,
        moe: None,
        per_layer: None,
        norm_plus_one: false,
        value_norm: false,
        layer_scalar: false,
        tied: true,
        pad: 0,
        bos: 2,
        eos: vec![STOP],
        placeholders: vec![5],
        notes: Vec::new(),
    }
}

pub fn kv_plan(window: usize, pages: [usize; GROUPS]) -> KvPlan {
    let groups = [Some(window), None].into_iter().zip(pages).map(|(window, pages)| KvGroupPlan {
        layers: vec![KvLayerShape { kv_heads: 1, head_dim: 2 }],
        format: KvFormat::F32,
        pages,
        window,
    });
    KvPlan { groups: groups.collect::<Vec<_>>().try_into().expect("two groups") }
}

/// What a row brings: a token, or an embedding.
fn content(token: i32, soft: Option<&[f32]>) -> u64 {
    match soft {
        None => mix(token as u64 + 1),
        Some(values) => values.iter().fold(77, |h, v| mix(h ^ u64::from(v.to_bits()))),
    }
}

/// A key follows from what the row brings and the key before it.
fn key(content: u64, position: usize, before: u64) -> u64 {
    mix(content ^ mix(position as u64) ^ before.rotate_left(17))
}

/// A token follows from all keys that are seen.
fn token(keys: impl Iterator<Item = u64>) -> Produced {
    let hash = keys.fold(0u64, |h, k| mix(h.wrapping_mul(31) ^ k));
    match hash % FAILS {
        0 => Produced::Failed,
        _ => Produced::Token((mix(hash) % VOCAB as u64) as u32),
    }
}

pub struct FakeDevice {
    plan: KvPlan,
    window: usize,
    cells: [Vec<u64>; GROUPS],
}

impl FakeDevice {
    pub fn new(plan: &KvPlan) -> FakeDevice {
        let cells = [0, 1].map(|g| vec![0; plan.groups[g].pages * PAGE_TOKENS]);
        FakeDevice { plan: plan.clone(), window: plan.groups[0].window.expect("a window"), cells }
    }

    /// Runs a batch: checks it, writes all keys, then answers the head rows.
    pub fn run(&mut self, batch: &Batch, plan: &Plan) -> Vec<Produced> {
        batch.check(&self.plan, HIDDEN, VOCAB, VOCAB).expect("the batch is sound");
        assert_eq!(batch.spans.len(), plan.entries.len());
        let mut written = [0, 1].map(|_| Vec::new());
        let mut soft = batch.soft_rows.iter().zip(batch.soft_values.chunks_exact(HIDDEN)).peekable();
        for (span, entry) in batch.spans.iter().zip(&plan.entries) {
            assert_eq!(span.first_row..span.first_row + span.rows, entry.rows);
            for row in entry.rows.clone() {
                let position = batch.positions[row] as usize;
                assert_eq!(position, entry.positions.start + row - span.first_row, "rows are in order");
                let embedding = soft.next_if(|(r, _)| **r as usize == row).map(|(_, values)| values);
                let content = content(batch.tokens[row], embedding);
                for (g, written) in written.iter_mut().enumerate() {
                    let ahead = batch.visible_to[g][row] as usize;
                    assert!(ahead <= entry.positions.end, "a vision block is split");
                    let before = match position {
                        0 => 0,
                        p => self.cells[g][cell(batch, span, g, p - 1)],
                    };
                    let at = cell(batch, span, g, position);
                    assert!(at >= PAGE_TOKENS, "page 0 belongs to nobody");
                    self.cells[g][at] = key(content, position, before);
                    written.push(at);
                }
            }
        }
        for written in &mut written {
            let count = written.len();
            written.sort_unstable();
            written.dedup();
            assert_eq!(written.len(), count, "two rows are written to one place");
        }
        let heads: Vec<usize> =
            plan.entries.iter().filter(|e| e.head.is_some()).map(|e| e.rows.end - 1).collect();
        assert_eq!(heads, batch.heads.iter().map(|&h| h as usize).collect::<Vec<_>>());
        let spans = batch.spans.iter().zip(&plan.entries).filter(|(_, e)| e.head.is_some());
        let produced = spans.map(|(span, entry)| {
            let position = entry.positions.end - 1;
            let keys = (0..GROUPS).flat_map(|g| {
                let first = if g == 0 { (position + 1).saturating_sub(self.window) } else { 0 };
                (first..position + 1).map(move |p| (g, p))
            });
            token(keys.map(|(g, p)| self.cells[g][cell(batch, span, g, p)]))
        });
        produced.collect()
    }
}

fn cell(batch: &Batch, span: &lapidary_ops::RowSpan, g: usize, position: usize) -> usize {
    let table = span.tables[g];
    let block = position / PAGE_TOKENS;
    assert!(block >= table.first_block && block - table.first_block < table.count, "position {position}");
    batch.pages[g][table.start + block - table.first_block] as usize * PAGE_TOKENS + position % PAGE_TOKENS
}

/// What a request gets when it is alone, computed without a scheduler or pages.
pub fn alone(request: &Submission, window: usize, context: usize) -> (Vec<u32>, EndReason) {
    let mut contents: Vec<u64> = request.prompt.tokens.iter().map(|&t| content(lookup(t), None)).collect();
    for span in &request.prompt.soft {
        for (i, values) in span.values.chunks_exact(HIDDEN).enumerate() {
            contents[span.start + i] = content(0, Some(values));
        }
    }
    let mut keys = Vec::new();
    let mut answer = Vec::new();
    loop {
        for (position, &content) in contents.iter().enumerate().skip(keys.len()) {
            keys.push(key(content, position, keys.last().copied().unwrap_or(0)));
        }
        let window = &keys[keys.len().saturating_sub(window)..];
        match token(window.iter().chain(&keys).copied()) {
            Produced::Failed => return (answer, EndReason::Failed { position: keys.len() - 1 }),
            Produced::Token(t) if request.stop_ids.contains(&t) => {
                return (answer, EndReason::Done(FinishReason::Stop(t)));
            }
            Produced::Token(t) => {
                answer.push(t);
                contents.push(content(lookup(t), None));
            }
        }
        if answer.len() == request.max_tokens {
            return (answer, EndReason::Done(FinishReason::Length));
        }
        if contents.len() > context {
            return (answer, EndReason::Done(FinishReason::ContextFull));
        }
    }
}

fn lookup(token: u32) -> i32 {
    if token == 5 { 0 } else { token as i32 }
}

/// A request of `len` prompt tokens.
pub fn text(random: &mut Random, len: usize, max_tokens: usize) -> Submission {
    let tokens = (0..len).map(|_| random.below(VOCAB) as u32).collect();
    Submission { prompt: Prompt { tokens, soft: Vec::new() }, max_tokens, ..Submission::default() }
}

/// Puts runs of soft tokens, of at most `longest` rows, into a prompt.
pub fn soften(random: &mut Random, request: &mut Submission, longest: usize) {
    let len = request.prompt.tokens.len();
    let mut start = random.below(len);
    while start < len {
        let rows = (1 + random.below(longest)).min(len - start);
        let values = (0..rows * HIDDEN).map(|_| random.below(1000) as f32 / 8.0).collect();
        let kind = if random.once_in(3) { SoftKind::Audio } else { SoftKind::Vision };
        request.prompt.soft.push(SoftSpan { start, values, kind });
        // Adjacent vision runs would be one block.
        start += rows + 1 + random.below(len);
    }
}

/// A request of `len` tokens whose answer alone is `answer` tokens long and ends by its length.
pub fn lasting(random: &mut Random, len: usize, answer: usize, window: usize, context: usize) -> Submission {
    loop {
        let request = text(random, len, answer);
        if alone(&request, window, context).0.len() == answer {
            return request;
        }
    }
}

/// A request that begins as an earlier one did: the same again, cut and gone on with otherwise, or gone on with
/// after its answer.
pub fn follow(random: &mut Random, before: &Submission, answer: &[u32], context: usize) -> Submission {
    let mut tokens = before.prompt.tokens.clone();
    let keep = match random.below(4) {
        0 => tokens.len(),
        1 => {
            tokens.extend(answer);
            tokens.len()
        }
        _ => 1 + random.below(tokens.len()),
    };
    tokens.truncate(keep.min(context));
    let len = tokens.len();
    let tail = random.below(40).min(context - len);
    tokens.extend((0..tail).map(|_| random.below(VOCAB) as u32));
    let mut soft = Vec::new();
    for span in before.prompt.soft.iter().filter(|s| s.start < len) {
        let rows = (span.values.len() / HIDDEN).min(len - span.start);
        soft.push(SoftSpan { values: span.values[..rows * HIDDEN].to_vec(), ..*span });
    }
    let longest = if random.once_in(8) { 150 } else { 40 };
    let max_tokens = 1 + random.below(longest);
    Submission { prompt: Prompt { tokens, soft }, max_tokens, ..Submission::default() }
}

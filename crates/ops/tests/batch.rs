//! A batch is checked before a kernel follows any index in it.

use lapidary_ops::{
    Batch, BatchError, GROUPS, KvFormat, KvGroupPlan, KvLayerShape, KvPlan, PAGE_TOKENS, PageTable, RowSpan,
    TailRows, TapPoint,
};

const WIDTH: usize = 3;
const VOCAB: usize = 50;
const PER_LAYER_VOCAB: usize = 40;

fn plan() -> KvPlan {
    let layer = KvLayerShape { kv_heads: 1, head_dim: 4 };
    let group = |pages, window| KvGroupPlan { layers: vec![layer], format: KvFormat::F32, pages, window };
    KvPlan { groups: [group(5, Some(7)), group(6, None)] }
}

/// Two sequences: positions 40, 41 (pages of blocks 1 and 0, 1), and position 3.
fn batch() -> Batch {
    let table = |start, count, first_block| PageTable { start, count, first_block };
    Batch {
        tokens: vec![4, 49, 7],
        per_layer_tokens: vec![4, 39, 7],
        positions: vec![40, 41, 3],
        spans: vec![
            RowSpan { first_row: 0, rows: 2, tables: [table(0, 1, 1), table(0, 2, 0)] },
            RowSpan { first_row: 2, rows: 1, tables: [table(1, 1, 0), table(2, 1, 0)] },
        ],
        visible_to: [vec![42, 42, 4], vec![41, 42, 4]],
        pages: [vec![1, 4], vec![1, 2, 5]],
        soft_rows: vec![1],
        soft_values: vec![0.5; WIDTH],
        heads: vec![0, 2],
        ..Batch::default()
    }
}

fn check(b: &Batch) -> Result<(), BatchError> {
    b.check(&plan(), WIDTH, VOCAB, PER_LAYER_VOCAB)
}

#[test]
fn a_good_batch_passes_and_its_shape_is_read_off() {
    let mut b = batch();
    check(&b).unwrap();
    let shape = b.shape(9, TailRows::All);
    assert_eq!((shape.rows, shape.head_rows, shape.layers), (3, 2, (0, 9)));
    assert_eq!((shape.has_soft, shape.has_taps, shape.tail), (true, false, TailRows::All));
    b.taps.points.push(TapPoint::Embed);
    assert!(b.shape(9, TailRows::Heads).has_taps);
    b.clear();
    assert_eq!(check(&b), Err(BatchError::Empty));
    assert!(b.taps.points.is_empty() && b.pages.iter().all(Vec::is_empty));
}

/// What is done to the good batch, and what is said about it.
type Case = (&'static str, fn(&mut Batch), fn(&BatchError) -> bool);

const CASES: &[Case] = &[
    (
        "a per-layer id too few",
        |b| b.per_layer_tokens.truncate(2),
        |e| matches!(e, BatchError::Length { column: "per_layer_tokens", found: 2, rows: 3 }),
    ),
    (
        "a position too many",
        |b| b.positions.push(4),
        |e| matches!(e, BatchError::Length { column: "positions", found: 4, rows: 3 }),
    ),
    (
        "sliding bounds too few",
        |b| b.visible_to[0].truncate(2),
        |e| matches!(e, BatchError::Length { column: "visible_to sliding", .. }),
    ),
    (
        "full bounds too few",
        |b| b.visible_to[1].truncate(2),
        |e| matches!(e, BatchError::Length { column: "visible_to full", .. }),
    ),
    (
        "a token below 0",
        |b| b.tokens[1] = -1,
        |e| matches!(e, BatchError::Token { row: 1, token: -1, vocab: VOCAB }),
    ),
    (
        "the first token outside",
        |b| b.tokens[1] = 50,
        |e| matches!(e, BatchError::Token { row: 1, token: 50, vocab: VOCAB }),
    ),
    (
        "the first per-layer id outside",
        |b| b.per_layer_tokens[2] = 40,
        |e| matches!(e, BatchError::Token { row: 2, token: 40, vocab: PER_LAYER_VOCAB }),
    ),
    ("a page below 0", |b| b.pages[0][0] = -1, |e| matches!(e, BatchError::PageRange { page: -1, .. })),
    (
        "the first sliding page outside",
        |b| b.pages[0][0] = 5,
        |e| matches!(e, BatchError::PageRange { page: 5, pages: 5, group: "sliding" }),
    ),
    (
        "the first full page outside",
        |b| b.pages[1][2] = 6,
        |e| matches!(e, BatchError::PageRange { page: 6, pages: 6, group: "full" }),
    ),
    ("no sequence", |b| b.spans.clear(), |e| matches!(e, BatchError::Spans { row: 0 })),
    ("a row in no sequence", |b| b.spans[0].rows = 1, |e| matches!(e, BatchError::Spans { row: 1 })),
    ("a row in two sequences", |b| b.spans[1].first_row = 1, |e| matches!(e, BatchError::Spans { row: 2 })),
    ("a sequence of no rows", |b| b.spans[0].rows = 0, |e| matches!(e, BatchError::Spans { row: 0 })),
    ("a sequence beyond the rows", |b| b.spans[1].rows = 2, |e| matches!(e, BatchError::Spans { row: 2 })),
    (
        "a sequence of all the numbers",
        |b| b.spans[1].rows = usize::MAX,
        |e| matches!(e, BatchError::Spans { row: 2 }),
    ),
    ("the last row in no sequence", |b| b.spans.truncate(1), |e| matches!(e, BatchError::Spans { row: 2 })),
    ("a position below 0", |b| b.positions[2] = -1, |e| matches!(e, BatchError::Page { row: 2, .. })),
    (
        "the smallest position",
        |b| b.positions[2] = i32::MIN,
        |e| matches!(e, BatchError::Page { row: 2, .. }),
    ),
    ("the largest position", |b| b.positions[2] = i32::MAX, |e| matches!(e, BatchError::Page { row: 2, .. })),
    (
        "a bound before the row itself",
        |b| b.visible_to[1][0] = 40,
        |e| matches!(e, BatchError::Page { row: 0, position: 40, group: "full", .. }),
    ),
    (
        "a bound behind the last page",
        |b| b.visible_to[0][1] = 65,
        |e| matches!(e, BatchError::Page { row: 1, missing: 64, group: "sliding", .. }),
    ),
    (
        "a table beyond the pages",
        |b| b.spans[1].tables[0].count = 2,
        |e| matches!(e, BatchError::Page { row: 2, group: "sliding", .. }),
    ),
    (
        "a table that begins after the window",
        |b| b.positions[0] = 37,
        |e| {
            // 31 is the first of the 7 keys that a row at 37 sees, and block 0 has no page.
            matches!(e, BatchError::Page { row: 0, position: 37, missing: 31, group: "sliding" })
        },
    ),
    (
        "a table without the first block",
        |b| {
            b.spans[0].tables[1] = PageTable { start: 1, count: 1, first_block: 1 };
        },
        |e| matches!(e, BatchError::Page { row: 0, missing: 0, group: "full", .. }),
    ),
    (
        "a table that ends before the row",
        |b| b.spans[0].tables[1].count = 1,
        |e| matches!(e, BatchError::Page { row: 0, missing: 40, group: "full", .. }),
    ),
    ("heads out of order", |b| b.heads = vec![2, 0], |e| matches!(e, BatchError::Head { row: 0 })),
    ("a head twice", |b| b.heads = vec![2, 2], |e| matches!(e, BatchError::Head { row: 2 })),
    ("a head below 0", |b| b.heads = vec![-1], |e| matches!(e, BatchError::Head { row: -1 })),
    ("the first head outside", |b| b.heads = vec![3], |e| matches!(e, BatchError::Head { row: 3 })),
    ("a soft row below 0", |b| b.soft_rows[0] = -1, |e| matches!(e, BatchError::Soft { row: -1 })),
    ("the first soft row outside", |b| b.soft_rows[0] = 3, |e| matches!(e, BatchError::Soft { row: 3 })),
    ("a soft value too few", |b| b.soft_values.truncate(2), |e| matches!(e, BatchError::Soft { row: 1 })),
    (
        "a soft value that is no number",
        |b| b.soft_values[2] = f32::NAN,
        |e| matches!(e, BatchError::Soft { row: 1 }),
    ),
    (
        "an infinite soft value",
        |b| b.soft_values[0] = f32::NEG_INFINITY,
        |e| matches!(e, BatchError::Soft { row: 1 }),
    ),
];

#[test]
fn every_index_that_a_kernel_would_follow_is_checked() {
    for (what, change, right) in CASES {
        let mut b = batch();
        change(&mut b);
        let error = check(&b).expect_err(what);
        assert!(right(&error), "{what}: {error:?}");
    }
}

#[test]
fn a_group_without_layers_needs_no_pages() {
    let mut plan = plan();
    plan.groups[0].layers.clear();
    let mut b = batch();
    b.pages[0].clear();
    b.spans.iter_mut().for_each(|s| s.tables[0] = PageTable::default());
    b.check(&plan, WIDTH, VOCAB, PER_LAYER_VOCAB).unwrap();
    assert!(check(&b).is_err());
}

/// Bytes of pages and cells, written out.
#[test]
fn the_layout_of_a_pool() {
    assert_eq!((PAGE_TOKENS, GROUPS), (32, 2));
    let shapes = [KvLayerShape { kv_heads: 2, head_dim: 64 }, KvLayerShape { kv_heads: 1, head_dim: 96 }];
    for (format, rows) in [
        (KvFormat::F32, [256, 384]),
        (KvFormat::F16, [128, 192]),
        (KvFormat::Bf16, [128, 192]),
        (KvFormat::Q8_0, [68, 102]),
    ] {
        let group = KvGroupPlan { layers: shapes.to_vec(), format, pages: 7, window: None };
        for (i, row) in rows.into_iter().enumerate() {
            assert_eq!(format.row_bytes(shapes[i].head_dim), row, "{}", format.name());
            let page = 2 * shapes[i].kv_heads * 32 * row;
            assert_eq!(group.page_bytes(i), page);
            assert_eq!(group.cell_offset(i, 3, 5), 3 * page + 5 * row);
        }
        assert_eq!(group.bytes(), 7 * (group.page_bytes(0) + group.page_bytes(1)));
    }
}

/// A backend that knows nothing of steering says so by name, and takes a set back that it never had.
#[test]
fn a_backend_without_steering_refuses_a_set() {
    use lapidary_ops::*;
    #[derive(Debug)]
    struct Plain;
    impl Backend for Plain {
        fn report(&self) -> DeviceReport {
            DeviceReport { backend: "plain", ..DeviceReport::default() }
        }
        fn pack(&mut self, _: &[TensorView<'_>], _: usize) -> Result<Mat> {
            unreachable!("only the defaults are called")
        }
        fn vector(&mut self, _: &str, _: &[f32]) -> Result<Gain> {
            unreachable!("only the defaults are called")
        }
        fn activation(&mut self, _: ActSpec) -> Result<Act> {
            unreachable!("only the defaults are called")
        }
        fn kv(&mut self, _: &KvPlan) -> Result<()> {
            unreachable!("only the defaults are called")
        }
        fn upload(&mut self, _: &Batch) -> Result<()> {
            unreachable!("only the defaults are called")
        }
        fn run(&mut self, _: &BatchShape, _: &(dyn Fn(&mut dyn Ops) + Sync)) -> Result<()> {
            unreachable!("only the defaults are called")
        }
        fn collect(&mut self) -> Result<Outcome> {
            unreachable!("only the defaults are called")
        }
        fn read(&mut self, _: Act, _: usize, _: &mut Vec<f32>) -> Result<()> {
            unreachable!("only the defaults are called")
        }
        fn kv_store(&mut self, _: KvRef, _: usize, _: usize, _: &[f32], _: &[f32]) -> Result<()> {
            unreachable!("only the defaults are called")
        }
        fn kv_load(&mut self, _: KvRef, _: usize, _: usize, _: &mut [f32], _: &mut [f32]) -> Result<()> {
            unreachable!("only the defaults are called")
        }
        fn memory(&self) -> MemoryUse {
            MemoryUse::default()
        }
    }
    let edit = SteerEdit::new(0, SteerMode::Add, 1.0, &[3.0, 4.0]).unwrap();
    assert_eq!((edit.norm, &edit.unit[..]), (5.0, &[0.6, 0.8][..]));
    let set = SteerSet { edits: vec![edit] };
    let error = Plain.steer_set(0, Some(&set)).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { device, .. } if device == "plain"), "{error}");
    assert!(error.to_string().contains("steering"), "{error}");
    Plain.steer_set(0, None).unwrap();
}

//! Each verb on numbers that can be worked out by hand.

use lapidary_ops::{
    Act, ActKind, ActRows, ActSpec, Activation, AttnSpec, Backend, Batch, CloseSpec, Error, ExpertSpec,
    Format, Gain, Group, KvFormat, KvGroupPlan, KvLayerShape, KvPlan, KvRef, KvSpec, Mat, Norm, Ops,
    PageTable, PerLayerSpec, QkvSpec, RouteSpec, RowSpan, Scales, TailRows, TapPoint, TensorView,
    ValueSource,
};
use lapidary_reference::ReferenceBackend;

const SLIDING: KvRef = KvRef { group: Group::Sliding, index: 0, writes: true };
const FULL: KvRef = KvRef { group: Group::Full, index: 0, writes: true };

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn view<'a>(name: &str, rows: usize, cols: usize, bytes: &'a [u8]) -> TensorView<'a> {
    TensorView { name: name.into(), rows, cols, format: Format::F32, bytes, scales: Scales::None }
}

/// A backend and short ways to fill and read it.
#[derive(Default)]
struct Bench {
    on: ReferenceBackend,
}

impl Bench {
    fn mat(&mut self, rows: usize, cols: usize, values: &[f32]) -> Mat {
        self.on.pack(&[view("m", rows, cols, &bytes(values))], rows).unwrap()
    }

    fn gain(&mut self, values: &[f32]) -> Gain {
        self.on.vector("g", values).unwrap()
    }

    fn act(&mut self, width: usize) -> Act {
        let (kind, rows) = (ActKind::F32, ActRows::Batch);
        self.on.activation(ActSpec { name: "a", width, kind, rows, max_rows: 8 }).unwrap()
    }

    /// An activation with these values. Only verbs write buffers, so they go in as soft rows.
    fn filled(&mut self, batch: &Batch, width: usize, values: &[f32]) -> Act {
        let act = self.act(width);
        let mut soft = batch.clone();
        soft.soft_rows = (0..batch.tokens.len() as i32).collect();
        soft.soft_values = values.to_vec();
        self.run(&soft, &|ops| ops.inject_soft(act));
        act
    }

    fn run(&mut self, batch: &Batch, program: &(dyn Fn(&mut dyn Ops) + Sync)) -> lapidary_ops::Outcome {
        self.on.upload(batch).unwrap();
        self.on.run(&batch.shape(1, TailRows::Heads), program).unwrap();
        self.on.collect().unwrap()
    }

    fn read(&mut self, act: Act, rows: usize) -> Vec<f32> {
        let mut out = Vec::new();
        self.on.read(act, rows, &mut out).unwrap();
        out
    }

    fn kv(&mut self, kv_heads: usize, head_dim: usize, window: usize, format: KvFormat) {
        let layers = vec![KvLayerShape { kv_heads, head_dim }];
        let group = |window| KvGroupPlan { layers: layers.clone(), format, pages: 5, window };
        self.on.kv(&KvPlan { groups: [group(Some(window)), group(None)] }).unwrap();
    }
}

/// One sequence at the given positions, tokens equal to the row, pages 3 and 1 in this order from block 0 in
/// both groups. The tables start at different places, so that one taken for the other leads elsewhere.
fn batch(positions: std::ops::Range<i32>) -> Batch {
    let rows = positions.len();
    let table = |start| PageTable { start, count: 2, first_block: 0 };
    Batch {
        tokens: (0..rows as i32).collect(),
        per_layer_tokens: (0..rows as i32).collect(),
        visible_to: [positions.clone().map(|p| p + 1).collect(), positions.clone().map(|p| p + 1).collect()],
        positions: positions.collect(),
        spans: vec![RowSpan { first_row: 0, rows, tables: [table(0), table(1)] }],
        pages: [vec![3, 1, 0], vec![0, 3, 1]],
        heads: vec![rows as i32 - 1],
        ..Batch::default()
    }
}

fn close(actual: &[f32], expected: &[f32]) {
    assert_eq!(actual.len(), expected.len());
    for (a, e) in actual.iter().zip(expected) {
        assert!(
            a.is_finite() && (a - e).abs() <= 1e-6 * (1.0 + e.abs()),
            "{actual:?}, expected {expected:?}"
        );
    }
}

#[test]
fn embed_scales_rows_and_soft_rows_stay_as_given() {
    let mut b = Bench::default();
    let table = b.mat(4, 3, &[0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
    let x = b.act(3);
    let mut batch = batch(0..3);
    batch.tokens = vec![3, 1, 0];
    (batch.soft_rows, batch.soft_values) = (vec![2], vec![0.5, -0.5, 0.25]);
    b.run(&batch, &|ops| {
        ops.embed(x, table, 10.0);
        ops.inject_soft(x);
    });
    assert_eq!(b.read(x, 3), [70.0, 80.0, 90.0, 10.0, 20.0, 30.0, 0.5, -0.5, 0.25]);
}

#[test]
fn linear_stacks_parts_and_takes_inputs_as_columns() {
    let mut b = Bench::default();
    let (top, bottom) = (bytes(&[1.0, 0.0, 2.0]), bytes(&[0.0, 1.0, 0.0, 1.0, 1.0, 1.0]));
    let w = b.on.pack(&[view("q", 1, 3, &top), view("k", 2, 3, &bottom)], 3).unwrap();
    let rows = batch(0..2);
    let x = b.filled(&rows, 3, &[1.0, 2.0, 3.0, -1.0, 0.0, 4.0]);
    let out = b.act(3);
    b.run(&rows, &|ops| ops.linear(out, x, w));
    assert_eq!(b.read(out, 2), [7.0, 2.0, 6.0, 7.0, 0.0, 3.0]);
}

#[test]
fn half_precision_matrices_decode_exactly() {
    let mut b = Bench::default();
    for (format, one_and_half) in [(Format::F16, [0x00, 0x3e]), (Format::Bf16, [0xc0, 0x3f])] {
        let view = TensorView { format, ..view("m", 1, 1, &one_and_half) };
        let mat = b.on.pack(&[view], 1).unwrap();
        assert_eq!(b.on.matrix(mat), [1.5]);
    }
}

#[test]
fn pack_refuses_what_cannot_be_a_matrix_by_name() {
    let mut b = Bench::default();
    let values = bytes(&[1.0, 2.0, 3.0, f32::NAN, 5.0, 6.0]);
    let message = |b: &mut Bench, parts: &[TensorView<'_>], group| {
        let error = b.on.pack(parts, group).unwrap_err();
        assert!(matches!(error, Error::Tensor { .. }), "{error}");
        error.to_string()
    };
    assert!(message(&mut b, &[view("short", 2, 4, &values)], 2).starts_with("short: "));
    let wide = [view("first", 1, 3, &values[..12]), view("second", 1, 2, &values[..8])];
    assert!(message(&mut b, &wide, 2).starts_with("second: "));
    assert!(message(&mut b, &[view("nan", 2, 3, &values)], 2).starts_with("nan: "));
    assert!(message(&mut b, &[view("odd", 3, 1, &values[..12])], 2).contains("groups of 2"));
    assert!(message(&mut b, &[], 1).contains("no parts"));
}

#[test]
fn a_norm_may_write_over_its_input() {
    let mut b = Bench::default();
    let rows = batch(0..2);
    let x = b.filled(&rows, 2, &[3.0, 4.0, 0.0, 2.0]);
    let gain = b.gain(&[1.0, 2.0]);
    b.run(&rows, &|ops| ops.rms_norm(x, x, Norm { gain, eps: 0.0 }));
    let (r, s) = (12.5f32.sqrt(), 2f32.sqrt());
    close(&b.read(x, 2), &[3.0 / r, 8.0 / r, 0.0, 4.0 / s]);
}

#[test]
fn geglu_gates_the_second_half_by_the_first() {
    let mut b = Bench::default();
    let rows = batch(0..1);
    let gate_up = b.filled(&rows, 4, &[1.0, -2.0, 10.0, 100.0]);
    let out = b.act(2);
    b.run(&rows, &|ops| ops.geglu(out, gate_up, Activation::Silu));
    close(&b.read(out, 1), &[7.310_586, -23.840_584]);
    b.run(&rows, &|ops| ops.geglu(out, gate_up, Activation::GeluTanh));
    close(&b.read(out, 1), &[8.411_92, -4.540_23]);
}

#[test]
fn rope_angles_are_position_times_frequency() {
    let mut b = Bench::default();
    let f = b.gain(&[1.0, 0.5, 0.0]);
    let table = b.act(6);
    b.run(&batch(2..4), &|ops| ops.rope_table(table, f));
    let expected = |p: f32| [p.cos(), (p / 2.0).cos(), 1.0, p.sin(), (p / 2.0).sin(), 0.0];
    close(&b.read(table, 2), &[expected(2.0), expected(3.0)].concat());
}

/// A table whose rows turn pair 0 by a quarter and pair 1 not at all.
fn quarter_turn(b: &mut Bench, rows: &Batch) -> Act {
    b.filled(rows, 4, &[0.0, 1.0, 1.0, 0.0].repeat(rows.tokens.len()))
}

#[test]
fn qkv_finish_rotates_queries_and_keys_and_norms_values() {
    let mut b = Bench::default();
    b.kv(1, 4, 9, KvFormat::F32);
    let rows = batch(33..34);
    let rope = quarter_turn(&mut b, &rows);
    let (ones, twos) = (b.gain(&[1.0; 4]), b.gain(&[2.0; 4]));
    // Two query heads, one key head, one value head; every head has mean square 4.
    let q = [2.0, -2.0, 2.0, 2.0, 4.0, 0.0, 0.0, 0.0];
    let k_and_v = [0.0, 4.0, 0.0, 0.0, 0.0, 0.0, -4.0, 0.0];
    let qkv_values = [q, k_and_v].concat();
    let spec = |values, v_norm_eps| QkvSpec {
        heads: 2,
        kv_heads: 1,
        head_dim: 4,
        q_norm: Norm { gain: ones, eps: 0.0 },
        kv: Some(KvSpec { k_norm: Norm { gain: twos, eps: 0.0 }, values, v_norm_eps, cache: FULL }),
        rope,
    };
    let qkv = b.filled(&rows, 16, &qkv_values);
    b.run(&rows, &|ops| ops.qkv_finish(qkv, &spec(ValueSource::Projected, Some(0.0))));
    // Normed [1, -1, 1, 1] and [2, 0, 0, 0]; the turn makes (a, b) at (0, 2) into (-b, a).
    assert_eq!(b.read(qkv, 1)[..8], [-1.0, -1.0, 1.0, 1.0, 0.0, 0.0, 2.0, 0.0]);
    let (mut k, mut v) = ([0.0; 4], [0.0; 4]);
    // Position 33 is place 1 of the second page.
    b.on.kv_load(FULL, 1, 1, &mut k, &mut v).unwrap();
    assert_eq!((k, v), ([0.0, 4.0, 0.0, 0.0], [0.0, 0.0, -2.0, 0.0]));

    // Values as projected, for families without a value norm.
    let qkv = b.filled(&rows, 16, &qkv_values);
    b.run(&rows, &|ops| ops.qkv_finish(qkv, &spec(ValueSource::Projected, None)));
    b.on.kv_load(FULL, 1, 1, &mut k, &mut v).unwrap();
    assert_eq!(v, [0.0, 0.0, -4.0, 0.0]);
}

#[test]
fn values_from_keys_are_the_raw_projection() {
    let mut b = Bench::default();
    b.kv(1, 4, 9, KvFormat::F32);
    let rows = batch(0..1);
    let rope = quarter_turn(&mut b, &rows);
    let (ones, uneven) = (b.gain(&[1.0; 4]), b.gain(&[3.0, 1.0, 1.0, 1.0]));
    let qkv = b.filled(&rows, 8, &[2.0, 0.0, 0.0, 0.0, 4.0, 4.0, 4.0, 4.0]);
    let kv = KvSpec {
        k_norm: Norm { gain: uneven, eps: 0.0 },
        values: ValueSource::Keys,
        v_norm_eps: Some(0.0),
        cache: SLIDING,
    };
    let q_norm = Norm { gain: ones, eps: 0.0 };
    let spec = QkvSpec { heads: 1, kv_heads: 1, head_dim: 4, q_norm, kv: Some(kv), rope };
    b.run(&rows, &|ops| ops.qkv_finish(qkv, &spec));
    let (mut k, mut v) = ([0.0; 4], [0.0; 4]);
    b.on.kv_load(SLIDING, 3, 0, &mut k, &mut v).unwrap();
    // The key is normed to [3, 1, 1, 1] and turned; the value knows neither gain nor turn.
    assert_eq!((k, v), ([-1.0, 1.0, 3.0, 1.0], [1.0; 4]));
}

/// Attention with keys of zero: every visible key weighs the same, so the output is the mean of the values.
/// The value at position `p` is `p`: which positions are visible can be read from the mean.
fn mean_of_visible(window: Option<usize>, cache: KvRef, visible_to: i32) -> f32 {
    let mut b = Bench::default();
    b.kv(1, 2, 7, KvFormat::F32);
    for p in 0..64usize {
        let page = [3, 1][p / 32];
        b.on.kv_store(cache, page, p % 32, &[0.0, 0.0], &[p as f32, 1.0]).unwrap();
    }
    let mut rows = batch(40..41);
    rows.visible_to[cache.group.index()] = vec![visible_to];
    let qkv = b.filled(&rows, 2, &[1.0, 1.0]);
    let out = b.act(2);
    let spec = AttnSpec { heads: 1, kv_heads: 1, head_dim: 2, scale: 1.0, softcap: None, window, cache };
    b.run(&rows, &|ops| ops.attention(out, qkv, &spec));
    let out = b.read(out, 1);
    close(&out[1..], &[1.0]);
    out[0]
}

#[test]
fn a_window_of_w_shows_w_keys_with_the_row_itself() {
    // Positions 34 ..= 40.
    close(&[mean_of_visible(Some(7), SLIDING, 41)], &[37.0]);
    close(&[mean_of_visible(Some(1), SLIDING, 41)], &[40.0]);
    // A window longer than the past starts at 0.
    close(&[mean_of_visible(Some(500), SLIDING, 41)], &[20.0]);
    close(&[mean_of_visible(None, FULL, 41)], &[20.0]);
}

#[test]
fn the_window_cuts_the_past_side_only() {
    // A vision block up to position 44: 34 ..= 44 are visible.
    close(&[mean_of_visible(Some(7), SLIDING, 45)], &[39.0]);
    close(&[mean_of_visible(None, FULL, 47)], &[23.0]);
}

#[test]
fn attention_weighs_by_score_and_shares_heads_in_groups() {
    let mut b = Bench::default();
    b.kv(2, 2, 9, KvFormat::F32);
    // Head 0 scores ln 3 more at position 1; head 1's values are ten times larger.
    let ln3 = 3f32.ln();
    b.on.kv_store(FULL, 3, 0, &[0.0, 0.0, 0.0, 0.0], &[1.0, 2.0, 10.0, 20.0]).unwrap();
    b.on.kv_store(FULL, 3, 1, &[ln3, 0.0, 0.0, ln3], &[5.0, 6.0, 50.0, 60.0]).unwrap();
    let rows = batch(1..2);
    // Four query heads on two kv heads: 0 and 1 read head 0, 2 and 3 read head 1.
    let qkv = b.filled(&rows, 8, &[1.0, 0.0, 0.0, 1.0, 0.0, 1.0, -1.0, -1.0]);
    let out = b.act(8);
    let spec = |softcap, scale| AttnSpec {
        heads: 4,
        kv_heads: 2,
        head_dim: 2,
        scale,
        softcap,
        window: None,
        cache: FULL,
    };
    b.run(&rows, &|ops| ops.attention(out, qkv, &spec(None, 1.0)));
    // Weights (1/4, 3/4), (1/2, 1/2), (1/4, 3/4), (3/4, 1/4).
    close(&b.read(out, 1), &[4.0, 5.0, 3.0, 4.0, 40.0, 50.0, 20.0, 30.0]);
    // Twice the scale: weights (1/10, 9/10) for head 0.
    b.run(&rows, &|ops| ops.attention(out, qkv, &spec(None, 2.0)));
    close(&b.read(out, 1)[..2], &[4.6, 5.6]);
    // tanh(ln 3) = (9 - 1) / (9 + 1).
    b.run(&rows, &|ops| ops.attention(out, qkv, &spec(Some(1.0), 1.0)));
    let p = 0.8f32.exp() / (1.0 + 0.8f32.exp());
    close(&b.read(out, 1)[..1], &[1.0 + 4.0 * p]);
}

#[test]
fn a_moved_window_reads_the_pages_that_its_table_still_has() {
    let mut b = Bench::default();
    b.kv(1, 2, 3, KvFormat::F32);
    for (p, value) in [(63usize, 1.0), (64, 4.0), (65, 7.0)] {
        b.on.kv_store(SLIDING, [2, 4][p / 32 - 1], p % 32, &[0.0, 0.0], &[value, value]).unwrap();
    }
    let mut rows = batch(65..66);
    rows.pages[0] = vec![0, 2, 4];
    rows.spans[0].tables[0] = PageTable { start: 1, count: 2, first_block: 1 };
    let qkv = b.filled(&rows, 2, &[0.0, 0.0]);
    let out = b.act(2);
    let window = Some(3);
    let spec =
        AttnSpec { heads: 1, kv_heads: 1, head_dim: 2, scale: 1.0, softcap: None, window, cache: SLIDING };
    b.run(&rows, &|ops| ops.attention(out, qkv, &spec));
    close(&b.read(out, 1), &[4.0, 4.0]);
}

#[test]
fn rows_of_two_sequences_read_their_own_pages() {
    let mut b = Bench::default();
    b.kv(1, 2, 9, KvFormat::F32);
    let mut rows = batch(0..3);
    // Rows 0 and 1 are positions 0 and 1 of one sequence on page 3, row 2 is position 0 of another on page 1.
    let table = |start| PageTable { start, count: 1, first_block: 0 };
    rows.pages = [vec![0; 2], vec![3, 1]];
    rows.spans = vec![
        RowSpan { first_row: 0, rows: 2, tables: [table(0); 2] },
        RowSpan { first_row: 2, rows: 1, tables: [table(1); 2] },
    ];
    rows.positions = vec![0, 1, 0];
    rows.visible_to = [vec![1, 2, 1], vec![1, 2, 1]];
    let still = b.filled(&rows, 2, &[1.0, 0.0].repeat(3));
    let gain = b.gain(&[0.0; 2]);
    let norm = Norm { gain, eps: 1.0 };
    let qkv = b.filled(
        &rows,
        6,
        &[&[0.0, 0.0, 0.0, 0.0, 2.0, 3.0][..], &[0.0, 0.0, 0.0, 0.0, 4.0, 5.0], &[9.0; 6]].concat(),
    );
    let kv = KvSpec { k_norm: norm, values: ValueSource::Projected, v_norm_eps: None, cache: FULL };
    let spec = QkvSpec { heads: 1, kv_heads: 1, head_dim: 2, q_norm: norm, kv: Some(kv), rope: still };
    let attn =
        AttnSpec { heads: 1, kv_heads: 1, head_dim: 2, scale: 1.0, softcap: None, window: None, cache: FULL };
    let out = b.act(2);
    b.run(&rows, &|ops| {
        ops.qkv_finish(qkv, &spec);
        ops.attention(out, qkv, &attn);
    });
    close(&b.read(out, 3), &[2.0, 3.0, 3.0, 4.0, 9.0, 9.0]);
}

#[test]
fn route_renormalises_the_chosen_and_scales_last() {
    let mut b = Bench::default();
    let rows = batch(0..2);
    // Probabilities 1, 4, 2, 4, 1 of 12; then all equal.
    let (ln2, ln4) = (2f32.ln(), 4f32.ln());
    let logits = b.filled(&rows, 5, &[[0.0, ln4, ln2, ln4, 0.0], [1.0; 5]].concat());
    let out = b.act(6);
    let per_expert_scale = b.gain(&[1.0, 10.0, 3.0, 0.5, 7.0]);
    b.run(&rows, &|ops| ops.route(out, logits, &RouteSpec { experts: 5, top_k: 3, per_expert_scale }));
    let third = 1.0 / 3.0;
    close(&b.read(out, 2), &[1.0, 3.0, 2.0, 4.0, 0.2, 0.6, 0.0, 1.0, 2.0, third, 10.0 * third, 1.0]);
}

#[test]
fn experts_take_gate_rows_first_and_sum_by_weight() {
    let mut b = Bench::default();
    let rows = batch(0..1);
    // Expert 0: gate x0, up x1; expert 1: gate x1, up x0. Width 1, hidden 2.
    let gate_up = b.mat(4, 2, &[1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0]);
    let down = b.mat(4, 1, &[1.0, 2.0, 10.0, 20.0]);
    let x = b.filled(&rows, 2, &[1.0, -2.0]);
    let routes = b.filled(&rows, 4, &[1.0, 0.0, 0.5, 2.0]);
    let out = b.act(2);
    let spec = ExpertSpec { experts: 2, top_k: 2, width: 1, gate_up, down, activation: Activation::Silu };
    b.run(&rows, &|ops| ops.experts(out, x, routes, &spec));
    // silu(1) = 0.7310586, silu(-2) = -0.2384058.
    let (first, second) = (0.731_058_6 * -2.0, -0.238_405_85 * 1.0);
    close(&b.read(out, 1), &[2.0 * first + 5.0 * second, 4.0 * first + 10.0 * second]);
}

#[test]
fn per_layer_inputs_mix_the_normed_context_with_the_token_row() {
    let mut b = Bench::default();
    let mut rows = batch(0..1);
    rows.per_layer_tokens = vec![2];
    // Two layers of two; the layer is the slow axis.
    let table = b.mat(3, 4, &[0.0, 0.0, 0.0, 0.0, 9.0, 9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 4.0]);
    let gain = b.gain(&[1.0, 2.0]);
    let context = b.filled(&rows, 4, &[2.0, -2.0, 0.0, 0.5]);
    let spec = PerLayerSpec {
        table,
        layers: 2,
        width: 2,
        norm: Norm { gain, eps: 0.0 },
        context_scale: 0.25,
        token_scale: 10.0,
        mix_scale: 0.5,
    };
    b.run(&rows, &|ops| ops.per_layer_inputs(context, context, &spec));
    close(&b.read(context, 1), &[5.5, 9.0, 15.0, 20.0 + 2f32.sqrt()]);

    // The scale before the norm only shows beside epsilon: mean square (2/4)^2, eps 0.75 -> factor 1.
    let context = b.filled(&rows, 4, &[2.0, -2.0, 2.0, 2.0]);
    let spec = PerLayerSpec { norm: Norm { gain, eps: 0.75 }, token_scale: 0.0, mix_scale: 1.0, ..spec };
    b.run(&rows, &|ops| ops.per_layer_inputs(context, context, &spec));
    close(&b.read(context, 1), &[0.5, -1.0, 0.5, 1.0]);
}

#[test]
fn per_layer_gate_takes_its_layers_part() {
    let mut b = Bench::default();
    let rows = batch(0..1);
    let gate = b.filled(&rows, 2, &[1.0, -2.0]);
    let inputs = b.filled(&rows, 6, &[0.0, 0.0, 0.0, 0.0, 10.0, 100.0]);
    let out = b.act(2);
    b.run(&rows, &|ops| ops.per_layer_gate(out, gate, inputs, 2, Activation::GeluTanh));
    close(&b.read(out, 1), &[8.411_92, -4.540_23]);
}

#[test]
fn kept_rows_are_what_later_verbs_and_taps_see() {
    let mut b = Bench::default();
    let mut rows = batch(0..4);
    rows.heads = vec![1, 3];
    rows.taps.points = vec![TapPoint::FinalNorm, TapPoint::Mlp(5)];
    let table = b.mat(4, 1, &[10.0, 11.0, 12.0, 13.0]);
    let x = b.filled(&rows, 2, &[0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]);
    let (head, logits, again) = (b.mat(3, 2, &[1.0, 0.0, -1.0, 0.0, 1.0, 0.0]), b.act(3), b.act(1));
    let outcome = b.run(&rows, &|ops| {
        ops.keep_rows(&[x]);
        ops.embed(again, table, 1.0);
        ops.tap(TapPoint::FinalNorm, x);
        ops.tap(TapPoint::Embed, x);
        ops.logits(logits, x, head, Some(2.0));
        ops.argmax(logits);
    });
    // Embed was not asked for and Mlp(5) is never reached.
    assert_eq!(outcome.taps.len(), 1);
    let tap = &outcome.taps[0];
    assert_eq!((tap.point, tap.rows, tap.width), (TapPoint::FinalNorm, 2, 2));
    assert_eq!(tap.values, [1.0, 1.5, 3.0, 3.5]);
    assert_eq!(b.read(again, 2), [11.0, 13.0]);
    let (a, c) = (2.0 * 0.5f32.tanh(), 2.0 * 1.5f32.tanh());
    close(&b.read(logits, 2), &[a, -a, a, c, -c, c]);
    // Equal logits: the lower id.
    assert_eq!(outcome.argmax, [0, 0]);
}

#[test]
fn a_row_with_a_logit_that_is_not_finite_has_no_argmax() {
    let mut b = Bench::default();
    let mut rows = batch(0..2);
    rows.heads = vec![0, 1];
    let x = b.filled(&rows, 1, &[f32::MAX, 1.0]);
    let (head, logits) = (b.mat(2, 1, &[3.0, 1.0]), b.act(2));
    let outcome = b.run(&rows, &|ops| {
        ops.keep_rows(&[x]);
        ops.logits(logits, x, head, None);
        ops.argmax(logits);
    });
    assert_eq!(outcome.argmax, [-1, 0]);
}

#[test]
fn a_closed_layer_is_scaled_whole_and_opens_the_next() {
    let mut b = Bench::default();
    let mut rows = batch(0..1);
    rows.taps.points = vec![TapPoint::LayerOut(4)];
    let x = b.filled(&rows, 2, &[1.0, 1.0]);
    let y = b.filled(&rows, 2, &[3.0, -3.0]);
    let input = b.act(2);
    let (post, next) = (b.gain(&[4.0, 4.0]), b.gain(&[10.0, 10.0]));
    let spec = CloseSpec {
        y,
        post: Norm { gain: post, eps: 0.0 },
        scalar: Some(0.5),
        layer: 4,
        steer: false,
        next: Some((input, Norm { gain: next, eps: 0.0 })),
    };
    // `filled` ran with the taps too; this run has its own outcome.
    let outcome = b.run(&rows, &|ops| ops.close_layer(x, &spec));
    // 1 + 4 and 1 - 4, halved; then over sqrt((6.25 + 2.25) / 2).
    close(&b.read(x, 1), &[2.5, -1.5]);
    close(&outcome.taps[0].values, &[2.5, -1.5]);
    let r = 4.25f32.sqrt();
    close(&b.read(input, 1), &[25.0 / r, -15.0 / r]);
}

#[test]
fn stored_keys_and_values_are_what_the_format_can_hold() {
    let formats = [(KvFormat::F32, 0.1), (KvFormat::F16, 0.099_975_586), (KvFormat::Bf16, 0.100_097_656)];
    for (format, expected) in formats {
        let mut b = Bench::default();
        b.kv(1, 2, 4, format);
        b.on.kv_store(FULL, 0, 7, &[0.1, 1.0], &[0.1, 2.0]).unwrap();
        let (mut k, mut v) = ([0.0; 2], [0.0; 2]);
        b.on.kv_load(FULL, 0, 7, &mut k, &mut v).unwrap();
        assert_eq!((k, v), ([expected, 1.0], [expected, 2.0]));
    }
}

#[test]
fn misuse_is_an_error_and_not_a_panic() {
    let mut b = Bench::default();
    let small = ActSpec { name: "small", width: 2, kind: ActKind::F32, rows: ActRows::Batch, max_rows: 3 };
    let act = b.on.activation(small).unwrap();
    let message = b.on.upload(&batch(0..4)).unwrap_err().to_string();
    assert!(message.contains("4 rows exceed the small limit of 3"), "{message}");
    assert!(b.on.run(&batch(0..1).shape(1, TailRows::Heads), &|_| ()).is_err());
    assert!(b.on.collect().is_err());
    assert!(b.on.read(act, 4, &mut Vec::new()).is_err());
    assert!(b.on.read(Act(9), 1, &mut Vec::new()).is_err());
    assert!(b.on.kv_load(FULL, 0, 0, &mut [], &mut []).is_err());
    b.kv(1, 2, 4, KvFormat::F32);
    assert!(b.on.kv_store(FULL, 5, 0, &[0.0; 2], &[0.0; 2]).is_err());
    assert!(b.on.kv_store(FULL, 0, 32, &[0.0; 2], &[0.0; 2]).is_err());
    assert!(b.on.kv_store(FULL, 0, 0, &[0.0; 2], &[0.0; 3]).is_err());
}

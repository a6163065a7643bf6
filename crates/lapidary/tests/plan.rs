//! The memory plan against what is allocated, and against arithmetic done by hand.

mod sparse;

use std::path::{Path, PathBuf};

use lapidary::plan::{MemoryPlan, PlanOptions, activations};
use lapidary::synth::{Mix, Size, SynthOptions, write};
use lapidary::{Checkpoint, Compute, Config, Device, KvFormat, LoadOptions, load_stepper};
use lapidary_model::Limits;
use lapidary_ops::{Format, Group};
use lapidary_reference::tiny::{self, Variant};
use sparse::Real;

fn models(scratch: &Path) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut models: Vec<PathBuf> = ["dense31b", "moe26b", "e2b", "unified12b", "gemma3"]
        .iter()
        .map(|name| root.join("tests/goldens").join(name))
        .collect();
    models.extend(["moe", "e"].map(|name| root.join(format!("models/pebble-{name}-q8_0.gguf"))));
    for variant in Variant::ALL {
        let folder = scratch.join(variant.name());
        std::fs::create_dir(&folder).expect("folder is made");
        tiny::write(variant, &folder).expect("tiny model is written");
        models.push(folder);
    }
    models
}

fn plan_of(checkpoint: &Checkpoint, options: &LoadOptions) -> (Config, MemoryPlan) {
    plan_within(checkpoint, options, None)
}

fn plan_within(checkpoint: &Checkpoint, options: &LoadOptions, memory: Option<u64>) -> (Config, MemoryPlan) {
    let config = Config::from_checkpoint(checkpoint).expect("config is read");
    let context = options.context_for(&config);
    let limits = Limits { rows: options.chunk.clamp(1, context), head_rows: options.head_rows };
    let plan = PlanOptions {
        context,
        sequences: 1,
        limits,
        kv: [options.kv_format(); 2],
        compute: options.compute,
        device: options.device,
        requantise: options.requantise,
        memory,
    };
    let plan = MemoryPlan::new(checkpoint, &config, &plan);
    (config, plan)
}

/// Odd sizes, so that no rounding hides in round numbers.
fn options(compute: Compute) -> LoadOptions {
    LoadOptions {
        context: Some(331),
        chunk: 71,
        head_rows: 5,
        threads: Some(2),
        compute,
        kv: None,
        ..LoadOptions::default()
    }
}

#[test]
fn buffers_are_those_that_the_builder_makes() {
    let scratch = tempfile::tempdir().expect("scratch folder");
    for model in models(scratch.path()) {
        let checkpoint = Checkpoint::open(&model).expect("checkpoint opens");
        let options = options(Compute::F32);
        let stepper = load_stepper(&checkpoint, &options, &mut |_| {}).expect("model loads");
        let model_acts = &stepper.model().registry.acts;
        assert_eq!(&activations(&stepper.model().config, stepper.model().limits), model_acts, "{model:?}");
    }
}

#[test]
fn a_plan_equals_the_allocation() {
    let scratch = tempfile::tempdir().expect("scratch folder");
    for model in models(scratch.path()) {
        let checkpoint = Checkpoint::open(&model).expect("checkpoint opens");
        for compute in [Compute::F32, Compute::Fast] {
            let options = options(compute);
            let (_, plan) = plan_of(&checkpoint, &options);
            let mut stepper = load_stepper(&checkpoint, &options, &mut |_| {}).expect("model loads");
            let held = stepper.runner().memory();
            let what = |part: &str| format!("{} {compute:?} {part}", model.display());
            assert_eq!(plan.weight_bytes(), (held.weights + held.mapped) as u64, "{}", what("weights"));
            assert_eq!(plan.kv_bytes(), held.kv as u64, "{}", what("kv"));
            let buffers = plan.activation_bytes() - plan.experts_bytes;
            assert_eq!(buffers, held.activations as u64, "{}", what("activations"));
            // A pass takes what experts keep, and for each worker a decoded page of keys and values with the sums of
            // a few rows (80 KiB at these widths) and their queries and weights in bf16 (18 KiB): nothing beside a model.
            let scratch = 2 * (98 << 10);
            let tokens: Vec<u32> = (0..97).map(|i| i * 5 % 199).collect();
            stepper.prefill(&tokens).expect("the prompt runs");
            let held = stepper.runner().memory();
            let total = held.weights + held.mapped + held.kv + held.activations;
            let kept = plan.total() as usize;
            assert!(
                total >= kept - kept * 3 / 100 && total <= kept + kept * 3 / 100 + scratch,
                "{total} held, {kept} planned: {plan:?}"
            );
        }
    }
}

/// Experts that are too many for the memory stay in the file, layer by layer, and tokens are the same.
#[test]
fn too_little_memory_for_the_experts_gives_the_same_tokens() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/pebble-moe-q8_0.gguf");
    let checkpoint = Checkpoint::open(&file).expect("checkpoint opens");
    let options = options(Compute::Fast);
    let (config, all) = plan_of(&checkpoint, &options);
    assert!(all.paged.is_none() && all.packed_experts().is_none());
    let (_, none) = plan_within(&checkpoint, &options, Some(1));
    let nothing_packed = none.paged.expect("one byte is too little");
    assert_eq!((nothing_packed.layers, nothing_packed.packed_layers), (config.layers.len(), 0));
    assert_eq!(none.total(), all.total() - nothing_packed.bytes);
    // A budget of all but a byte leaves half the room for experts to packed ones.
    let (_, half) = plan_within(&checkpoint, &options, Some(all.total() - 1));
    let some_packed = half.paged.expect("a byte is missing");
    assert_eq!(some_packed.layers + some_packed.packed_layers, config.layers.len());
    assert!(some_packed.packed_layers > 0 && some_packed.bytes >= nothing_packed.bytes / 2);
    let mut expected: Option<(Vec<u32>, u64)> = None;
    for plan in [all, half, none] {
        let options = LoadOptions { packed_experts: plan.packed_experts(), ..options.clone() };
        let mut stepper = load_stepper(&checkpoint, &options, &mut |_| {}).expect("model loads");
        let held = stepper.runner().memory();
        let prompt: Vec<u32> = (0..97).map(|i| i * 5 % 199).collect();
        let mut tokens = vec![stepper.prefill(&prompt).expect("the prompt runs")];
        for _ in 0..40 {
            let at = stepper.cursor();
            tokens.push(stepper.decode_step(*tokens.last().expect("one"), at).expect("a step runs"));
        }
        // Matrices that are always read in place are mapped anyway.
        let (same, in_place) = expected.get_or_insert_with(|| (tokens.clone(), held.mapped as u64));
        assert_eq!(*same, tokens, "{:?}", plan.paged);
        // Packed ones are whole tiles, which tells the two a little apart.
        let (paged, mapped) = (plan.paged.map_or(0, |p| p.bytes), held.mapped as u64 - *in_place);
        assert!(mapped >= paged * 9 / 10 && mapped <= paged * 11 / 10, "{mapped} of {paged} mapped");
        let owned = plan.weight_bytes() - paged - *in_place;
        assert!((held.weights as u64).abs_diff(owned) <= owned / 50, "{} of {owned} owned", held.weights);
    }
}

/// A GPU that is too small for all of E2B leaves the per-layer table to the host before anything else is given up, and
/// only then.
#[test]
fn l04_the_per_layer_table_makes_room_for_the_head() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("header.gguf");
    let header = SynthOptions { sparse: true, ..SynthOptions::default() };
    write(Size::E2b, Mix::Bf16, &path, &header, &mut |_, _| {}).expect("the header is written");
    let checkpoint = Checkpoint::open(&path).expect("the file opens");
    let on_gpu = LoadOptions { device: Device::Cuda { ordinal: 0 }, ..options(Compute::Fast) };
    let all = plan_within(&checkpoint, &on_gpu, None).1;
    // 262,144 ids, 35 layers of 256 values in bf16.
    let table = 262_144 * 35 * 256 * 2;
    for (memory, host) in
        [(all.total(), None), (all.total() - 1, Some(table)), (all.total() - table, Some(table))]
    {
        let plan = plan_within(&checkpoint, &on_gpu, Some(memory)).1;
        assert_eq!(plan.host_tables, host, "{memory}");
        assert_eq!(plan.total(), all.total() - host.unwrap_or(0), "{memory}");
    }
    // The processor reads it from the file in any case, and 31B has none.
    assert_eq!(plan_within(&checkpoint, &options(Compute::Fast), Some(1)).1.host_tables, None);
    write(Size::Dense31b, Mix::Bf16, &path, &header, &mut |_, _| {}).expect("the header is written");
    let checkpoint = Checkpoint::open(&path).expect("the file opens");
    assert_eq!(plan_within(&checkpoint, &on_gpu, Some(1)).1.host_tables, None);
}

#[test]
fn planning_reads_headers_only() {
    // The data of these files is a hole of zeros: zero scales or norms would be refused if they were read.
    let folder = tempfile::tempdir().expect("scratch folder");
    let path = folder.path().join("m.gguf");
    Real::A4b.write_gguf(&path);
    let start = std::time::Instant::now();
    let checkpoint = Checkpoint::open(&path).expect("the header is sound");
    let (config, plan) = plan_of(&checkpoint, &LoadOptions::default());
    assert!(plan.total() > 14_000_000_000 && config.layers.len() == 30);
    assert!(start.elapsed().as_secs_f64() < 1.0, "{:?}", start.elapsed());
}

/// Rows of activations at chunk 512 and 16 head rows, in float32.
fn by_hand(rows: &[u64], head_rows: &[u64]) -> u64 {
    4 * (512 * rows.iter().sum::<u64>() + 16 * head_rows.iter().sum::<u64>())
}

fn fast(context: usize) -> LoadOptions {
    let kv = Some(KvFormat::F16);
    LoadOptions { context: Some(context), compute: Compute::F32, kv, ..LoadOptions::default() }
}

/// Sliding layers keep 1024 + 512 positions, 48 pages of 32, one more since neither end need fall on a border, and
/// page 0 takes padding rows.
const SLIDING_PAGES: u64 = 48 + 1 + 1;

#[test]
fn plan_of_26b_a4b() {
    let folder = tempfile::tempdir().expect("scratch folder");
    Real::A4b.write_safetensors(folder.path());
    let checkpoint = Checkpoint::open(folder.path()).expect("the header is sound");

    let h = 2816;
    let embed = 262_144 * h;
    let sliding = (16 * 256) * h + 2 * (8 * 256) * h + h * (16 * 256);
    let full = (16 * 512) * h + (2 * 512) * h + h * (16 * 512);
    let dense = 3 * 2112 * h;
    let router = 128 * h;
    let experts = 128 * 3 * 704 * h;
    let matrices: u64 = embed + 25 * sliding + 5 * full + 30 * (dense + router + experts);
    // 7 norms and the router's scale of width h; two head norms; a scale for each expert. The 128 + 256 frequencies
    // are computed, and the 30 layer scalars are numbers in the pass.
    let vectors = h + 30 * (7 * h + h + 128) + 25 * (2 * 256) + 5 * (2 * 512);
    assert_eq!(checkpoint.parameters(), matrices + vectors + 30);

    let active = embed + 25 * sliding + 5 * full + 30 * (dense + router + experts * 8 / 128);

    // [K, V] x heads x 32 positions x head dimension x 2 bytes
    let sliding_page = 2 * 8 * 32 * 256 * 2;
    let full_page = 2 * 2 * 32 * 512 * 2;
    let qkv = [(16 + 2 * 8) * 256, (16 + 2) * 512];
    let heads = [16 * 256, 16 * 512];
    let activations = by_hand(
        &[
            // x, input, y, the two rope tables
            h,
            h,
            h,
            256,
            512,
            qkv[0],
            qkv[1],
            heads[0],
            heads[1],
            2 * 2112,
            2112,
            // router input, logits (128) and routes (2 x 8), experts' input and output
            h,
            128,
            16,
            h,
            h,
        ],
        &[h, h, 262_144],
    );
    // Hidden values and outputs of 8 experts a row.
    let activations = activations + 4 * 512 * 8 * (704 + h);
    for (context, full_pages) in [(8192, 256 + 1), (262_144, 8192 + 1)] {
        let (_, plan) = plan_of(&checkpoint, &fast(context));
        assert_eq!(plan.weights.len(), 1);
        assert_eq!((plan.weights[0].format, plan.weights[0].bytes), (Format::Bf16, 2 * matrices));
        assert_eq!(plan.vector_bytes, 4 * (vectors + 128 + 256));
        assert_eq!(plan.kv_group_bytes(Group::Sliding), 25 * SLIDING_PAGES * sliding_page);
        assert_eq!(plan.kv_group_bytes(Group::Full), 5 * full_pages * full_page);
        assert_eq!(plan.activation_bytes(), activations);
        assert_eq!(plan.total(), 2 * matrices + plan.vector_bytes + plan.kv_bytes() + activations);
        assert_eq!(plan.active_parameters, active);
        assert_eq!(plan.weight_bytes_per_token, 2 * active + plan.vector_bytes);
        // 7.64 GB a token is what others have measured of this model in bf16.
        assert_eq!(plan.weight_bytes_per_token / 10_000_000, 764);
        let kv_read = 25 * 1024 * (2 * 8 * 256 * 2) + 5 * context as u64 * (2 * 2 * 512 * 2);
        assert_eq!(plan.kv_bytes_per_token(context - 1), kv_read);
    }
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let totals = [8192, 262_144].map(|c| gib(plan_of(&checkpoint, &fast(c)).1.total()));
    assert!((totals[0] - 47.6).abs() < 0.1 && (totals[1] - 52.4).abs() < 0.1, "{totals:?} GiB");
}

#[test]
fn plan_of_26b_a4b_in_four_bits() {
    let folder = tempfile::tempdir().expect("scratch folder");
    let path = folder.path().join("gemma.gguf");
    Real::A4b.write_gguf(&path);
    let checkpoint = Checkpoint::open(&path).expect("the header is sound");
    let (_, plan) = plan_of(&checkpoint, &fast(8192));

    let h = 2816;
    let sliding = (16 * 256) * h + 2 * (8 * 256) * h + h * (16 * 256);
    let full = (16 * 512) * h + (2 * 512) * h + h * (16 * 512);
    let q4_0 = 25 * sliding + 5 * full + 30 * (3 * 2112 * h + 128 * 3 * 704 * h);
    let bytes = |format: Format| plan.weights.iter().find(|w| w.format == format).map(|w| w.bytes);
    assert_eq!(bytes(Format::Q4_0), Some(q4_0 / 32 * 18));
    assert_eq!(bytes(Format::Q6K), Some(262_144 * h / 256 * 210));
    assert_eq!(bytes(Format::F32), Some(30 * 128 * h * 4));
    // The published file of this make: 14,439,363,584 bytes, of which about 15 MB are tokenizer and header.
    let total = plan.weight_bytes();
    assert!((14_400_000_000..14_439_363_584).contains(&total), "{total}");
    assert_eq!(plan.weight_bytes_per_token / 10_000_000, 238);
}

#[test]
fn plan_of_31b() {
    let folder = tempfile::tempdir().expect("scratch folder");
    Real::Dense31b.write_safetensors(folder.path());
    let checkpoint = Checkpoint::open(folder.path()).expect("the header is sound");

    let h = 5376;
    let sliding = (32 * 256) * h + 2 * (16 * 256) * h + h * (32 * 256);
    let full = (32 * 512) * h + (4 * 512) * h + h * (32 * 512);
    let matrices: u64 = 262_144 * h + 50 * sliding + 10 * full + 60 * (3 * 21_504 * h);
    let vectors = h + 60 * (4 * h) + 50 * (2 * 256) + 10 * (2 * 512);
    assert_eq!(checkpoint.parameters(), matrices + vectors + 60);

    let sliding_page = 2 * 16 * 32 * 256 * 2;
    let full_page = 2 * 4 * 32 * 512 * 2;
    let activations = by_hand(
        &[h, h, h, 256, 512, (32 + 2 * 16) * 256, (32 + 4) * 512, 32 * 256, 32 * 512, 2 * 21_504, 21_504],
        &[h, h, 262_144],
    );
    for (context, full_pages) in [(8192, 256 + 1), (262_144, 8192 + 1)] {
        let (_, plan) = plan_of(&checkpoint, &fast(context));
        assert_eq!(plan.weight_bytes(), 2 * matrices + 4 * (vectors + 128 + 256));
        assert_eq!(plan.kv_group_bytes(Group::Sliding), 50 * SLIDING_PAGES * sliding_page);
        assert_eq!(plan.kv_group_bytes(Group::Full), 10 * full_pages * full_page);
        assert_eq!(plan.activation_bytes(), activations);
        assert_eq!(plan.active_parameters, matrices);
    }
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let totals = [8192, 262_144].map(|c| gib(plan_of(&checkpoint, &fast(c)).1.total()));
    assert!((totals[0] - 59.3).abs() < 0.2 && (totals[1] - 78.7).abs() < 0.2, "{totals:?} GiB");
}

//! Where memory will go, from headers alone: weights by format, keys and values, activations, and what one decoded
//! token has to read.
//!
//! The buffers are listed as the model's builder makes them; a test holds the list, and the sums, against what a
//! backend allocates for every variant.

use std::collections::BTreeMap;

use crate::device::Device;
use lapidary_cpu::Compute;
use lapidary_formats::Format;
use lapidary_model::kv_plan::kv_plan;
use lapidary_model::{Config, Limits, Requantise};
use lapidary_ops::{ActKind, ActRows, ActSpec, GROUPS, Group, KvFormat, KvGroupPlan, KvPlan, PAGE_TOKENS};
use lapidary_weights::{Checkpoint, ExpertPart, LayerRole, Role, Stored};

/// What a plan is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanOptions {
    /// Positions of each sequence.
    pub context: usize,
    /// Sequences that are held at once.
    pub sequences: usize,
    /// Rows of one pass.
    pub limits: Limits,
    /// Element type of keys and values by group.
    pub kv: [KvFormat; GROUPS],
    /// Arithmetic mode: the fast one packs matrices and keeps inputs in int8 blocks too.
    pub compute: Compute,
    /// Where the model will be.
    pub device: Device,
    /// Formats that plain matrices get while they are loaded.
    pub requantise: Requantise,
    /// Bytes that it may take; experts that are too many for them stay in the file where the device can read them there,
    /// and tables of which a token reads one row go to the host's memory where the device has its own. `None` for any number.
    pub memory: Option<u64>,
}

/// Experts that stay in the file, to be paged in as they are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedExperts {
    /// Layers whose experts stay in the file: the last ones.
    pub layers: usize,
    /// Layers whose experts are packed and resident.
    pub packed_layers: usize,
    /// Bytes of those that stay.
    pub bytes: u64,
}

/// Bytes that a model will take once it is loaded.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    /// Matrices that the model uses, by format, in the order of [`Format::ALL`].
    pub weights: Vec<WeightShare>,
    /// Norm gains and other vectors, kept as float32.
    pub vector_bytes: u64,
    /// The pools of keys and values.
    pub kv: KvPlan,
    /// Buffers between the verbs of a pass.
    pub activations: Vec<ActSpec>,
    /// Bytes of intermediate values of routed experts, taken by the first pass that is as large as the limit.
    pub experts_bytes: u64,
    /// Bytes that the device's kernels keep beside these: room between kernels, recorded passes, code, and what is lost
    /// where memory is taken in blocks. 0 on the processor, whose share is next to nothing.
    pub device_bytes: u64,
    /// Bytes of matrices and vectors that one decoded token reads.
    pub weight_bytes_per_token: u64,
    /// Matrix values that take part in one decoded token; fewer than the model's parameters where experts are
    /// chosen or only a row of a table is read.
    pub active_parameters: u64,
    /// Bytes of keys and values that each layer reads for one visible position, and whether its window limits them.
    readers: Vec<(u64, Option<usize>)>,
    /// Experts that stay in the file since they are too many for the memory that the plan was made for.
    pub paged: Option<PagedExperts>,
    /// Bytes of tables that stay in the host's memory, where the device fetches single rows, since they are too many for
    /// its own.
    pub host_tables: Option<u64>,
    /// Bytes of tables of which a token reads one row.
    tables: u64,
    /// Bytes of each layer's experts.
    expert_layers: BTreeMap<u32, u64>,
    compute: Compute,
    device: Device,
}

/// How much of the used matrices one format takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightShare {
    /// The format.
    pub format: Format,
    /// Matrices in it.
    pub matrices: usize,
    /// Their bytes, scales included.
    pub bytes: u64,
}

impl MemoryPlan {
    /// Plans a checkpoint; reads no tensor. Tensors that the model does not use (dead keys and values of KV-sharing
    /// layers, calibration hints) are not counted; tensors that are missing are the loader's to refuse.
    pub fn new(checkpoint: &Checkpoint, config: &Config, options: &PlanOptions) -> MemoryPlan {
        let kv = kv_plan(config, options.kv, options.sequences, options.context, options.limits.rows);
        let mut plan = MemoryPlan {
            weights: Vec::new(),
            vector_bytes: 0,
            readers: readers(config, options.kv),
            kv,
            activations: activations(config, options.limits),
            experts_bytes: config.moe.map_or(0, |m| {
                let (rows, hidden) = (options.limits.rows, config.hidden);
                options.device.experts_bytes(rows, m.top_k, m.width, hidden, options.compute) as u64
            }),
            device_bytes: device_bytes(config, options),
            paged: None,
            host_tables: None,
            tables: 0,
            expert_layers: BTreeMap::new(),
            compute: options.compute,
            device: options.device,
            weight_bytes_per_token: 0,
            active_parameters: 0,
        };
        plan.vector_bytes += 4 * inv_freq_values(config);
        plan.weight_bytes_per_token += plan.vector_bytes;
        let untied = checkpoint.stored(Role::Head).is_some();
        for role in checkpoint.roles() {
            let stored = checkpoint.stored(role).expect("it is one of the file's roles");
            match use_of(role, config, untied) {
                Use::Unused => {}
                Use::Vector => {
                    let bytes = 4 * stored.values();
                    plan.vector_bytes += bytes;
                    plan.weight_bytes_per_token += bytes;
                }
                Use::Matrix(share) => {
                    let loaded = loaded(&stored, role, &options.requantise);
                    plan.matrix(role, &loaded, share);
                    if matches!(role, Role::Layer(_, LayerRole::Router | LayerRole::PerLayerGate)) {
                        let cols = loaded.shape.last().copied().unwrap_or(1).max(1);
                        let rows = loaded.values() as usize / cols;
                        let copy = options.device.float_copy_bytes(rows, cols, options.compute) as u64;
                        if copy > 0 {
                            plan.count(Format::F32, 0, copy);
                        }
                    }
                    let tied = role == Role::Embed && !untied;
                    if tied && options.device.keeps_tied_twice(options.compute, loaded.format) {
                        plan.count(loaded.format, 1, loaded.bytes);
                    }
                }
            }
        }
        let order = |f: Format| Format::ALL.iter().position(|&g| g == f);
        plan.weights.sort_by_key(|w| order(w.format));
        if let Some(memory) = options.memory {
            plan.fit(memory, options.requantise.linear.is_none());
        }
        plan
    }

    /// Leaves the experts of the last layers in the file where all would not fit into `memory`. Of the room beside
    /// everything else, half goes to packed experts and half is left to the file's pages. What is quantised while it is
    /// loaded is in no file. A GPU leaves tables to the host.
    fn fit(&mut self, memory: u64, in_file: bool) {
        let pages_experts = self.device == Device::Cpu && self.compute == Compute::Fast && in_file;
        let total = self.total();
        if total > memory && self.device != Device::Cpu && self.tables > 0 {
            self.host_tables = Some(self.tables);
        }
        if total <= memory || !pages_experts || self.expert_layers.is_empty() {
            return;
        }
        let experts: u64 = self.expert_layers.values().sum();
        let mut room = memory.saturating_sub(total - experts) / 2;
        let mut paged = PagedExperts { layers: self.expert_layers.len(), packed_layers: 0, bytes: experts };
        for &bytes in self.expert_layers.values() {
            if bytes > room {
                break;
            }
            room -= bytes;
            paged.layers -= 1;
            paged.packed_layers += 1;
            paged.bytes -= bytes;
        }
        self.paged = Some(paged);
    }

    /// For [`LoadOptions::packed_experts`](crate::LoadOptions::packed_experts): a layer has two matrices of experts.
    pub fn packed_experts(&self) -> Option<usize> {
        self.paged.map(|paged| 2 * paged.packed_layers)
    }

    fn matrix(&mut self, role: Role, stored: &Stored<'_>, share: Share) {
        let cols = stored.shape.last().copied().unwrap_or(1);
        let rows = stored.values() as usize / cols.max(1);
        let packed = match share {
            // Of a table only rows are read, so it stays as it is.
            Share::OneRow => None,
            Share::Whole | Share::Experts { .. } => {
                self.device.packed_bytes(stored.format, rows, cols, self.compute)
            }
        };
        let bytes = packed.map_or(stored.bytes, |b| b as u64);
        self.count(stored.format, 1, bytes);
        if matches!(share, Share::OneRow) {
            self.tables += bytes;
        }
        if let (Role::Layer(layer, _), Share::Experts { .. }) = (role, &share) {
            *self.expert_layers.entry(layer).or_default() += bytes;
        }
        let (part, whole) = match share {
            Share::Whole => (1, 1),
            Share::OneRow => (1, stored.shape.first().map_or(1, |&rows| rows as u64).max(1)),
            Share::Experts { chosen, of } => (chosen, of),
        };
        // A row or an expert is a whole part, so the division is exact for well-formed files.
        self.weight_bytes_per_token += (u128::from(bytes) * u128::from(part) / u128::from(whole)) as u64;
        self.active_parameters += (u128::from(stored.values()) * u128::from(part) / u128::from(whole)) as u64;
    }

    fn count(&mut self, format: Format, matrices: usize, bytes: u64) {
        match self.weights.iter_mut().find(|w| w.format == format) {
            Some(w) => {
                w.matrices += matrices;
                w.bytes += bytes;
            }
            None => self.weights.push(WeightShare { format, matrices, bytes }),
        }
    }

    /// Bytes of all weights, wherever they are.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.iter().map(|w| w.bytes).sum::<u64>() + self.vector_bytes
    }

    /// Bytes of one group's keys and values; saturates for contexts that no machine holds.
    pub fn kv_group_bytes(&self, group: Group) -> u64 {
        pool_bytes(&self.kv.groups[group.index()])
    }

    /// Bytes of all keys and values.
    pub fn kv_bytes(&self) -> u64 {
        Group::ALL.iter().fold(0, |sum, &g| sum.saturating_add(self.kv_group_bytes(g)))
    }

    /// Bytes of all activation buffers and of what experts keep between their products.
    pub fn activation_bytes(&self) -> u64 {
        let bytes = |a: &ActSpec| self.device.activation_bytes(a, self.compute) as u64;
        self.activations.iter().map(bytes).sum::<u64>() + self.experts_bytes
    }

    /// Bytes in all, without those of experts that stay in the file and of tables that stay with the host.
    pub fn total(&self) -> u64 {
        let elsewhere = self.paged.map_or(0, |paged| paged.bytes) + self.host_tables.unwrap_or(0);
        let weights = self.weight_bytes() - elsewhere;
        let parts = [weights, self.kv_bytes(), self.activation_bytes(), self.device_bytes];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    /// Bytes of keys and values that a decoded token reads after `position` earlier ones.
    pub fn kv_bytes_per_token(&self, position: usize) -> u64 {
        let visible = |window: Option<usize>| window.map_or(position + 1, |w| w.min(position + 1)) as u64;
        self.readers.iter().map(|&(bytes, window)| bytes * visible(window)).sum()
    }
}

fn device_bytes(config: &Config, options: &PlanOptions) -> u64 {
    let queries = config.layers.iter().map(|l| config.heads * l.head_dim).max().unwrap_or(0);
    let widest =
        config.layers.iter().map(|l| (config.heads + 2 * l.kv_heads) * l.head_dim).max().unwrap_or(0);
    options.device.kernel_bytes(options.limits.rows, queries, widest.max(config.hidden)) as u64
}

/// What a stored matrix is once it is loaded.
fn loaded<'a>(stored: &Stored<'a>, role: Role, requantise: &Requantise) -> Stored<'a> {
    let cols = stored.shape.last().copied().unwrap_or(1).max(1);
    let rows = stored.values() as usize / cols;
    let format = requantise.format_of(role, stored.format, cols);
    if format == stored.format {
        return *stored;
    }
    let scales = match format {
        Format::Fp8E4M3 => 4 * rows,
        Format::Nvfp4 => rows * cols / 16 + 4,
        _ => 0,
    };
    let codes = format.row_bytes(cols).unwrap_or(0) * rows;
    Stored { format, bytes: (codes + scales) as u64, ..*stored }
}

/// What a model does with a tensor.
enum Use {
    Unused,
    Vector,
    Matrix(Share),
}

/// How much of a matrix one token reads.
enum Share {
    Whole,
    OneRow,
    Experts { chosen: u64, of: u64 },
}

fn use_of(role: Role, config: &Config, untied: bool) -> Use {
    let (layer, local) = match role {
        Role::Embed if untied => return Use::Matrix(Share::OneRow),
        Role::Embed | Role::Head => return Use::Matrix(Share::Whole),
        Role::FinalNorm => return Use::Vector,
        // They take the place of the computed frequencies, which are counted with the config.
        Role::RopeFreqs => return Use::Unused,
        Role::PerLayerTable | Role::PerLayerModelProj | Role::PerLayerProjNorm
            if config.per_layer.is_none() =>
        {
            return Use::Unused;
        }
        Role::PerLayerTable => return Use::Matrix(Share::OneRow),
        Role::PerLayerModelProj => return Use::Matrix(Share::Whole),
        Role::PerLayerProjNorm => return Use::Vector,
        Role::Layer(layer, local) => (layer as usize, local),
    };
    let Some(l) = config.layers.get(layer) else { return Use::Unused };
    let (own_kv, per_layer) = (l.donor.is_none(), config.per_layer.is_some());
    let experts = |moe: lapidary_model::MoeConfig| {
        Use::Matrix(Share::Experts { chosen: moe.top_k as u64, of: moe.experts as u64 })
    };
    match local {
        LayerRole::KNorm | LayerRole::KProj if !own_kv => Use::Unused,
        LayerRole::VProj if !own_kv || l.values_are_keys => Use::Unused,
        LayerRole::KScale | LayerRole::VScale => Use::Unused,
        // A number in the pass, not a vector on the device.
        LayerRole::LayerScalar => Use::Unused,
        LayerRole::InputNorm
        | LayerRole::PostAttnNorm
        | LayerRole::PreFfnNorm
        | LayerRole::PostFfnNorm
        | LayerRole::QNorm
        | LayerRole::KNorm => Use::Vector,
        LayerRole::QProj
        | LayerRole::KProj
        | LayerRole::VProj
        | LayerRole::OProj
        | LayerRole::Gate
        | LayerRole::Up
        | LayerRole::Down => Use::Matrix(Share::Whole),
        LayerRole::PerLayerGate | LayerRole::PerLayerProj if per_layer => Use::Matrix(Share::Whole),
        LayerRole::PostPerLayerNorm if per_layer => Use::Vector,
        LayerRole::PerLayerGate | LayerRole::PerLayerProj | LayerRole::PostPerLayerNorm => Use::Unused,
        LayerRole::Router
        | LayerRole::RouterScale
        | LayerRole::PerExpertScale
        | LayerRole::PreFfnNorm2
        | LayerRole::PostFfnNorm1
        | LayerRole::PostFfnNorm2
        | LayerRole::ExpertsGateUp
        | LayerRole::ExpertsGate
        | LayerRole::ExpertsUp
        | LayerRole::ExpertsDown
        | LayerRole::Expert { part: ExpertPart::Gate | ExpertPart::Up | ExpertPart::Down, .. } => {
            match (config.moe, local) {
                (None, _) => Use::Unused,
                (Some(_), LayerRole::Router) => Use::Matrix(Share::Whole),
                (
                    Some(moe),
                    LayerRole::ExpertsGateUp
                    | LayerRole::ExpertsGate
                    | LayerRole::ExpertsUp
                    | LayerRole::ExpertsDown
                    | LayerRole::Expert { .. },
                ) => experts(moe),
                (Some(_), _) => Use::Vector,
            }
        }
    }
}

/// Frequencies of both rope tables; a group without layers has one pair.
fn inv_freq_values(config: &Config) -> u64 {
    let pairs = |g: Group| config.layers.iter().find(|l| l.group == g).map_or(1, |l| l.head_dim / 2);
    Group::ALL.iter().map(|&g| pairs(g) as u64).sum()
}

/// Each layer's bytes of keys and values for one position. A KV-sharing layer reads its donor's again.
fn readers(config: &Config, formats: [KvFormat; GROUPS]) -> Vec<(u64, Option<usize>)> {
    let layer = |l: &lapidary_model::LayerConfig| {
        let row = formats[l.group.index()].row_bytes(l.head_dim) as u64;
        (2 * l.kv_heads as u64 * row, (l.group == Group::Sliding).then_some(config.window))
    };
    config.layers.iter().map(layer).collect()
}

fn pool_bytes(group: &KvGroupPlan) -> u64 {
    let page = |l: &lapidary_ops::KvLayerShape| {
        2 * l.kv_heads as u128 * PAGE_TOKENS as u128 * group.format.row_bytes(l.head_dim) as u128
    };
    let bytes: u128 = group.layers.iter().map(|l| page(l).saturating_mul(group.pages as u128)).sum();
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// The buffers that a model allocates, in the order in which its builder asks for them.
pub fn activations(config: &Config, limits: Limits) -> Vec<ActSpec> {
    let mut list = List { limits, specs: Vec::new() };
    let hidden = config.hidden;
    let rope = |g: Group| config.layers.iter().find(|l| l.group == g).map_or(2, |l| l.head_dim);
    list.batch("x", hidden, ActKind::F32);
    list.batch("input", hidden, ActKind::Input);
    list.batch("y", hidden, ActKind::F32);
    list.batch("rope_sliding", rope(Group::Sliding), ActKind::F32);
    list.batch("rope_full", rope(Group::Full), ActKind::F32);
    list.push("final_norm", hidden, ActKind::F32, ActRows::Heads);
    list.push("head_input", hidden, ActKind::Input, ActRows::Heads);
    list.push("logits", config.vocab, ActKind::F32, ActRows::Heads);
    if let Some(p) = config.per_layer {
        list.batch("per_layer_input", hidden, ActKind::Input);
        list.batch("per_layer_inputs", config.layers.len() * p.width, ActKind::F32);
        list.batch("per_layer_gate", p.width, ActKind::F32);
        list.batch("per_layer_hidden", p.width, ActKind::Input);
    }
    for l in &config.layers {
        let parts = match (l.donor, l.values_are_keys) {
            (Some(_), _) => 0,
            (None, true) => 1,
            (None, false) => 2,
        };
        list.shared("qkv", (config.heads + parts * l.kv_heads) * l.head_dim, ActKind::F32);
        list.shared("heads", config.heads * l.head_dim, ActKind::Input);
        list.shared("gate_up", 2 * l.intermediate, ActKind::F32);
        list.shared("mlp_hidden", l.intermediate, ActKind::Input);
        if let Some(m) = config.moe {
            list.shared("router_input", hidden, ActKind::F32);
            list.shared("router_logits", m.experts, ActKind::F32);
            list.shared("routes", 2 * m.top_k, ActKind::F32);
            list.shared("expert_input", hidden, ActKind::Input);
            list.shared("expert_output", hidden, ActKind::F32);
        }
    }
    list.specs
}

struct List {
    limits: Limits,
    specs: Vec<ActSpec>,
}

impl List {
    fn push(&mut self, name: &'static str, width: usize, kind: ActKind, rows: ActRows) {
        let max_rows = match rows {
            ActRows::Batch => self.limits.rows,
            ActRows::Heads => self.limits.head_rows,
        };
        self.specs.push(ActSpec { name, width, kind, rows, max_rows });
    }

    fn batch(&mut self, name: &'static str, width: usize, kind: ActKind) {
        self.push(name, width, kind, ActRows::Batch);
    }

    /// A buffer that layers share where their widths agree.
    fn shared(&mut self, name: &'static str, width: usize, kind: ActKind) {
        if !self.specs.iter().any(|s| s.name == name && s.width == width) {
            self.batch(name, width, kind);
        }
    }
}

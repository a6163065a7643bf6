//! Joining verbs into steps.

use lapidary_ops::{Act, Activation, AttnSpec, ExpertSpec, Mat, Norm, Phase, QkvSpec, RouteSpec, TapPoint};

use super::Verb;

#[cfg(test)]
mod tests;

/// What is queued as one, or nearly.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    /// A verb on its own.
    Verb(Verb),
    /// Everything around the residual.
    Residual(Residual),
    /// `out = f(x W^T) * inputs[:, layer]`, by way of `gate`.
    GateTimes { out: Act, gate: Act, x: Act, w: Mat, inputs: Act, layer: usize, f: Activation },
    /// Router logits, and the choice made by them.
    Router { routes: Act, logits: Act, x: Act, w: Mat, spec: RouteSpec },
    /// Heads, and attention by them.
    Heads(Box<Heads>),
    /// A tap of the sum of two normed branches that the next [`Residual`] makes; nothing of it is left anywhere.
    TapBranches { point: TapPoint, y: (Act, Norm), z: (Act, Norm) },
    /// Experts whose choice a [`Step::Router`] made.
    Experts { out: Act, x: Act, routes: Act, spec: ExpertSpec },
    /// The per-layer branch with the residual steps before and behind it.
    PerLayer(Box<PerLayer>),
    /// The step before a gated product, and the product.
    NormedGated(Box<[Step; 2]>),
    /// A gated product, and the router that reads other inputs.
    GatedRouter(Box<[Step; 2]>),
    /// A product, and experts that read other inputs.
    LinearExperts(Box<[Step; 2]>),
}

/// What happens to q, k and v between the product that makes them and the one that reads attention's result.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Heads {
    /// The sums.
    pub qkv: Act,
    /// Norms, rotation, cache.
    pub finish: QkvSpec,
    /// The result.
    pub out: Act,
    /// Attention.
    pub attend: AttnSpec,
}

impl Heads {
    /// The verbs that it stands for.
    pub fn parts(&self) -> [Step; 2] {
        [
            Step::Verb(Verb::QkvFinish(self.qkv, self.finish)),
            Step::Verb(Verb::Attention(self.out, self.qkv, self.attend)),
        ]
    }
}

/// `x += rms(y)`, a gate from a copy of it, the gate's projection, and the step that closes the layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PerLayer {
    /// Its one copy is the gate's input, which nothing else reads.
    pub first: Residual,
    /// The gate's product, a [`Step::GateTimes`].
    pub gate: Step,
    /// The projection: output, input, matrix.
    pub product: (Act, Act, Mat),
    /// Makes two copies at most, by one norm.
    pub close: Residual,
}

impl PerLayer {
    /// The steps that it stands for.
    pub fn parts(&self) -> [Step; 4] {
        let (y, hidden, w) = self.product;
        [
            Step::Residual(self.first.clone()),
            self.gate.clone(),
            Step::Verb(Verb::Linear(y, hidden, w)),
            Step::Residual(self.close.clone()),
        ]
    }
}

/// `x = (x + rms(y; post)) * scalar` and what is made of it; `y` may be the sum of two normed branches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Residual {
    /// The residual.
    pub x: Act,
    /// What joins it, and the norm that is applied to it before, if any.
    pub y: Option<(Act, Norm)>,
    /// With a second branch: the first one's own norm, and the second with its.
    pub branches: Option<(Norm, Act, Norm)>,
    /// Multiplies the sum.
    pub scalar: f32,
    /// Normed (or plain) copies.
    pub outs: Vec<(Act, Option<Norm>)>,
    /// The verbs that it stands for.
    pub plain: Vec<Verb>,
}

/// Most copies that one step makes.
const MOST_OUTS: usize = 3;

/// Joins what can be joined. `fits` says of a residual whether the kernel takes rows of its width.
pub(crate) fn fuse(verbs: Vec<Verb>, fits: &dyn Fn(Act) -> bool) -> Vec<Step> {
    let mut list: Vec<Option<Verb>> = verbs.into_iter().map(Some).collect();
    let mut steps = Vec::with_capacity(list.len());
    let mut branches = two_branches(&mut list, fits);
    let mut unfinished = None;
    for i in 0..list.len() {
        let Some(verb) = list[i].take() else { continue };
        if let Verb::Tap(point, y) = verb
            && let Some(b) = branches.iter().find(|b| b.taps.contains(&i))
        {
            steps.push(Step::TapBranches { point, y: (y, b.first), z: (b.z, b.second) });
            continue;
        }
        let step = match verb {
            Verb::NormAdd(x, y, norm) if fits(x) => {
                let own = branches.iter().position(|b| b.at == i).map(|b| branches.swap_remove(b));
                let mut plain = own.as_ref().map_or(Vec::new(), |b| b.plain.clone());
                plain.push(Verb::NormAdd(x, y, norm));
                let branches = own.map(|b| (b.first, b.z, b.second));
                let start =
                    Residual { x, y: Some((y, norm)), branches, scalar: 1.0, outs: Vec::new(), plain };
                Step::Residual(gather(start, &mut list, i + 1))
            }
            Verb::RmsNorm(out, x, norm) if out != x && fits(x) => {
                let plain = vec![Verb::RmsNorm(out, x, norm)];
                let outs = vec![(out, Some(norm))];
                let start = Residual { x, y: None, branches: None, scalar: 1.0, outs, plain };
                Step::Residual(gather(start, &mut list, i + 1))
            }
            Verb::Linear(gate, x, w) => match take_next(&mut list, i + 1, gate, |v| gate_of(v, gate)) {
                Some(Verb::PerLayerGate(out, _, inputs, layer, f)) => {
                    Step::GateTimes { out, gate, x, w, inputs, layer, f }
                }
                Some(Verb::Route(routes, logits, spec)) => Step::Router { routes, logits, x, w, spec },
                _ => Step::Verb(Verb::Linear(gate, x, w)),
            },
            Verb::QkvFinish(qkv, spec) if attends_next(&list[i + 1..], qkv) => {
                unfinished = Some(spec);
                continue;
            }
            Verb::Attention(out, qkv, attend) => match unfinished.take() {
                Some(finish) => Step::Heads(Box::new(Heads { qkv, finish, out, attend })),
                None => Step::Verb(Verb::Attention(out, qkv, attend)),
            },
            Verb::Experts(out, x, routes, spec) => {
                let routed = |s: &Step| matches!(s, Step::Router { routes: r, .. } if *r == routes);
                match steps.iter().rev().any(routed) {
                    true => Step::Experts { out, x, routes, spec },
                    false => Step::Verb(Verb::Experts(out, x, routes, spec)),
                }
            }
            verb => Step::Verb(verb),
        };
        steps.push(step);
    }
    join_normed(join_routed(join_per_layer(steps)))
}

/// Joins the step that makes a gated product's input alone with the product, where the residual is touched next by a step that something joins
/// it in: that reads it from where this one leaves it. Marks move before both.
fn join_normed(mut steps: Vec<Step>) -> Vec<Step> {
    let is_mark = |s: &Step| matches!(s, Step::Verb(Verb::Mark(_)));
    // From the end, so that what is left to do keeps its place.
    for at in (0..steps.len()).rev() {
        let Step::Residual(first) = &steps[at] else { continue };
        let Some(next) = (at + 1..steps.len()).find(|&i| !is_mark(&steps[i])) else { continue };
        let Step::Verb(Verb::Gated { x, .. }) = steps[next] else { continue };
        let goes_on = steps[next + 1..].iter().find(|s| {
            let (reads, writes) = s.uses();
            reads.contains(&first.x) || writes.contains(&first.x)
        });
        let joins = match goes_on {
            Some(Step::Residual(r)) => r.x == first.x && r.y.is_some(),
            Some(Step::PerLayer(p)) => p.first.x == first.x,
            _ => false,
        };
        let alone = first.y.is_some() && first.branches.is_none();
        let one = matches!(first.outs[..], [(out, Some(_))] if out == x);
        if alone && one && joins && is_dead(x, &steps[next + 1..]) {
            let gated = steps.remove(next);
            let residual = steps.remove(at);
            steps.insert(next - 1, Step::NormedGated(Box::new([residual, gated])));
        }
    }
    steps
}

/// Joins the router with the dense branch's gate and up, and that branch's last product with the experts: the later of two
/// products moves to the earlier, or the earlier to the later, over steps that have nothing to do with it.
fn join_routed(mut steps: Vec<Step>) -> Vec<Step> {
    let mut at = 0;
    while at < steps.len() {
        let later = |wanted: fn(&Step) -> bool| (at + 1..steps.len()).find(|&i| wanted(&steps[i]));
        match &steps[at] {
            Step::Verb(Verb::Gated { .. }) => {
                let router = later(|s| matches!(s, Step::Router { .. } | Step::Verb(Verb::Gated { .. })));
                let router = router.filter(|&r| matches!(steps[r], Step::Router { .. }));
                if let Some(r) = router.filter(|&r| steps[at..r].iter().all(|s| is_apart(s, &steps[r]))) {
                    let router = steps.remove(r);
                    let gated = std::mem::replace(&mut steps[at], Step::Verb(Verb::Mark(Phase::Router)));
                    steps[at] = Step::GatedRouter(Box::new([gated, router]));
                }
            }
            Step::Verb(Verb::Linear(..)) => {
                let experts = later(|s| matches!(s, Step::Experts { .. } | Step::Verb(Verb::Linear(..))));
                let experts = experts.filter(|&e| matches!(steps[e], Step::Experts { .. }));
                if let Some(e) =
                    experts.filter(|&e| steps[at + 1..=e].iter().all(|s| is_apart(s, &steps[at])))
                {
                    let experts = std::mem::replace(&mut steps[e], Step::Verb(Verb::Mark(Phase::Experts)));
                    let product = steps[at].clone();
                    steps[e] = Step::LinearExperts(Box::new([product, experts]));
                    steps.remove(at);
                    continue;
                }
            }
            _ => {}
        }
        at += 1;
    }
    steps
}

/// Whether neither step writes what the other reads or writes, so that their order does not matter.
fn is_apart(a: &Step, b: &Step) -> bool {
    let ((a_reads, a_writes), (b_reads, b_writes)) = (a.uses(), b.uses());
    let meet = |x: &[Act], y: &[Act]| x.iter().any(|act| y.contains(act));
    !meet(&a_writes, &b_reads) && !meet(&a_writes, &b_writes) && !meet(&a_reads, &b_writes)
}

/// Joins the per-layer branch, where neither a tap nor another reader of what lies between keeps it apart. Marks move before it.
fn join_per_layer(steps: Vec<Step>) -> Vec<Step> {
    let mut joined = Vec::with_capacity(steps.len());
    let mut at = 0;
    while at < steps.len() {
        match per_layer_at(&steps[at..]) {
            Some((step, marks, length)) => {
                joined.extend(marks);
                joined.push(step);
                at += length;
            }
            None => {
                joined.push(steps[at].clone());
                at += 1;
            }
        }
    }
    joined
}

/// The branch that begins with the first step, the marks in it, and how many steps both are.
fn per_layer_at(steps: &[Step]) -> Option<(Step, Vec<Step>, usize)> {
    let is_mark = |s: &Step| matches!(s, Step::Verb(Verb::Mark(_)));
    let mut own = steps.iter().enumerate().filter(|(_, s)| !is_mark(s));
    let (_, Step::Residual(first)) = own.next()? else { return None };
    let (_, gate @ Step::GateTimes { out, x, gate: raw, .. }) = own.next()? else { return None };
    let (_, &Step::Verb(Verb::Linear(y, hidden, w))) = own.next()? else { return None };
    let (last, Step::Residual(close)) = own.next()? else { return None };
    let alone = |r: &Residual| r.y.is_some() && r.branches.is_none();
    let fits = !is_mark(&steps[0])
        && alone(first)
        && alone(close)
        && first.scalar == 1.0
        && first.outs == [(*x, None)]
        && *out == hidden
        && first.x == close.x
        && close.y.is_some_and(|c| c.0 == y)
        && close.outs.len() <= 2
        && close.outs.iter().all(|o| o.1 == close.outs[0].1)
        && [*x, *out, *raw, y].into_iter().all(|act| is_dead(act, &steps[last + 1..]));
    if !fits {
        return None;
    }
    let branch =
        PerLayer { first: first.clone(), gate: gate.clone(), product: (y, hidden, w), close: close.clone() };
    let marks = steps[..last].iter().filter(|s| is_mark(s)).cloned().collect();
    Some((Step::PerLayer(Box::new(branch)), marks, last + 1))
}

/// Whether the next step that touches `act` only writes it.
fn is_dead(act: Act, later: &[Step]) -> bool {
    let uses =
        later.iter().map(Step::uses).find(|(reads, writes)| reads.contains(&act) || writes.contains(&act));
    uses.is_none_or(|(reads, _)| !reads.contains(&act))
}

/// A sum of two normed branches that joins a residual at `at`.
struct Branches {
    at: usize,
    first: Norm,
    z: Act,
    second: Norm,
    plain: Vec<Verb>,
    /// Taps of the sum.
    taps: Vec<usize>,
}

/// Takes out `y = rms(y)`, `y += rms(z)` where nothing else touches `y` (or writes `z`) before `x += rms(y)`.
fn two_branches(list: &mut [Option<Verb>], fits: &dyn Fn(Act) -> bool) -> Vec<Branches> {
    let mut found = Vec::new();
    for at in 0..list.len() {
        let Some(Verb::NormAdd(x, y, _)) = list[at] else { continue };
        if !fits(x) {
            continue;
        }
        let Some(j) = last_use(list, at, y) else { continue };
        let Some(Verb::NormAdd(same, z, second)) = list[j] else { continue };
        let Some(i) = last_use(list, j, y) else { continue };
        let Some(Verb::RmsNorm(out, from, first)) = list[i] else { continue };
        let between = list[j + 1..at].iter().flatten().any(|v| v.uses().1.contains(&z));
        let is_tap = |n: &usize| matches!(list[*n], Some(Verb::Tap(_, of)) if of == y);
        let taps = (j + 1..at).filter(is_tap).collect();
        // A tap of what is not there yet: the norm of one branch alone.
        let inside = (i + 1..j).any(|n| is_tap(&n));
        if same != y || out != y || from != y || between || inside || second.eps != first.eps {
            continue;
        }
        let plain = [i, j].iter().filter_map(|&n| list[n].take()).collect();
        found.push(Branches { at, first, z, second, plain, taps });
    }
    found
}

/// The last verb before `end` that reads or writes `act`, taps aside.
fn last_use(list: &[Option<Verb>], end: usize, act: Act) -> Option<usize> {
    (0..end).rev().find(|&n| {
        list[n].as_ref().is_some_and(|v| {
            !matches!(v, Verb::Tap(..)) && {
                let (reads, writes) = v.uses();
                reads.contains(&act) || writes.contains(&act)
            }
        })
    })
}

/// Adds to a residual what follows it: its scale, and copies of it that nothing in between has to do with.
fn gather(mut step: Residual, list: &mut [Option<Verb>], from: usize) -> Residual {
    let mut touched: Vec<Act> = Vec::new();
    let eps = step.y.map(|y| y.1).or(step.outs.first().and_then(|o| o.1)).map(|n| n.eps);
    for slot in &mut list[from..] {
        let Some(verb) = slot else { continue };
        let free = |act: Act| !touched.contains(&act) && step.outs.iter().all(|o| o.0 != act);
        let norm_of = |act: Act| step.outs.iter().find(|o| o.0 == act).map(|o| o.1);
        let taken = match *verb {
            Verb::Scale(x, by) if x == step.x && step.y.is_some() && step.outs.is_empty() => {
                let first = step.scalar == 1.0 && !touched.contains(&x);
                first.then(|| step.scalar = by).is_some()
            }
            Verb::RmsNorm(out, x, norm) if x == step.x && out != x && free(out) && eps == Some(norm.eps) => {
                push(&mut step.outs, out, Some(norm))
            }
            Verb::Cast(out, x) if x == step.x && out != x && free(out) => push(&mut step.outs, out, None),
            // A copy of a copy is a copy of the residual, rounded once: the first is float32.
            Verb::Cast(out, copy) if norm_of(copy).is_some() && free(out) && !touched.contains(&copy) => {
                let norm = norm_of(copy).flatten();
                push(&mut step.outs, out, norm)
            }
            _ => false,
        };
        if taken {
            step.plain.extend(slot.take());
            continue;
        }
        let (reads, writes) = verb.uses();
        if writes.contains(&step.x) {
            break;
        }
        touched.extend(reads);
        touched.extend(writes);
    }
    step
}

fn push(outs: &mut Vec<(Act, Option<Norm>)>, out: Act, norm: Option<Norm>) -> bool {
    let room = outs.len() < MOST_OUTS;
    if room {
        outs.push((out, norm));
    }
    room
}

/// Whether attention by `qkv` comes next; marks are stepped over, so they end up before both.
fn attends_next(list: &[Option<Verb>], qkv: Act) -> bool {
    let next = list.iter().flatten().find(|v| !matches!(v, Verb::Mark(_)));
    matches!(next, Some(&Verb::Attention(_, by, _)) if by == qkv)
}

/// Whether a verb consumes a product as a gate or as router logits.
fn gate_of(verb: &Verb, gate: Act) -> bool {
    match *verb {
        Verb::PerLayerGate(_, g, ..) => g == gate,
        Verb::Route(_, logits, _) => logits == gate,
        _ => false,
    }
}

/// Takes out the next verb where it is one that `wanted` says; marks are stepped over.
fn take_next(
    list: &mut [Option<Verb>],
    from: usize,
    _act: Act,
    wanted: impl Fn(&Verb) -> bool,
) -> Option<Verb> {
    let slot = list[from..].iter_mut().find(|s| s.as_ref().is_some_and(|v| !matches!(v, Verb::Mark(_))))?;
    if slot.as_ref().is_some_and(wanted) { slot.take() } else { None }
}

//! Recorded passes: which are recorded, and for how long.
//!
//! A pass is run once as it is, which loads kernels and sizes the workspace; the second of the same shape is
//! recorded, and from then on repeated. A recording holds addresses, so all are dropped when anything moves.

use std::collections::{HashMap, HashSet};

use lapidary_ops::{BatchShape, Phase, TapSet};

use crate::driver::{Event, Graph};
use crate::hooks::TapPlace;

/// Most recordings that are kept.
const MOST: usize = 64;

/// Most rows of a pass that is recorded: decoding, alone or batched, and checking of drafts. Prompts come in as many
/// lengths as there are and spend their time in kernels, not between them.
const MOST_ROWS: usize = 64;

/// A recorded pass.
#[derive(Debug)]
pub(crate) struct Recorded {
    /// The work.
    pub graph: Graph,
    /// What a run of it leaves.
    pub left: Left,
    used: u64,
}

/// What a pass leaves besides values, and what it asks of its batch.
#[derive(Debug, Default)]
pub(crate) struct Left {
    /// Chosen tokens.
    pub tokens: usize,
    /// Whether the pass itself tells the host which.
    pub told: bool,
    /// Rows of the table that tokens index, and of the per-layer table: ids must be below.
    pub below: [Option<i32>; 2],
    /// Bytes of weights read.
    pub weight_bytes: u64,
    /// Where phases begin, and at last where the pass ends.
    pub marks: Vec<(Option<Phase>, Event)>,
    /// What is copied out, in order.
    pub taps: Vec<TapPlace>,
}

/// The recordings of a backend.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    recorded: HashMap<BatchShape, Recorded>,
    ran: HashSet<BatchShape>,
    /// What passes that copy something out have copied.
    taps: TapSet,
    clock: u64,
    /// Sum of all counts of moves when the recordings were made.
    moves: usize,
}

/// What to do with a pass.
#[derive(Debug)]
pub(crate) enum Plan {
    /// Repeat the recording.
    Repeat,
    /// Record it, then repeat that.
    Record,
    /// Run it as it is.
    Run,
}

impl Graphs {
    /// What to do with a pass of `shape` that copies `taps` out, when things have moved `moves` times in all.
    pub fn plan(&mut self, shape: &BatchShape, taps: &TapSet, moves: usize) -> Plan {
        if moves != self.moves {
            self.recorded.clear();
            self.ran.clear();
            self.moves = moves;
        }
        if shape.has_taps && *taps != self.taps {
            // The shape says only that there are some.
            self.recorded.retain(|shape, _| !shape.has_taps);
            self.ran.retain(|shape| !shape.has_taps);
            self.taps = taps.clone();
        }
        let fit = !shape.has_soft && shape.rows <= MOST_ROWS;
        if !fit || shape.rows != shape.head_rows {
            return Plan::Run;
        }
        match (self.recorded.contains_key(shape), self.ran.contains(shape)) {
            (true, _) => Plan::Repeat,
            (false, true) => Plan::Record,
            (false, false) => Plan::Run,
        }
    }

    /// Notes that a pass of `shape` ran as it is and moved nothing since `plan` if `moves` is still the count.
    pub fn ran(&mut self, shape: &BatchShape, moves: usize) {
        if moves == self.moves {
            self.ran.insert(shape.clone());
        }
    }

    /// Keeps a recording in place of the one used longest ago.
    pub fn keep(&mut self, shape: &BatchShape, graph: Graph, left: Left) {
        if self.recorded.len() >= MOST
            && let Some(oldest) = self.recorded.iter().min_by_key(|(_, r)| r.used).map(|(s, _)| s.clone())
        {
            self.recorded.remove(&oldest);
        }
        self.recorded.insert(shape.clone(), Recorded { graph, left, used: 0 });
    }

    /// The recording of `shape`.
    pub fn get(&mut self, shape: &BatchShape) -> Option<&Recorded> {
        self.clock += 1;
        let recorded = self.recorded.get_mut(shape)?;
        recorded.used = self.clock;
        Some(recorded)
    }

    /// How many passes are recorded.
    pub fn len(&self) -> usize {
        self.recorded.len()
    }
}

#[cfg(test)]
mod tests {
    use lapidary_ops::TailRows;

    use super::*;

    fn shape(rows: usize, head_rows: usize) -> BatchShape {
        BatchShape {
            rows,
            head_rows,
            tail: TailRows::Heads,
            has_soft: false,
            layers: (0, 3),
            has_taps: false,
            steered: false,
            drawn: false,
        }
    }

    #[test]
    fn the_second_pass_of_a_shape_is_recorded_unless_something_moved() {
        let (mut graphs, none) = (Graphs::default(), TapSet::default());
        assert!(matches!(graphs.plan(&shape(2, 2), &none, 5), Plan::Run));
        graphs.ran(&shape(2, 2), 6);
        assert!(matches!(graphs.plan(&shape(2, 2), &none, 6), Plan::Run), "the first run moved something");
        graphs.ran(&shape(2, 2), 6);
        assert!(matches!(graphs.plan(&shape(2, 2), &none, 6), Plan::Record));
        assert!(matches!(graphs.plan(&shape(3, 3), &none, 6), Plan::Run));
        assert!(matches!(graphs.plan(&shape(2, 2), &none, 7), Plan::Run), "moved since");
    }

    #[test]
    fn prompts_and_whatever_else_differs_are_never_recorded() {
        let (mut graphs, none) = (Graphs::default(), TapSet::default());
        let odd = [shape(8, 1), shape(65, 65), BatchShape { has_soft: true, ..shape(1, 1) }];
        for shape in odd {
            graphs.ran(&shape, 0);
            assert!(matches!(graphs.plan(&shape, &none, 0), Plan::Run), "{shape:?}");
        }
    }

    #[test]
    fn another_set_of_copies_is_another_pass() {
        let mut graphs = Graphs::default();
        let some = |layer| TapSet { points: vec![lapidary_ops::TapPoint::LayerOut(layer)] };
        let tapped = BatchShape { has_taps: true, ..shape(1, 1) };
        for of in [shape(1, 1), tapped.clone()] {
            graphs.plan(&of, &some(3), 0);
            graphs.ran(&of, 0);
        }
        assert!(matches!(graphs.plan(&tapped, &some(3), 0), Plan::Record));
        assert!(matches!(graphs.plan(&tapped, &some(4), 0), Plan::Run));
        assert!(
            matches!(graphs.plan(&shape(1, 1), &TapSet::default(), 0), Plan::Record),
            "it copies nothing"
        );
        assert!(matches!(graphs.plan(&tapped, &some(4), 0), Plan::Run), "not before it ran");
    }
}

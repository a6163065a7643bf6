//! Recorded passes: which are recorded, and for how long.
//!
//! A pass is run once as it is, which loads kernels and sizes the workspace; the second of the same shape is
//! recorded, and from then on repeated. A recording holds addresses, so all are dropped when anything moves.

use std::collections::{HashMap, HashSet};

use lapidary_ops::{BatchShape, Phase};

use crate::driver::{Event, Graph};

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
}

/// The recordings of a backend.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    recorded: HashMap<BatchShape, Recorded>,
    ran: HashSet<BatchShape>,
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
    /// What to do with a pass of `shape`, when things have moved `moves` times in all.
    pub fn plan(&mut self, shape: &BatchShape, moves: usize) -> Plan {
        if moves != self.moves {
            self.recorded.clear();
            self.ran.clear();
            self.moves = moves;
        }
        let fit = !shape.has_soft && !shape.has_taps && !shape.steered && shape.rows <= MOST_ROWS;
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
        }
    }

    #[test]
    fn the_second_pass_of_a_shape_is_recorded_unless_something_moved() {
        let mut graphs = Graphs::default();
        assert!(matches!(graphs.plan(&shape(2, 2), 5), Plan::Run));
        graphs.ran(&shape(2, 2), 6);
        assert!(matches!(graphs.plan(&shape(2, 2), 6), Plan::Run), "the first run moved something");
        graphs.ran(&shape(2, 2), 6);
        assert!(matches!(graphs.plan(&shape(2, 2), 6), Plan::Record));
        assert!(matches!(graphs.plan(&shape(3, 3), 6), Plan::Run));
        assert!(matches!(graphs.plan(&shape(2, 2), 7), Plan::Run), "moved since");
    }

    #[test]
    fn prompts_and_whatever_else_differs_are_never_recorded() {
        let mut graphs = Graphs::default();
        let odd = [
            shape(8, 1),
            shape(65, 65),
            BatchShape { has_soft: true, ..shape(1, 1) },
            BatchShape { has_taps: true, ..shape(1, 1) },
            BatchShape { steered: true, ..shape(1, 1) },
        ];
        for shape in odd {
            graphs.ran(&shape, 0);
            assert!(matches!(graphs.plan(&shape, 0), Plan::Run), "{shape:?}");
        }
    }
}

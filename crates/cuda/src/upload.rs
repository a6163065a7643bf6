//! The batch on the device: one pinned block, one copy, every column at a place that does not change. There are two
//! pinned blocks in turn, since the batch of one pass is written while the pass before may not have begun.

use std::sync::Arc;

use lapidary_ops::{Batch, Error, GROUPS, Group, KvPlan, PAGE_TOKENS, Result};

use crate::args::Columns;
use crate::driver::{Block, Context, DevPtr, Pinned, Stream};
use crate::kernels::draw;
use crate::kernels::step::{self, Begin, COLUMNS, Follow};
use crate::launch::Queue;

/// How many entries the columns have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Capacity {
    rows: usize,
    heads: usize,
    pages: [usize; GROUPS],
}

/// Columns with an entry for each row: tokens, per-layer tokens, positions, soft, by group visible, table, cell, then
/// steering and whom the row follows.
const ROW_COLUMNS: usize = 6 + 3 * GROUPS;

/// Which column says whom a row follows.
const FOLLOWS: usize = ROW_COLUMNS - 1;

/// Most rows of a batch that a kernel fetches: longer columns are faster by the copy engine.
const MOST_FETCHED: usize = 64;

impl Capacity {
    fn ints(&self) -> usize {
        self.rows * ROW_COLUMNS + self.heads * (1 + draw::PARAMETERS) + self.pages.iter().sum::<usize>() + 1
    }

    fn holds(&self, needed: &Capacity) -> bool {
        let pages = self.pages.iter().zip(needed.pages).all(|(have, need)| *have >= need);
        self.rows >= needed.rows && self.heads >= needed.heads && pages
    }
}

/// The uploaded batch.
#[derive(Debug, Default)]
pub(crate) struct Upload {
    /// The batch as given.
    pub batch: Batch,
    /// Where its columns are on the device.
    pub columns: Columns,
    /// Ids of rows that follow the pass before are below this.
    below: i32,
    /// Where the device finds which of the two turns the batch is.
    pub turn_at: DevPtr,
    /// Counts the times that columns have moved; what was recorded before the last of them is stale.
    pub moves: usize,
    capacity: Capacity,
    memory: Option<([Pinned; 2], Block)>,
    soft: Option<(Pinned, Block)>,
    soft_bytes: usize,
    cells: Vec<(usize, usize)>,
}

impl Upload {
    /// Queues the copy of `batch`, whose rows take from `follow` what they follow. Passes over batches before may still
    /// be queued, but none over the last of the same `turn`.
    ///
    /// # Errors
    /// `Batch` for indices that lead outside the pools, `Device` where two rows would write one cell.
    pub fn take(
        &mut self,
        context: &Arc<Context>,
        queue: Queue<'_>,
        batch: &Batch,
        plan: &KvPlan,
        (turn, follow): (usize, Option<Follow>),
    ) -> Result<()> {
        let stream = queue.stream;
        // The vocabulary is the caller's to check, who knows the tables; pages are checked where they are followed.
        let width = batch.soft_values.len() / batch.soft_rows.len().max(1);
        batch.check(plan, width, i32::MAX as usize, i32::MAX as usize)?;
        let mut ints = RowInts::new(batch, plan, &mut self.cells)?;
        self.grow(context, stream, batch)?;
        let (both, device) = self.memory.as_mut().expect("grown above");
        let pinned = &mut both[turn];
        let words = pinned.bytes_mut().as_chunks_mut::<4>().0;
        let (mut used, mut columns) = (0, [(0, 0); COLUMNS]);
        let turn = [turn as i32];
        for (i, (place, column)) in
            layout(&self.capacity).into_iter().zip(ints.columns(batch, &turn)).enumerate()
        {
            columns[i] = (place, column.len());
            for (word, value) in words[place..].iter_mut().zip(column) {
                *word = value.to_le_bytes();
            }
            if !column.is_empty() {
                used = used.max(place + column.len());
            }
        }
        if batch.tokens.len() <= MOST_FETCHED {
            let follow = follow.map(|f| (FOLLOWS, f));
            let call = Begin { from: pinned.device(), to: device.ptr(), columns, follow };
            // SAFETY: all blocks have the capacity's size, and nobody writes to the pinned one before the next batch of
            // its turn, for which the caller has waited; whom rows follow was checked.
            unsafe { step::begin(queue, &call)? };
        } else {
            // SAFETY: as above.
            unsafe { stream.upload(device.ptr(), &pinned.bytes()[..used * 4])? };
        }
        self.below = follow.map_or(0, |f| f.below);
        self.take_soft(context, stream, batch)?;
        self.batch.clone_from(batch);
        Ok(())
    }

    /// Makes room, and says where the columns are.
    fn grow(&mut self, context: &Arc<Context>, stream: &Stream, batch: &Batch) -> Result<()> {
        let needed = Capacity {
            rows: batch.tokens.len(),
            heads: batch.heads.len(),
            pages: [batch.pages[0].len(), batch.pages[1].len()],
        };
        if self.memory.is_some() && self.capacity.holds(&needed) {
            return Ok(());
        }
        let room = |have: usize, need: usize, least: usize| match have >= need && have > 0 {
            true => have,
            false => need.next_power_of_two().max(least),
        };
        let capacity = Capacity {
            rows: room(self.capacity.rows, needed.rows, 64),
            heads: room(self.capacity.heads, needed.heads, 64),
            pages: std::array::from_fn(|g| room(self.capacity.pages[g], needed.pages[g], 1024)),
        };
        let bytes = capacity.ints() * 4;
        let both = [Pinned::new(context, bytes)?, Pinned::new(context, bytes)?];
        let memory = (both, Block::new(context, "the batch", bytes)?);
        // A pass that is still under way reads the columns where they are.
        stream.wait()?;
        let at: Vec<DevPtr> = layout(&capacity).iter().map(|p| memory.1.ptr().at(p * 4)).collect();
        self.columns = Columns {
            tokens: at[0],
            per_layer_tokens: at[1],
            positions: at[2],
            soft: at[3],
            visible_to: [at[4], at[5]],
            table: [at[6], at[7]],
            cell: [at[8], at[9]],
            steer: at[FOLLOWS - 1],
            heads: at[FOLLOWS + 1],
            pages: [at[FOLLOWS + 2], at[FOLLOWS + 3]],
            draws: at[FOLLOWS + 5],
            soft_values: self.columns.soft_values,
        };
        self.turn_at = at[FOLLOWS + 4];
        self.capacity = capacity;
        self.memory = Some(memory);
        self.moves += 1;
        Ok(())
    }

    fn take_soft(&mut self, context: &Arc<Context>, stream: &Stream, batch: &Batch) -> Result<()> {
        let bytes = batch.soft_values.len() * 4;
        if bytes == 0 {
            return Ok(());
        }
        stream.wait()?;
        if self.soft.is_none() || self.soft_bytes < bytes {
            let room = bytes.next_power_of_two();
            self.soft = Some((Pinned::new(context, room)?, Block::new(context, "given embeddings", room)?));
            self.soft_bytes = room;
            self.moves += 1;
        }
        let (pinned, device) = self.soft.as_mut().expect("made above");
        self.columns.soft_values = device.ptr();
        for (word, value) in pinned.bytes_mut().as_chunks_mut::<4>().0.iter_mut().zip(&batch.soft_values) {
            *word = value.to_le_bytes();
        }
        // SAFETY: as in `take`.
        unsafe { Ok(stream.upload(device.ptr(), &pinned.bytes()[..bytes])?) }
    }

    /// Whether every id is a row of a table of `rows`, those of rows that follow the pass before too: kernels look them up.
    /// Column 0 is the tokens, 1 those for the per-layer table.
    pub fn check_ids(&self, column: usize, rows: i32) -> Result<()> {
        let ids = [&self.batch.tokens, &self.batch.per_layer_tokens][column];
        let bad = |row: usize, token: i32| {
            let vocab = rows as usize;
            Err(Error::Batch(lapidary_ops::BatchError::Token { row, token, vocab }))
        };
        if let Some(row) = ids.iter().position(|&id| id < 0 || id >= rows) {
            return bad(row, ids[row]);
        }
        match self.batch.follows.iter().position(|&f| f >= 0) {
            Some(row) if self.below > rows => bad(row, self.below - 1),
            _ => Ok(()),
        }
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, |m| m.1.len()) + self.soft.as_ref().map_or(0, |m| m.1.len())
    }
}

/// Where each column starts, in integers; in the order of [`RowInts::columns`].
fn layout(capacity: &Capacity) -> [usize; COLUMNS] {
    let rows = std::iter::repeat_n(capacity.rows, ROW_COLUMNS);
    let draws = capacity.heads * draw::PARAMETERS;
    let lengths = rows.chain([capacity.heads]).chain(capacity.pages).chain([1, draws]);
    let mut places = [0; COLUMNS];
    let mut next = 0;
    for (place, length) in places.iter_mut().zip(lengths) {
        *place = next;
        next += length;
    }
    places
}

/// What kernels need of each row that the batch has only by sequence.
struct RowInts {
    soft: Vec<i32>,
    draws: Vec<i32>,
    table: [Vec<i32>; GROUPS],
    cell: [Vec<i32>; GROUPS],
}

impl RowInts {
    fn new(batch: &Batch, plan: &KvPlan, cells: &mut Vec<(usize, usize)>) -> Result<RowInts> {
        let rows = batch.tokens.len();
        let mut ints = RowInts {
            soft: vec![-1; rows],
            draws: batch.draws.iter().flat_map(|d| draw::parameters(d.as_ref())).collect(),
            table: [vec![0; rows], vec![0; rows]],
            cell: [vec![-1; rows], vec![-1; rows]],
        };
        for (i, &row) in batch.soft_rows.iter().enumerate() {
            ints.soft[row as usize] = i as i32;
        }
        for group in Group::ALL.map(Group::index) {
            if plan.groups[group].layers.is_empty() {
                continue;
            }
            cells.clear();
            for span in &batch.spans {
                let table = span.tables[group];
                for row in span.first_row..span.first_row + span.rows {
                    let position = batch.positions[row] as usize;
                    let block = position / PAGE_TOKENS - table.first_block;
                    let page = batch.pages[group][table.start + block] as usize;
                    let cell = page * PAGE_TOKENS + position % PAGE_TOKENS;
                    ints.table[group][row] = table.start as i32 - table.first_block as i32;
                    ints.cell[group][row] =
                        i32::try_from(cell).map_err(|_| Error::Device(format!("page {page} is too far")))?;
                    cells.push((cell, row));
                }
            }
            cells.sort_unstable();
            for pair in cells.windows(2).filter(|p| p[0].0 == p[1].0) {
                let (page, a, b) = (pair[0].0 / PAGE_TOKENS, pair[0].1, pair[1].1);
                if page != 0 {
                    return Err(Error::Device(format!(
                        "rows {a} and {b} write the same cell of page {page}"
                    )));
                }
                // Page 0 is where padding goes; one of the padding rows may have the cell.
                ints.cell[group][b] = -1;
            }
        }
        Ok(ints)
    }

    fn columns<'a>(&'a mut self, batch: &'a Batch, turn: &'a [i32]) -> [&'a [i32]; COLUMNS] {
        [
            &batch.tokens,
            &batch.per_layer_tokens,
            &batch.positions,
            &self.soft,
            &batch.visible_to[0],
            &batch.visible_to[1],
            &self.table[0],
            &self.table[1],
            &self.cell[0],
            &self.cell[1],
            &batch.steer,
            &batch.follows,
            &batch.heads,
            &batch.pages[0],
            &batch.pages[1],
            turn,
            &self.draws,
        ]
    }
}

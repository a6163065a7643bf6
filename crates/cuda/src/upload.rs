//! The batch on the device: one pinned block, one copy, every column at a place that does not change.

use std::sync::Arc;

use lapidary_ops::{Batch, Error, GROUPS, Group, KvPlan, PAGE_TOKENS, Result};

use crate::args::Columns;
use crate::driver::{Block, Context, DevPtr, Pinned, Stream};

/// How many entries the columns have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Capacity {
    rows: usize,
    heads: usize,
    pages: [usize; GROUPS],
}

/// Columns with an entry for each row: tokens, per-layer tokens, positions, soft, by group visible, table, cell, and
/// steering.
const ROW_COLUMNS: usize = 5 + 3 * GROUPS;

impl Capacity {
    fn ints(&self) -> usize {
        self.rows * ROW_COLUMNS + self.heads + self.pages.iter().sum::<usize>()
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
    /// Counts the times that columns have moved; what was recorded before the last of them is stale.
    pub moves: usize,
    capacity: Capacity,
    memory: Option<(Pinned, Block)>,
    soft: Option<(Pinned, Block)>,
    soft_bytes: usize,
    cells: Vec<(usize, usize)>,
}

impl Upload {
    /// Queues the copy of `batch`; nothing that reads the one before may still be queued.
    ///
    /// # Errors
    /// `Batch` for indices that lead outside the pools, `Device` where two rows would write one cell.
    pub fn take(
        &mut self,
        context: &Arc<Context>,
        stream: &Stream,
        batch: &Batch,
        plan: &KvPlan,
    ) -> Result<()> {
        // The vocabulary is the caller's to check, who knows the tables; pages are checked where they are followed.
        let width = batch.soft_values.len() / batch.soft_rows.len().max(1);
        batch.check(plan, width, i32::MAX as usize, i32::MAX as usize)?;
        let mut ints = RowInts::new(batch, plan, &mut self.cells)?;
        self.grow(context, batch)?;
        let (pinned, device) = self.memory.as_mut().expect("grown above");
        let words = pinned.bytes_mut().as_chunks_mut::<4>().0;
        let mut used = 0;
        for (place, column) in layout(&self.capacity).into_iter().zip(ints.columns(batch)) {
            for (word, value) in words[place..].iter_mut().zip(column) {
                *word = value.to_le_bytes();
            }
            if !column.is_empty() {
                used = used.max(place + column.len());
            }
        }
        // SAFETY: both blocks have the capacity's size, and nobody writes to the pinned one before the next batch,
        // for which the caller has waited.
        unsafe { stream.upload(device.ptr(), &pinned.bytes()[..used * 4])? };
        self.take_soft(context, stream, batch)?;
        self.batch.clone_from(batch);
        Ok(())
    }

    /// Makes room, and says where the columns are.
    fn grow(&mut self, context: &Arc<Context>, batch: &Batch) -> Result<()> {
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
        let memory = (Pinned::new(context, bytes)?, Block::new(context, "the batch", bytes)?);
        let at: Vec<DevPtr> = layout(&capacity).iter().map(|p| memory.1.ptr().at(p * 4)).collect();
        self.columns = Columns {
            tokens: at[0],
            per_layer_tokens: at[1],
            positions: at[2],
            soft: at[3],
            visible_to: [at[4], at[5]],
            table: [at[6], at[7]],
            cell: [at[8], at[9]],
            steer: at[10],
            heads: at[11],
            pages: [at[12], at[13]],
            soft_values: self.columns.soft_values,
        };
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

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        let len = |m: &Option<(Pinned, Block)>| m.as_ref().map_or(0, |m| m.1.len());
        len(&self.memory) + len(&self.soft)
    }
}

/// Where each column starts, in integers; in the order of [`RowInts::columns`].
fn layout(capacity: &Capacity) -> [usize; ROW_COLUMNS + 1 + GROUPS] {
    let lengths =
        std::iter::repeat_n(capacity.rows, ROW_COLUMNS).chain([capacity.heads]).chain(capacity.pages);
    let mut places = [0; ROW_COLUMNS + 1 + GROUPS];
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
    table: [Vec<i32>; GROUPS],
    cell: [Vec<i32>; GROUPS],
}

impl RowInts {
    fn new(batch: &Batch, plan: &KvPlan, cells: &mut Vec<(usize, usize)>) -> Result<RowInts> {
        let rows = batch.tokens.len();
        let mut ints = RowInts {
            soft: vec![-1; rows],
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

    fn columns<'a>(&'a mut self, batch: &'a Batch) -> [&'a [i32]; ROW_COLUMNS + 1 + GROUPS] {
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
            &batch.heads,
            &batch.pages[0],
            &batch.pages[1],
        ]
    }
}

//! What looks into a pass and bends it: copies of activations for the host, steering sets, projections.
//!
//! Kernels write copies and projections straight into pinned host memory, so that a recorded pass has them too and
//! nothing waits before its end. Every place is fixed from one pass to the next; `moves` counts when one changes, or
//! when a pass of the same shape would be other verbs.

use std::collections::BTreeSet;
use std::sync::Arc;

use lapidary_ops::{Batch, Projections, Result, SteerMode, SteerSet, Tap, TapPoint};

use crate::driver::{Block, Context, DevPtr, Pinned, Stream};
use crate::kernels::hooks::{Edit, Set};

/// Fewest sets that the table has room for.
const LEAST_SETS: usize = 16;

/// A copy that a pass makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TapPlace {
    pub point: TapPoint,
    pub rows: usize,
    pub width: usize,
}

/// Steering sets, and where projections and copies arrive.
#[derive(Debug, Default)]
pub(crate) struct Hooks {
    /// Counts the times that a recording went stale.
    pub moves: usize,
    sets: Vec<Option<Held>>,
    table: Option<Block>,
    /// Projections of a row that there is room for: enough for every set.
    stride: usize,
    projections: Option<Pinned>,
    /// Layers at which some set has an edit.
    layers: BTreeSet<usize>,
    taps: Vec<Pinned>,
}

/// A set on the device.
#[derive(Debug)]
struct Held {
    block: Block,
    entry: Set,
    edits: usize,
    layers: BTreeSet<usize>,
}

impl Held {
    fn new(context: &Arc<Context>, stream: &Stream, set: &SteerSet) -> Result<Held> {
        let layers = set.edits.last().map_or(0, |e| e.layer + 1);
        let firsts = (0..=layers).map(|l| set.edits.partition_point(|e| e.layer < l) as i32);
        let mut bytes: Vec<u8> = firsts.flat_map(i32::to_le_bytes).collect();
        let edits_at = bytes.len();
        for e in &set.edits {
            let edit = Edit {
                mode: SteerMode::ALL.iter().position(|m| *m == e.mode).expect("all modes are listed") as i32,
                gated: e.gate.is_some().into(),
                strength: e.strength,
                to: e.to,
                gate: e.gate.unwrap_or(0.0),
                norm: e.norm,
            };
            for word in [edit.mode, edit.gated] {
                bytes.extend(word.to_le_bytes());
            }
            for word in [edit.strength, edit.to, edit.gate, edit.norm] {
                bytes.extend(word.to_le_bytes());
            }
        }
        let units_at = bytes.len();
        bytes.extend(set.edits.iter().flat_map(|e| e.unit.iter()).flat_map(|v| v.to_le_bytes()));
        let block = Block::new(context, "a steering set", bytes.len())?;
        // SAFETY: the block has as many bytes; the memory is not pinned, so it is read when this returns.
        unsafe { stream.upload(block.ptr(), &bytes)? };
        let at = |bytes: usize| block.ptr().at(bytes);
        let entry =
            Set { first: at(0), edits: at(edits_at), units: at(units_at), layers: layers as i32, pad: 0 };
        let layers = set.edits.iter().map(|e| e.layer).collect();
        Ok(Held { entry, edits: set.edits.len(), layers, block })
    }
}

impl Set {
    /// No edits.
    const NONE: Set =
        Set { first: DevPtr::NULL, edits: DevPtr::NULL, units: DevPtr::NULL, layers: 0, pad: 0 };

    fn bytes(&self) -> Vec<u8> {
        let places = [self.first, self.edits, self.units];
        let numbers = [self.layers, self.pad];
        places
            .iter()
            .flat_map(|p| p.0.to_le_bytes())
            .chain(numbers.iter().flat_map(|n| n.to_le_bytes()))
            .collect()
    }
}

impl Hooks {
    /// Puts a set in the place of the one that was there, or gives that back; nothing that reads it is queued. Nothing
    /// has changed after an error.
    pub fn set(
        &mut self,
        context: &Arc<Context>,
        stream: &Stream,
        index: usize,
        set: Option<&SteerSet>,
    ) -> Result<()> {
        let held = set.map(|set| Held::new(context, stream, set)).transpose()?;
        if held.is_none() && index >= self.sets.len() {
            return Ok(());
        }
        let room = self.table.as_ref().map_or(0, Block::len) / size_of::<Set>();
        let table = match index < room {
            true => None,
            false => {
                let entries = (index + 1).next_power_of_two().max(LEAST_SETS);
                Some(Block::new(context, "the table of steering sets", entries * size_of::<Set>())?)
            }
        };
        if self.sets.len() <= index {
            self.sets.resize_with(index + 1, || None);
        }
        self.sets[index] = held;
        if let Some(table) = table {
            self.table = Some(table);
            self.moves += 1;
        }
        let entries = self.sets.iter().map(|s| s.as_ref().map_or(Set::NONE, |h| h.entry));
        let bytes: Vec<u8> = entries.flat_map(|e| e.bytes()).collect();
        let table = self.table.as_ref().expect("made above or before").ptr();
        // SAFETY: the table has room for every set; the memory is not pinned, so it is read when this returns.
        unsafe { stream.upload(table, &bytes)? };
        let held = || self.sets.iter().flatten();
        let stride = held().map(|h| h.edits).max().unwrap_or(0).next_power_of_two();
        let layers: BTreeSet<usize> = held().flat_map(|h| &h.layers).copied().collect();
        if stride > self.stride || layers != self.layers {
            self.stride = self.stride.max(stride);
            self.layers = layers;
            self.moves += 1;
        }
        Ok(())
    }

    /// Makes ready for a batch: nothing is projected yet.
    ///
    /// # Errors
    /// `Batch` for a row that names a set which is not held.
    pub fn prepare(&mut self, context: &Arc<Context>, batch: &Batch) -> Result<()> {
        batch.check_steer(&|set| self.sets.get(set).is_some_and(Option::is_some))?;
        if batch.steer.iter().all(|&set| set < 0) {
            return Ok(());
        }
        let bytes = batch.tokens.len() * self.stride * 4;
        if self.projections.as_ref().is_none_or(|p| p.bytes().len() < bytes) {
            self.projections = Some(Pinned::new(context, bytes.next_power_of_two())?);
            self.moves += 1;
        }
        let projections = self.projections.as_mut().expect("made above");
        for word in projections.bytes_mut()[..bytes].as_chunks_mut::<4>().0 {
            *word = f32::NAN.to_le_bytes();
        }
        Ok(())
    }

    /// Layers at which some set has an edit.
    pub fn layers(&self) -> &BTreeSet<usize> {
        &self.layers
    }

    /// The table of sets, and the place and width of projections.
    pub fn steering(&self) -> (DevPtr, DevPtr, usize) {
        let table = self.table.as_ref().map_or(DevPtr::NULL, Block::ptr);
        (table, self.projections.as_ref().map_or(DevPtr::NULL, Pinned::device), self.stride)
    }

    /// What rows of `batch` projected, once the pass is done.
    pub fn projections(&self, batch: &Batch) -> Projections {
        let used = batch.steer.iter().filter_map(|&set| usize::try_from(set).ok());
        let edits = used.filter_map(|set| self.sets.get(set)?.as_ref()).map(|held| held.edits);
        let (Some(stride), Some(all)) = (edits.max(), &self.projections) else {
            return Projections::default();
        };
        let rows = all.floats().chunks_exact(self.stride.max(1)).take(batch.tokens.len());
        Projections { stride, values: rows.flat_map(|row| &row[..stride]).copied().collect() }
    }

    /// Room for copy number `index` of a pass.
    pub fn tap(&mut self, context: &Arc<Context>, index: usize, floats: usize) -> Result<DevPtr> {
        let bytes = floats * 4;
        match self.taps.get_mut(index) {
            Some(held) if held.bytes().len() >= bytes => {}
            Some(held) => {
                *held = Pinned::new(context, bytes.next_power_of_two())?;
                self.moves += 1;
            }
            None => {
                self.taps.push(Pinned::new(context, bytes.next_power_of_two())?);
                self.moves += 1;
            }
        }
        Ok(self.taps[index].device())
    }

    /// The copies that a pass made, once it is done.
    pub fn taken(&self, places: &[TapPlace]) -> Vec<Tap> {
        let tap = |(place, held): (&TapPlace, &Pinned)| {
            let TapPlace { point, rows, width } = *place;
            Tap { point, rows, width, values: held.floats()[..rows * width].to_vec() }
        };
        places.iter().zip(&self.taps).map(tap).collect()
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        let sets = self.sets.iter().flatten().map(|h| h.block.len());
        sets.sum::<usize>() + self.table.as_ref().map_or(0, Block::len)
    }
}

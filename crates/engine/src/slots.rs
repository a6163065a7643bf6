//! Slots: sequences beside the single one, each with a fixed run of pages of its own.

use std::collections::HashMap;

use lapidary_model::kv_plan::sequence_pages;
use lapidary_ops::{Group, KvFormat, KvRef, PAGE_TOKENS};

use crate::error::{Error, Result};
use crate::lane::Lane;
use crate::runner::check_context;
use crate::stepper::Stepper;

/// What [`Stepper::slot_smoke`] looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SmokeReport {
    /// Layers with keys and values of their own.
    pub layers: usize,
    /// Cells whose addresses were compared.
    pub cells: usize,
    /// Cells that were written and read back.
    pub round_trips: usize,
}

impl Stepper {
    /// Allocates `n_slots` slots of `slot_ctx` positions each, freeing those of an earlier call. The single
    /// sequence is untouched and shares no page with any slot.
    ///
    /// # Errors
    /// `Zero`, `TooLarge`; the backend cannot hold the pools. The earlier slots are still there then.
    pub fn alloc_slots(&mut self, n_slots: usize, slot_ctx: usize) -> Result<()> {
        if n_slots == 0 {
            return Err(Error::Zero { what: "n_slots" });
        }
        if slot_ctx == 0 {
            return Err(Error::Zero { what: "slot_ctx" });
        }
        check_context("slot_ctx", slot_ctx)?;
        let config = self.model().config.clone();
        let chunk = self.model().limits.rows;
        let each = Group::ALL.map(|g| sequence_pages(&config, g, slot_ctx, chunk));
        let mut base = self.single.end();
        // Too many slots saturate to a number of pages that `resize` refuses.
        let end = [0, 1].map(|g| n_slots.saturating_mul(each[g]).saturating_add(base[g]));
        self.runner.resize(end)?;
        for slot in 0..self.slots.len() {
            self.set_slot_steering(slot, None)?;
        }
        let mut slots = Vec::with_capacity(n_slots);
        for _ in 0..n_slots {
            let lane = Lane::new(&config, base, slot_ctx, chunk);
            base = lane.end();
            slots.push(lane);
        }
        self.slots = slots;
        Ok(())
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Next position of a slot.
    ///
    /// # Errors
    /// `Slot`.
    pub fn slot_cursor(&self, slot: usize) -> Result<usize> {
        Ok(self.slot(slot)?.cursor())
    }

    /// Forgets a slot's sequence.
    ///
    /// # Errors
    /// `Slot`.
    pub fn reset_slot(&mut self, slot: usize) -> Result<()> {
        self.slot(slot)?;
        self.slots[slot].reset();
        Ok(())
    }

    /// Moves a slot's sequence back; as [`Stepper::rewind`].
    ///
    /// # Errors
    /// `Slot`, `LeftWindow`, `RewindForward`.
    pub fn rewind_slot(&mut self, slot: usize, position: usize) -> Result<()> {
        self.slot(slot)?;
        self.slots[slot].rewind(position)
    }

    /// Offset in bytes, inside the pool of the layer (its donor's for a KV-sharing layer), of the slot's key of
    /// head 0 at `position`.
    ///
    /// # Errors
    /// `Layer`, `Slot`, `ContextFull` for a position beyond the slot, `LeftWindow` for one whose page a later
    /// position has taken.
    pub fn slot_offset(&self, layer: usize, slot: usize, position: usize) -> Result<usize> {
        let cache = self.cache(layer)?;
        let (page, in_page) = self.slot(slot)?.cell(cache.group, position)?;
        Ok(self.runner.plan().groups[cache.group.index()].cell_offset(cache.index, page, in_page))
    }

    pub(crate) fn cache(&self, layer: usize) -> Result<KvRef> {
        let layers = &self.model().layers;
        let layer = layers.get(layer).ok_or(Error::Layer { layer, layers: layers.len() })?;
        Ok(layer.attn.spec.cache)
    }

    /// Zeros the single sequence's keys and values at `position` in every layer.
    pub(crate) fn clear_position(&mut self, position: usize) -> Result<()> {
        for layer in 0..self.model().layers.len() {
            let cache = self.cache(layer)?;
            if cache.writes {
                let (page, in_page) = self.single.cell(cache.group, position)?;
                let shape = self.runner.plan().groups[cache.group.index()].layers[cache.index];
                let zeros = vec![0.0; shape.kv_heads * shape.head_dim];
                self.runner.backend().kv_store(cache, page, in_page, &zeros, &zeros)?;
            }
        }
        Ok(())
    }

    /// Proves, in every layer with keys and values of its own, that positions which can be live together (in
    /// any slot and in the single sequence) have cells of their own, and that what is written to them comes
    /// back.
    ///
    /// # Errors
    /// `SlotsBusy` when any sequence has begun, since cells are overwritten; `SlotSmoke` names the layer.
    pub fn slot_smoke(&mut self) -> Result<SmokeReport> {
        let lanes: Vec<Lane> = std::iter::once(&self.single).chain(&self.slots).cloned().collect();
        if lanes.iter().any(|l| l.cursor() != 0) {
            return Err(Error::SlotsBusy);
        }
        let mut report = SmokeReport::default();
        for layer in 0..self.model().layers.len() {
            let cache = self.cache(layer)?;
            if cache.writes {
                report.layers += 1;
                self.smoke_layer(layer, cache, &lanes, &mut report)?;
            }
        }
        Ok(report)
    }

    fn smoke_layer(
        &mut self,
        layer: usize,
        cache: KvRef,
        lanes: &[Lane],
        report: &mut SmokeReport,
    ) -> Result<()> {
        let fail = |problem: String| Error::SlotSmoke { layer, problem };
        let group = self.runner.plan().groups[cache.group.index()].clone();
        let row_bytes = group.format.row_bytes(group.layers[cache.index].head_dim);
        let mut owner: HashMap<usize, (usize, usize)> = HashMap::new();
        let mut written = Vec::new();
        for (lane_index, lane) in lanes.iter().enumerate() {
            for position in lane.live_when_full(cache.group) {
                let (page, in_page) = lane.cell(cache.group, position)?;
                if page == 0 || page >= group.pages {
                    return Err(fail(format!("position {position} is on page {page} of {}", group.pages)));
                }
                let offset = group.cell_offset(cache.index, page, in_page);
                if !offset.is_multiple_of(row_bytes) {
                    return Err(fail(format!("offset {offset} is not a whole number of rows")));
                }
                if let Some((l, p)) = owner.insert(offset, (lane_index, position)) {
                    let what = format!("position {position} of sequence {lane_index} and {p} of {l} overlap");
                    return Err(fail(what));
                }
                report.cells += 1;
                // Both ends of every page stand for the page.
                if position % PAGE_TOKENS == 0 || position % PAGE_TOKENS == PAGE_TOKENS - 1 {
                    written.push((page, in_page));
                }
            }
        }
        let shape = group.layers[cache.index];
        let width = shape.kv_heads * shape.head_dim;
        // Small integers are exact in every KV format but FP8, which has powers of two; a block of 127 and small ones is
        // exact in Q8_0.
        let fp8 = group.format == KvFormat::Fp8;
        let pattern = |cell: usize, i: usize, side: usize| match i % 32 {
            n if fp8 => [0.25f32, 0.5, 1.0, 2.0, 4.0][(cell * 31 + n * 7 + side * 53) % 5],
            0 => 127.0,
            n => ((cell * 31 + n * 7 + side * 53) % 101) as f32,
        };
        let row = |cell: usize, side: usize| (0..width).map(|i| pattern(cell, i, side)).collect::<Vec<f32>>();
        for (cell, &(page, in_page)) in written.iter().enumerate() {
            self.runner.backend().kv_store(cache, page, in_page, &row(cell, 0), &row(cell, 1))?;
        }
        let (mut k, mut v) = (vec![0.0; width], vec![0.0; width]);
        for (cell, &(page, in_page)) in written.iter().enumerate() {
            self.runner.backend().kv_load(cache, page, in_page, &mut k, &mut v)?;
            if k != row(cell, 0) || v != row(cell, 1) {
                return Err(fail(format!("page {page}, place {in_page} did not come back as written")));
            }
            report.round_trips += 1;
        }
        Ok(())
    }
}

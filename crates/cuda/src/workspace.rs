//! Memory for what a verb needs between its kernels, and for single results.
//!
//! A piece grows when a pass first asks for more of it, which waits for queued work; a pass of a shape that ran
//! before allocates nothing.

use std::sync::Arc;

use crate::driver::{Block, Context, DevPtr, Stream};
use crate::error::Result;

/// The pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Chosen tokens, one integer a head row.
    Tokens,
    /// Partial results of the search for them.
    Argmax,
    /// Candidates for tokens that are drawn.
    Draw,
    /// Pairs of rows and experts by expert, and where each expert's begin.
    Pairs,
    /// Experts' intermediate rows.
    Experts,
    /// One position's keys and values.
    Cell,
    /// Sums of products that are cut into planes.
    PlanesA,
    /// Of another product.
    PlanesB,
    /// Of a third.
    PlanesC,
    /// Normed, rotated queries.
    Queries,
    /// What blocks of the attention kernel hand each other.
    Attention,
    /// Router logits and routes without gaps.
    Routes,
    /// By expert: which rows chose it.
    Lists,
    /// Counters that kernels leave at zero.
    Counters,
    /// Inputs of a product in the order in which its kernel reads them.
    Arranged,
    /// The residual of one row, while blocks still read what it was.
    Residual,
}

const PIECES: usize = 16;

/// All pieces.
#[derive(Debug)]
pub(crate) struct Workspace {
    context: Arc<Context>,
    pieces: [Option<Block>; PIECES],
    /// Counts the times that a piece has moved; what was recorded before the last of them is stale.
    pub moves: usize,
}

impl Workspace {
    /// Nothing yet.
    pub fn new(context: &Arc<Context>) -> Workspace {
        Workspace { context: context.clone(), pieces: Default::default(), moves: 0 }
    }

    /// A piece of at least `bytes`, zeros when it is new; contents are lost when it grows.
    pub fn get(&mut self, piece: Piece, stream: &Stream, bytes: usize) -> Result<DevPtr> {
        let held = &mut self.pieces[piece as usize];
        if let Some(block) = held.as_ref().filter(|b| b.len() >= bytes) {
            return Ok(block.ptr());
        }
        stream.wait()?;
        // The old piece goes first, so that growing needs no room for both.
        *held = None;
        let block = held.insert(Block::new(&self.context, "intermediate values of a pass", bytes.max(256))?);
        self.moves += 1;
        // SAFETY: the block was just made.
        unsafe { stream.fill(block.ptr(), 0, block.len())? };
        Ok(block.ptr())
    }

    /// Where the chosen tokens are; null before any were chosen.
    pub fn tokens(&self) -> DevPtr {
        self.pieces[Piece::Tokens as usize].as_ref().map_or(DevPtr::NULL, Block::ptr)
    }

    /// Room for one position.
    pub fn cell(&mut self, stream: &Stream, bytes: usize) -> Result<DevPtr> {
        self.get(Piece::Cell, stream, bytes)
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.pieces.iter().flatten().map(Block::len).sum()
    }
}

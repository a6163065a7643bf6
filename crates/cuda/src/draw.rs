//! Drawing tokens behind the search for the largest logit.

use lapidary_ops::{Act, Result};

use crate::driver::DevPtr;
use crate::kernels::draw::{self, DrawCall};
use crate::kernels::producers::Told;
use crate::ops::CudaOps;
use crate::workspace::Piece;

impl CudaOps<'_> {
    /// Replaces in `out`, and where the host reads it, the tokens of rows that the batch has drawn.
    pub(crate) fn draw(&mut self, logits: Act, out: DevPtr, told: Option<Told>) -> Result<()> {
        if self.on.upload.batch.draws.iter().all(Option::is_none) {
            return Ok(());
        }
        let most = self.on.acts[logits.0 as usize].spec.max_rows;
        let l = self.act(logits);
        let bytes = draw::workspace_bytes(most, l.width as usize);
        let workspace = self.on.workspace.get(Piece::Draw, &self.on.stream, bytes)?;
        let call = DrawCall {
            logits: l.ptr,
            stride: l.stride as usize,
            vocab: l.width as usize,
            rows: self.rows,
            draws: self.on.upload.columns.draws,
            out,
            workspace,
            told,
        };
        // SAFETY: the pieces hold as many rows as the logits do, the column one entry for each of them.
        unsafe { Ok(draw::draw(self.on.queue(), &call)?) }
    }
}

//! Stacked parts of one matrix: which of them a kernel can take in one go.

use lapidary_formats::TensorView;

use super::form::{Form, PackedShape};
use super::strips::STRIP_ROWS;

/// A run of parts that are packed as one matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The run's place in the list of parts.
    pub parts: std::ops::Range<usize>,
    /// The first of its outputs in the stacked matrix.
    pub first_row: usize,
    /// Form and size of the run.
    pub shape: PackedShape,
}

/// Splits stacked parts (q, k, v; gate, up; experts) into as few matrices as can be: a part joins the one before when
/// it has the same form and that one ends at a whole strip.
pub fn segments(parts: &[TensorView<'_>]) -> Vec<Segment> {
    let mut list: Vec<Segment> = Vec::new();
    let mut row = 0;
    for (i, part) in parts.iter().enumerate() {
        let form = Form::of(part);
        match list.last_mut() {
            Some(last) if last.shape.form == form && last.shape.rows.is_multiple_of(STRIP_ROWS) => {
                last.parts.end = i + 1;
                last.shape.rows += part.rows;
            }
            _ => {
                let shape = PackedShape { form, rows: part.rows, cols: part.cols };
                list.push(Segment { parts: i..i + 1, first_row: row, shape });
            }
        }
        row += part.rows;
    }
    list
}

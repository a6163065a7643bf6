//! What came of a conversion, tensor by tensor.

use lapidary_formats::{Format, TensorView, decode_row};

/// What came of a conversion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConvertReport {
    /// Length of the file.
    pub bytes: u64,
    /// Tensors in it.
    pub tensors: usize,
    /// Every matrix, in the file's order, and what its encoding cost.
    pub matrices: Vec<MatrixReport>,
    /// Matrices in another format than the chosen one.
    pub fallbacks: Vec<Fallback>,
    /// Tensors of the checkpoint that nobody reads and the file lacks.
    pub dropped: Vec<String>,
    /// What else a user should hear of.
    pub notes: Vec<String>,
}

/// A matrix that couldn't have the chosen format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// Its name in the file.
    pub tensor: String,
    /// Values in a row, no whole number of the chosen format's blocks.
    pub cols: usize,
    /// What it got.
    pub format: Format,
}

/// One matrix of a converted file; the experts of a layer are one where they are one tensor of the file.
#[derive(Clone, Debug, PartialEq)]
pub struct MatrixReport {
    /// Its name in the file.
    pub tensor: String,
    /// Rows, of all experts together.
    pub rows: usize,
    /// Values in a row.
    pub cols: usize,
    /// The format that it was read in.
    pub from: Format,
    /// The format that it was written in.
    pub format: Format,
    /// How far the written values are from those read.
    pub error: EncodingError,
}

/// Distances between the values of a matrix before and after it was encoded, gathered row by row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EncodingError {
    /// Sum of the squared values.
    squares: f64,
    /// Sum of the squared differences.
    errors: f64,
    /// Values seen.
    pub count: u64,
    /// The largest difference.
    pub max: f64,
    /// The largest value's magnitude.
    pub largest: f64,
}

impl EncodingError {
    /// Adds values and what became of them.
    pub fn add(&mut self, before: &[f32], after: &[f32]) {
        debug_assert_eq!(before.len(), after.len());
        self.count += before.len() as u64;
        for (&b, &a) in before.iter().zip(after) {
            let (b, error) = (f64::from(b), f64::from(a) - f64::from(b));
            self.squares += b * b;
            self.errors += error * error;
            self.max = self.max.max(error.abs());
            self.largest = self.largest.max(b.abs());
        }
    }

    /// Adds every row of a matrix and of what became of it.
    pub fn add_views(&mut self, before: &TensorView<'_>, after: &TensorView<'_>) {
        let mut rows = [vec![0.0; before.cols], vec![0.0; before.cols]];
        for row in 0..before.rows {
            decode_row(before, row, &mut rows[0]);
            decode_row(after, row, &mut rows[1]);
            self.add(&rows[0], &rows[1]);
        }
    }

    /// Root mean square of the differences over that of the values; 0 for a matrix of zeros that stayed zeros.
    pub fn relative_rms(&self) -> f64 {
        if self.errors == 0.0 { 0.0 } else { (self.errors / self.squares).sqrt() }
    }

    /// All matrices as one.
    pub fn sum<'a>(all: impl IntoIterator<Item = &'a EncodingError>) -> EncodingError {
        all.into_iter().fold(EncodingError::default(), |sum, e| EncodingError {
            squares: sum.squares + e.squares,
            errors: sum.errors + e.errors,
            count: sum.count + e.count,
            max: sum.max.max(e.max),
            largest: sum.largest.max(e.largest),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_by_hand() {
        let mut e = EncodingError::default();
        e.add(&[3.0, -4.0], &[3.5, -4.0]);
        e.add(&[0.0], &[-1.0]);
        assert_eq!((e.count, e.max, e.largest), (3, 1.0, 4.0));
        assert!((e.relative_rms() - (1.25f64 / 25.0).sqrt()).abs() < 1e-15);
        let twice = EncodingError::sum([&e, &e]);
        assert_eq!((twice.count, twice.max, twice.relative_rms()), (6, 1.0, e.relative_rms()));
        assert_eq!(EncodingError::default().relative_rms(), 0.0);
    }
}

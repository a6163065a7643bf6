//! How far a quantised matrix is from what it was made of.

/// The difference between values and what came back of them, collected piece by piece.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    /// Values compared.
    pub count: u64,
    /// Sum of the squares of the values.
    pub squares: f64,
    /// Sum of the squares of the differences.
    pub error_squares: f64,
    /// The largest difference.
    pub largest: f64,
}

impl Loss {
    /// Adds a piece.
    ///
    /// # Panics
    /// When the two are not of one length.
    pub fn add(&mut self, values: &[f32], decoded: &[f32]) {
        assert_eq!(values.len(), decoded.len(), "a value came back for each");
        self.count += values.len() as u64;
        for (&v, &d) in values.iter().zip(decoded) {
            let (v, error) = (f64::from(v), f64::from(v) - f64::from(d));
            self.squares += v * v;
            self.error_squares += error * error;
            self.largest = self.largest.max(error.abs());
        }
    }

    /// Root mean square of the differences over that of the values; 0 for values that are all zero and came back so.
    pub fn relative(&self) -> f64 {
        match self.error_squares {
            0.0 => 0.0,
            error => (error / self.squares).sqrt(),
        }
    }
}

//! What a device needs to know to draw a token by itself.

/// How the token of one head row is drawn from its logits on the device: as `lapidary-engine`'s sampler does on the
/// host, which says what each step means and whose tokens these are.
///
/// In order: `suppress`, temperature, `top_k`, `top_p`, `min_p`, then the draw with the number that the generator
/// gives for `seed` and `position`. Equal logits are ordered by id, lowest first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Reciprocal of the temperature; finite and above 0.
    pub inverse_temperature: f64,
    /// Tokens that are kept, from 1, which takes the best, to [`Draw::MOST_KEPT`].
    pub top_k: u32,
    /// Probability at which the best of them end, from 0 to 1.
    pub top_p: f32,
    /// Least probability relative to the best token's, from 0 to 1.
    pub min_p: f32,
    /// Key of the random numbers.
    pub seed: u64,
    /// Position in the sequence that the token will have.
    pub position: u64,
    /// Tokens that are never chosen; places without one hold -1.
    pub suppress: [i32; Draw::MOST_SUPPRESSED],
}

impl Draw {
    /// Largest `top_k`.
    pub const MOST_KEPT: u32 = 64;
    /// Most tokens that are never chosen.
    pub const MOST_SUPPRESSED: usize = 8;

    /// Whether every field is in its range.
    pub fn is_valid(&self) -> bool {
        let share = |x: f32| (0.0..=1.0).contains(&x);
        self.inverse_temperature.is_finite()
            && self.inverse_temperature > 0.0
            && (1..=Draw::MOST_KEPT).contains(&self.top_k)
            && share(self.top_p)
            && share(self.min_p)
    }
}

//! The longest context that a memory budget allows, found by arithmetic before anything is loaded.

/// How a plan stands to a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// The wanted context fits.
    AsWanted,
    /// The wanted context does not, a shorter one that is long enough does.
    Shorter(usize),
    /// None that is long enough fits; here is the longest that does, if any.
    TooLarge {
        /// Positions.
        longest: Option<usize>,
    },
}

/// Holds plans of up to `wanted` positions against `budget` bytes. `least` is the shortest context that is of use;
/// equal to `wanted` where the context is not to be cut. `total` gives the bytes of a plan and never falls as the context
/// grows.
pub fn fit(wanted: usize, least: usize, budget: u64, total: &dyn Fn(usize) -> u64) -> Fit {
    if total(wanted) <= budget {
        return Fit::AsWanted;
    }
    // The longest that fits lies in `fits .. beyond`; 0 stands for none.
    let (mut fits, mut beyond) = (0, wanted);
    while beyond - fits > 1 {
        let middle = fits + (beyond - fits) / 2;
        match total(middle) <= budget {
            true => fits = middle,
            false => beyond = middle,
        }
    }
    match fits {
        0 => Fit::TooLarge { longest: None },
        n if n >= least => Fit::Shorter(n),
        n => Fit::TooLarge { longest: Some(n) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1,000 bytes whatever the context, and 64 for each begun page of 32 positions.
    fn total(context: usize) -> u64 {
        1_000 + 64 * context.div_ceil(32) as u64
    }

    #[test]
    fn the_longest_context_is_found_to_the_position() {
        // 100 positions are 4 pages, 1,256 bytes; 1,200 bytes are room for 3 pages, 96 positions.
        assert_eq!(fit(100, 100, 1_256, &total), Fit::AsWanted);
        assert_eq!(fit(100, 100, 1_255, &total), Fit::TooLarge { longest: Some(96) });
        assert_eq!(fit(100, 96, 1_200, &total), Fit::Shorter(96));
        assert_eq!(fit(100, 97, 1_200, &total), Fit::TooLarge { longest: Some(96) });
        assert_eq!(fit(100, 1, 1_064, &total), Fit::Shorter(32));
        assert_eq!(fit(100, 1, 1_063, &total), Fit::TooLarge { longest: None });
        assert_eq!(fit(1, 1, 0, &total), Fit::TooLarge { longest: None });
    }
}

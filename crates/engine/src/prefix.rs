//! What is kept of earlier requests, so that later ones with the same beginning need not run it again.

/// What may be kept.
#[derive(Clone, Debug, Default)]
pub struct PrefixOptions {}

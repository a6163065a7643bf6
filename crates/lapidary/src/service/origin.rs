//! What stored keys and values were computed from: a name that no other model has.

use lapidary_weights::Checkpoint;
use sha2::{Digest, Sha256};

use crate::{Config, LoadOptions};

/// Hashes every byte of the weights, and everything else that decides what they compute beside the engine's own layout and
/// device. Reading all of a large file takes a while, which only those pay who store.
pub(super) fn origin(checkpoint: &Checkpoint, config: &Config, load: &LoadOptions) -> String {
    let mut hash = Sha256::new();
    for map in checkpoint.maps() {
        let bytes: &[u8] = AsRef::<[u8]>::as_ref(&*map);
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    // The configuration may stand in a file of its own.
    hash.update(format!("{config:?} {:?}", load.embed_scale));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

//! Names for requests and replies, and the time of day.

use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

/// A name that no other reply has: the prefix and 24 digits. The digits are spread, not secret.
pub fn fresh(prefix: &str) -> String {
    static KEY: OnceLock<RandomState> = OnceLock::new();
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let hash = KEY.get_or_init(RandomState::new).hash_one(count);
    format!("{prefix}{hash:016x}{:08x}", count & 0xffff_ffff)
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

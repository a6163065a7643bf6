//! placeholder

#[cfg(feature = "hub")]
pub mod hub;

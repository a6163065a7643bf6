//! placeholder

pub mod convert;
#[cfg(feature = "hub")]
pub mod hub;

//! placeholder

pub mod bandwidth;
pub mod capture;
pub mod check;
pub mod convert;
pub mod host;
#[cfg(feature = "hub")]
pub mod hub;
pub mod plan;

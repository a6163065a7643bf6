//! placeholder

pub mod sampling;

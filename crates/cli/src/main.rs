//! The `lapidary` command.
fn main() {}

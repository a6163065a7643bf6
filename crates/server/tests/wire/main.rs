//! The wire over a scripted model: one program, so that it is linked once.

#[path = "../common/mod.rs"]
mod common;

mod batch;
mod chat;
mod completions;
mod connections;
mod messages;
mod responses;
mod server;

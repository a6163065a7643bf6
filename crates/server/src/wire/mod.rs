//! The wire formats, by API. They are converted by hand from and to what [`lapidary::service`] speaks.
//!
//! Requests are plain structs without tagged or flattened parts: so an error knows the path to its field, and fields
//! that nothing knows are found at every depth.

pub mod chat;
pub mod chunks;
pub mod completions;
pub mod format;
pub mod looks;
pub mod message;
pub mod message_events;
pub mod messages;
pub mod response_events;
pub mod responses;
pub mod sampling;
pub mod thinking;
pub mod values;

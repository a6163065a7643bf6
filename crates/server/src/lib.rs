//! HTTP over a lapidary service: the OpenAI and Anthropic formats, health, metrics, a chat page.
//!
//! [`App`] is the state, [`router`] the routes over it; [`listen`] accepts connections. A handler reads a body into a
//! type of [`wire`], converts it by hand into what [`lapidary::service`] takes, and writes the events that come back.
//!
//! Deliberately absent: anything about tokens, templates, grammars or devices, and the command line.

mod app;
mod auth;
pub mod batch;
pub mod bench;
mod body;
mod error;
mod ids;
mod json;
mod layers;
pub mod listen;
mod metrics;
mod model;
mod openapi;
mod options;
mod replies;
mod routes;
mod spans;
mod sse;
mod wire;

pub use app::App;
pub use auth::Keys;
pub use error::ApiError;
pub use model::Model;
pub use options::ServerOptions;
pub use routes::router;

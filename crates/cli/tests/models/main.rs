//! `pull`, `list`, `rm` and `show` from the outside: the real binary, with servers on this machine
//! in the place of registries and hubs.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod hub;
mod place;
mod registry;
mod server;
mod store;
#[cfg(unix)]
#[path = "../commands/terminal.rs"]
#[expect(dead_code, reason = "chats need more of it")]
mod terminal;
mod wheels;

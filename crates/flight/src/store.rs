//! A vector store that speaks Longbow's contract over Flight: rows go to its data port, questions
//! about them to its meta port.

mod connection;
mod search;
mod seen;
mod sender;
mod upload;

pub use connection::Address;
pub use search::{Hit, search};
pub use sender::UploadOptions;
pub use upload::{Landed, Stopped, Upload};

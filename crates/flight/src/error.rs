//! What can go wrong, in one line each.

use arrow_flight::error::FlightError;
use arrow_schema::ArrowError;
use tonic::{Code, Status};

/// The result of everything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why rows could not be read, written, sent or found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read or written.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A row does not fit the others.
    #[error("row {row}: {reason}")]
    Row {
        /// Its number, from 1.
        row: u64,
        /// What was expected and found.
        reason: String,
    },
    /// Rows cannot be made a record batch.
    #[error("{0}")]
    Arrow(#[from] ArrowError),
    /// Nothing answers at the address.
    #[error("cannot reach the store at {address}: {reason}")]
    Unreachable {
        /// `HOST:PORT`.
        address: String,
        /// The cause.
        reason: String,
    },
    /// The store refused a call.
    #[error("the store at {address} refused {call}: {message}")]
    Refused {
        /// `HOST:PORT`.
        address: String,
        /// What was asked.
        call: &'static str,
        /// Its words.
        message: String,
        /// The kind of refusal.
        code: Code,
    },
    /// The store did something that its contract does not allow.
    #[error("the store at {address}: {reason}")]
    Store {
        /// `HOST:PORT`.
        address: String,
        /// What was expected and found.
        reason: String,
    },
    /// A row that was read back is not the one that was sent.
    #[error(
        "the store at {address}: expected one row with the id {id} and the bits that were sent, \
         found {rows} rows, {equal} of them equal"
    )]
    Changed {
        /// `HOST:PORT`.
        address: String,
        /// The row's id.
        id: String,
        /// The rows with this id.
        rows: u64,
        /// Those of them with the text and the bits that were sent.
        equal: u64,
    },
    /// The service cannot listen.
    #[error("cannot listen on {address}: {reason}")]
    Listen {
        /// The address.
        address: std::net::SocketAddr,
        /// The system's reason.
        reason: String,
    },
    /// The caller asked to end.
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    /// The error of a call.
    pub(crate) fn of_call(address: &str, call: &'static str, error: FlightError) -> Error {
        match error {
            FlightError::Tonic(status) => Error::of_status(address, call, &status),
            other => {
                Error::Store { address: address.to_owned(), reason: format!("{call}: {other}") }
            }
        }
    }

    fn of_status(address: &str, call: &'static str, status: &Status) -> Error {
        let address = address.to_owned();
        // Some servers append where in their own code it happened.
        let said = status.message().lines().next().unwrap_or_default();
        let message = match status.code() {
            Code::Unauthenticated | Code::PermissionDenied => {
                format!("wrong or missing API key ({said})")
            }
            Code::Unimplemented => format!("{said} (is this the right port?)"),
            _ => said.to_owned(),
        };
        match status.code() {
            Code::Unavailable => Error::Unreachable { address, reason: reason_of(status) },
            code => Error::Refused { address, call, message, code },
        }
    }

    /// Whether the same call may succeed later.
    pub(crate) fn is_transient(&self) -> bool {
        use Code::{Aborted, Cancelled, DeadlineExceeded, ResourceExhausted, Unknown};
        match self {
            Error::Unreachable { .. } => true,
            Error::Refused { code, .. } => {
                matches!(code, Aborted | Cancelled | DeadlineExceeded | ResourceExhausted | Unknown)
            }
            _ => false,
        }
    }
}

/// The innermost cause of an error, which says most.
pub(crate) fn reason_of(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    match cause.downcast_ref::<Status>() {
        Some(status) => status.message().to_owned(),
        None => cause.to_string(),
    }
}

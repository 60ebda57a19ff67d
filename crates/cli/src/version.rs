//! What `--version` prints: the version, the commit, and the devices that this machine has.

use std::ffi::OsString;

/// The version.
pub(crate) const NUMBER: &str = env!("CARGO_PKG_VERSION");

/// The version alone, or with commit and devices if the command line asks for it: to look for
/// devices takes a while.
pub(crate) fn of(command_line: &[OsString]) -> String {
    if !command_line.iter().any(|argument| argument == "--version" || argument == "-V") {
        return NUMBER.to_owned();
    }
    let devices = bodkin::device_lines().into_iter().map(|line| format!("\n  {line}"));
    format!("{NUMBER}{}{}", commit(), devices.collect::<String>())
}

/// The commit in parentheses, if it is known.
pub(crate) fn commit() -> String {
    option_env!("BODKIN_COMMIT").map_or(String::new(), |id| format!(" (commit {id})"))
}

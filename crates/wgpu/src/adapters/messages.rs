//! What drivers print while they are looked for. Mesa calls it an error that a session has no
//! folder for Wayland's sockets, as those of servers have none.

/// Runs `work`, and then prints what it wrote to the standard error, without such messages.
#[cfg(unix)]
pub(crate) fn filter<T>(work: impl FnOnce() -> T) -> T {
    use std::io::{Read, Seek, Write, stderr};
    use std::os::fd::{AsFd, OwnedFd};
    use std::path::Path;
    use std::sync::{Mutex, PoisonError};

    use nix::unistd::dup2_stderr;

    /// Sets the standard error back, also after a panic.
    struct Redirected(OwnedFd);
    impl Drop for Redirected {
        fn drop(&mut self) {
            let _ = dup2_stderr(&self.0);
        }
    }

    // Of two that run at once, the second would set the standard error back to the file of the
    // first.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

    if std::env::var_os("XDG_RUNTIME_DIR").is_some_and(|folder| Path::new(&folder).is_dir()) {
        return work();
    }
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let (Ok(terminal), Ok(mut file)) =
        (stderr().as_fd().try_clone_to_owned(), tempfile::tempfile())
    else {
        return work();
    };
    if dup2_stderr(&file).is_err() {
        return work();
    }
    let redirected = Redirected(terminal);
    let result = work();
    drop(redirected);
    let mut text = Vec::new();
    // What cannot be read is not printed.
    let _ = file.rewind().and_then(|()| file.read_to_end(&mut text));
    let lines = text.split_inclusive(|&byte| byte == b'\n').filter(|line| !is_noise(line));
    let _ = stderr().write_all(&lines.collect::<Vec<_>>().concat());
    result
}

#[cfg(unix)]
fn is_noise(line: &[u8]) -> bool {
    line.starts_with(b"error: XDG_RUNTIME_DIR is invalid or not set")
}

/// Runs `work`.
#[cfg(not(unix))]
pub(crate) fn filter<T>(work: impl FnOnce() -> T) -> T {
    work()
}

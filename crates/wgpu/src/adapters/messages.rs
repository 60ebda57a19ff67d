//! What drivers print while they are looked for. Mesa calls it an error that a session has no
//! folder for Wayland's sockets, as those of servers have none.

/// Runs `work`, and then prints what it wrote to the standard error, without such messages.
#[cfg(unix)]
pub(crate) fn filter<T>(work: impl FnOnce() -> T) -> T {
    use std::io::{BufRead, BufReader, Write, pipe, stderr};
    use std::os::fd::AsFd;
    use std::thread;

    use nix::unistd::dup2_stderr;

    let (Ok(terminal), Ok((reader, writer))) = (stderr().as_fd().try_clone_to_owned(), pipe())
    else {
        return work();
    };
    if dup2_stderr(writer).is_err() {
        return work();
    }
    // The pipe has an end when nothing has it as its standard error.
    let lines =
        thread::spawn(|| BufReader::new(reader).split(b'\n').map_while(Result::ok).collect());
    let result = work();
    let _ = dup2_stderr(terminal);
    let lines: Vec<Vec<u8>> = lines.join().unwrap_or_default();
    for line in lines.iter().filter(|line| !is_noise(line)) {
        let _ = stderr().write_all(&[line, &b"\n"[..]].concat());
    }
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

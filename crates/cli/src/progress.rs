//! Progress on stderr: a bar on a terminal, one plain line everywhere else. It must not know what
//! is being counted, beyond that it is bytes.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// One phase of work over a known or unknown number of bytes.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Starts a phase; `total_bytes` is `None` where it cannot be known beforehand.
    pub(crate) fn start(what: &str, total_bytes: Option<u64>) -> Progress {
        let bar = match total_bytes {
            Some(total) => ProgressBar::new(total)
                .with_style(style("{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}")),
            None => ProgressBar::new_spinner()
                .with_style(style("{spinner} {msg} {bytes} {bytes_per_sec}")),
        };
        if bar.is_hidden() {
            eprintln!("{what}");
        }
        bar.set_message(what.to_owned());
        bar.enable_steady_tick(Duration::from_millis(200));
        Progress(bar)
    }

    /// Sets the number of bytes done so far.
    pub(crate) fn set(&self, bytes: u64) {
        self.0.set_position(bytes);
    }

    /// Adds to the number of bytes done so far.
    pub(crate) fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// The hub's client counts the bytes of a download through this interface.
impl hf_hub::api::Progress for &Progress {
    fn init(&mut self, _size: usize, _filename: &str) {
        self.set(0);
    }

    fn update(&mut self, size: usize) {
        self.add(size as u64);
    }

    fn finish(&mut self) {}
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the templates above are well formed")
}

/// A number of bytes for people: three digits at most before the unit, decimal units as disks use.
pub(crate) fn human_bytes(bytes: u64) -> String {
    indicatif::DecimalBytes(bytes).to_string()
}

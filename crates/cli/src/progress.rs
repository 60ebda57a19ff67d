//! Progress on stderr: a bar on a terminal, one plain line everywhere else.

use std::collections::HashSet;
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bodkin::{Phase, Progress, Reporter};
use indicatif::{ProgressBar, ProgressStyle};

use crate::errors::printable_text;
use crate::terminal::say;

/// When the command began, and whether each step of it is printed.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);
static VERBOSE: AtomicBool = AtomicBool::new(false);

static CONSOLE: LazyLock<Mutex<Console>> = LazyLock::new(Mutex::default);
const TICK: Duration = Duration::from_millis(200);

/// Begins the command; `verbose` is its flag.
pub(crate) fn begin(verbose: bool) {
    LazyLock::force(&START);
    VERBOSE.store(verbose, Relaxed);
}

/// Whether `--verbose` was given.
pub(crate) fn is_verbose() -> bool {
    VERBOSE.load(Relaxed)
}

/// The bar of the current phase, and the notes that are already printed.
#[derive(Default)]
struct Console {
    bar: Option<ProgressBar>,
    notes: HashSet<String>,
}

impl Console {
    fn show(&mut self, progress: Progress<'_>) {
        match progress {
            Progress::Begin { what, total_bytes } => self.bar = Some(bar(what, total_bytes)),
            Progress::Bytes(bytes) => match &self.bar {
                Some(bar) if bar.position() == 0 => start_at(bytes, bar),
                Some(bar) => bar.set_position(bytes),
                None => (),
            },
            Progress::End => self.bar.take().iter().for_each(ProgressBar::finish_and_clear),
            // Commands that load a model several times print a note once.
            Progress::Note(text) => {
                let text = &*printable_text(text);
                if self.notes.insert(text.to_owned()) {
                    match &self.bar {
                        Some(bar) => bar.suspend(|| say(text)),
                        None => say(text),
                    }
                }
            }
            Progress::Detail(text) if is_verbose() => {
                let seconds = START.elapsed().as_secs_f64();
                eprintln!("[{seconds:7.3} s] {text}");
            }
            Progress::Detail(_) => (),
        }
    }
}

/// The receiver of all progress events of this process.
pub(crate) fn reporter() -> &'static Reporter {
    static REPORTER: LazyLock<Reporter> = LazyLock::new(|| {
        Reporter::new(|progress| {
            CONSOLE.lock().unwrap_or_else(PoisonError::into_inner).show(progress);
        })
    });
    &REPORTER
}

/// Begins a phase that this machine computes, such as a conversion. Where its progress cannot be
/// seen, nothing is printed: if it fails, the error is the only line.
pub(crate) fn computing(what: &str, total_bytes: Option<u64>) -> Phase<'static> {
    static SILENT: LazyLock<Reporter> = LazyLock::new(Reporter::default);
    match std::io::stderr().is_terminal() || is_verbose() {
        true => reporter().begin(what, total_bytes),
        false => SILENT.begin(what, total_bytes),
    }
}

fn bar(what: &str, total_bytes: Option<u64>) -> ProgressBar {
    let bar = match total_bytes {
        Some(total) => ProgressBar::new(total).with_style(style(
            "{wide_msg} [{bar:20}] {decimal_bytes}/{decimal_total_bytes} \
             {decimal_bytes_per_sec} {eta}",
        )),
        None => ProgressBar::new_spinner()
            .with_style(style("{spinner} {msg} {decimal_bytes} {decimal_bytes_per_sec}")),
    };
    if bar.is_hidden() {
        eprintln!("{what}");
    }
    bar.set_message(what.to_owned());
    bar.enable_steady_tick(TICK);
    bar
}

/// Sets the first position of a bar. What an earlier run has done does not count for the speed.
fn start_at(bytes: u64, bar: &ProgressBar) {
    // While it ticks, a new position is taken for progress.
    bar.disable_steady_tick();
    bar.set_position(bytes);
    bar.reset_eta();
    bar.enable_steady_tick(TICK);
}

/// Takes the bar off the screen, when the process ends before the phase does.
pub(crate) fn clear() {
    if let Ok(mut console) = CONSOLE.try_lock() {
        console.show(Progress::End);
    }
}

/// A line on a terminal that is drawn only when its message changes, so that it disturbs nothing
/// that is measured.
pub(crate) fn line() -> ProgressBar {
    ProgressBar::new_spinner().with_style(style("{msg}"))
}

pub(crate) fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the templates above are well formed")
}

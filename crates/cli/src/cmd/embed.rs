//! `bodkin embed`: embeddings of texts, as JSON, NumPy, Arrow or Parquet, or to a vector store.
//! Rows are read, computed and written a window at a time, so that memory does not grow with them.

#[cfg(feature = "flight")]
mod arrow;
mod options;
mod output;
mod rows;

use std::ffi::OsStr;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use indicatif::ProgressBar;

use bodkin::{Embeddings, Encoder, Options};

use crate::arguments::{Machine, TokenizerArgs, find};
use crate::interrupt::{self, Interrupted};
use crate::progress::style;
use crate::store::StoreArgs;
use crate::text::count;
pub(crate) use options::EmbeddingArgs;
use output::{JsonLines, Npy, Output, Target};
use rows::{Columns, Format, Row, Rows, Sources};

#[cfg(not(feature = "flight"))]
use crate::store::WITHOUT_ARROW;

/// The most rows of a window, and the bytes of texts at which it ends.
const WINDOW_ROWS: usize = 1024;
const WINDOW_BYTES: usize = 4 << 20;

/// Threads that tokenize a window at most, and the rows for which one is worth its start.
const TOKENIZING_THREADS: usize = 8;
const TOKENIZED_ROWS: usize = 64;

const AFTER: &str = "\
Prints one line of JSON for each text, in order: {\"embedding\":[...],\"tokens\":N}. N includes the
special tokens at the start and the end. An encoder such as BERT and any model that generates text
embed; the latter with the mean of its last hidden states, unless its file or --pooling says
otherwise. Texts share batches of up to --batch-size tokens. Texts of --file come after those of
the command line. A .txt file has one text per line, and empty lines are skipped; rows of .jsonl,
.csv and .parquet files have a text in the column --column names, and their other columns are passed
on, with `text` before them.
--prefix takes a text, or a name: of a prompt that the model has, such as `query`, or of a task:
search_document, search_query, clustering or classification. A prefix is computed once for texts
that share it where pooling is `last`; otherwise every text computes it.

Without --output the format is that of files with --out's name, or else JSON.
--out FILE is FILE.partial until it is complete; --resume goes on with it, for the same texts,
model and options: the last row that is there must have the vector that it would get now. So must
the last row of a store's dataset, within rounding.
Arrow is a stream of record batches with the columns id, vector, text and those of the caller; ids
count rows from 0 unless there is a column `id`. A store gets the same and a timestamp, is asked
whether all rows have landed, and some are read back. Arrow, Parquet and stores need a bodkin that
was built with `--features flight`, as those of releases are.";

/// How embeddings are written.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    // One object per line.
    Json,
    // A NumPy matrix of f32.
    Npy,
    // An Arrow IPC stream.
    Arrow,
    Parquet,
}

const BATCH_HELP: &str = "Tokens per step [default: 512; encoders on GPUs 8192]";

/// Arguments of `embed`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
#[command(mut_arg("ctx_size", |arg| arg.help("Maximum tokens per text [default: the model's]")))]
#[command(mut_arg("batch_size", |arg| arg.help(BATCH_HELP)))]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    model: String,
    /// The texts; each gets one embedding [default: the lines of standard input]
    text: Vec<String>,
    /// Embed a .txt, .jsonl, .csv or .parquet file, or - (may be repeated)
    #[arg(short, long, value_name = "FILE")]
    file: Vec<PathBuf>,
    /// Input format: txt, jsonl, csv or parquet [default: by file name]
    #[arg(long, value_name = "FORMAT", value_enum, hide_possible_values = true)]
    input: Option<Format>,
    /// Take each file as one text
    #[arg(long, conflicts_with = "input")]
    whole: bool,
    /// The column with the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    column: String,
    /// Token ids of one text, without added special tokens
    #[arg(long, value_delimiter = ',', value_name = "IDS", conflicts_with_all = ["text", "file"])]
    tokens: Vec<u32>,
    /// json, npy, arrow or parquet [default: by name of --out]
    #[arg(long, value_name = "FORMAT", value_enum, hide_possible_values = true)]
    output: Option<Kind>,
    /// Write to this file [default: standard output]
    #[arg(short, long, value_name = "FILE", conflicts_with = "flight")]
    out: Option<PathBuf>,
    /// Go on where an interrupted run for the same texts ended
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    store: StoreArgs,
    /// Rows that are sent to the store at a time
    #[arg(long, value_name = "N", default_value_t = 4096)]
    put_rows: usize,
    #[command(flatten, next_help_heading = "Embedding")]
    embedding: EmbeddingArgs,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    #[command(flatten, next_help_heading = "Machine")]
    machine: Machine,
}

impl Args {
    /// How embeddings are written: as the user says, or as files of such a name are.
    fn kind(&self) -> Kind {
        let extension = self.out.as_deref().and_then(Path::extension);
        self.output.unwrap_or_else(|| match extension.and_then(OsStr::to_str) {
            Some("npy") => Kind::Npy,
            Some("arrow" | "arrows") => Kind::Arrow,
            Some("parquet") => Kind::Parquet,
            _ => Kind::Json,
        })
    }
}

pub(crate) fn run(args: Args) -> Result<()> {
    #[cfg(not(feature = "flight"))]
    ensure!(
        args.store.flight.is_none() && !matches!(args.kind(), Kind::Arrow | Kind::Parquet),
        WITHOUT_ARROW
    );
    let file = find(&args.model)?;
    let target = Target::new(args.out.as_deref(), &args.file)?;
    let rows = Rows::new(sources(&args))?;
    let options = Options {
        embedding: args.embedding.options(),
        assume_pre: args.tokenizer.assume_pre().map(str::to_owned),
        ..args.machine.options()
    };
    let name = file.name.clone();
    let encoder = Encoder::open(file, &options)?;
    let stop = Arc::new(AtomicBool::new(false));
    let output = open(&args, target, encoder.width(), &stop)?;
    let ended = Arc::clone(&stop);
    let _catch = interrupt::catch(move || ended.store(true, Relaxed));
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = args.machine.threads.unwrap_or(cores).clamp(1, TOKENIZING_THREADS);
    let mut run = Run { encoder, name, output, stop, threads, texts: 0, truncated: 0 };
    run.check_present()?;
    let result = match args.tokens.is_empty() {
        true => run.all(rows),
        false => {
            let row = Row { text: String::new(), columns: Columns::None };
            let window = Window { rows: vec![(0, row)], tokens: vec![args.tokens.clone()] };
            run.submit(window).and_then(|window| run.write(window))
        }
    };
    if run.truncated > 0 {
        let (cut, texts) = (run.truncated, count(run.texts, "text"));
        eprintln!("{cut} of {texts} cut to {} tokens", run.encoder.context());
    }
    let result = match run.stop.load(Relaxed) {
        true => result.and(Err(Interrupted.into())),
        false => result.and_then(|()| run.output.finish()),
    };
    let note = match &result {
        Ok(note) => note.clone(),
        Err(_) => run.output.stop(),
    };
    if let Some(note) = note {
        eprintln!("{note}");
    }
    result.map(|_| ())
}

fn sources(args: &Args) -> Sources {
    if let Some(name) = args.text.iter().find(|text| Path::new(text).is_file()) {
        eprintln!("`{name}` is embedded as a text; -f reads a file");
    }
    let is_from_stdin = args.text.is_empty() && args.file.is_empty();
    Sources {
        texts: args.text.clone(),
        files: if is_from_stdin { vec![PathBuf::from("-")] } else { args.file.clone() },
        whole: args.whole,
        format: args.input,
        column: args.column.clone(),
    }
}

fn open(
    args: &Args,
    target: Target,
    dimension: usize,
    stop: &Arc<AtomicBool>,
) -> Result<Box<dyn Output>> {
    #[cfg(feature = "flight")]
    if args.store.flight.is_some() {
        let (stop, rows) = (Arc::clone(stop), args.put_rows);
        let output = arrow::StoreOutput::open(&args.store, args.resume, dimension, rows, stop)?;
        return Ok(Box::new(output));
    }
    let _ = stop;
    Ok(match args.kind() {
        Kind::Json => Box::new(JsonLines::open(target, args.resume, dimension)?),
        Kind::Npy => Box::new(Npy::open(target, args.resume, dimension)?),
        #[cfg(feature = "flight")]
        Kind::Arrow => Box::new(arrow::ArrowFile::open(target, args.resume, dimension, None)?),
        #[cfg(feature = "flight")]
        Kind::Parquet => {
            let path = args.out.as_deref().filter(|_| target.partial().is_some());
            ensure!(path.is_some(), "--output parquet: expected --out FILE");
            Box::new(arrow::ArrowFile::open(target, args.resume, dimension, path)?)
        }
        #[cfg(not(feature = "flight"))]
        Kind::Arrow | Kind::Parquet => anyhow::bail!(WITHOUT_ARROW),
    })
}

/// A run of the command.
struct Run {
    encoder: Encoder,
    /// Of the model.
    name: String,
    output: Box<dyn Output>,
    /// Set by Ctrl-C.
    stop: Arc<AtomicBool>,
    /// Threads that tokenize.
    threads: usize,
    /// Texts that were embedded, and those of them that were cut.
    texts: usize,
    truncated: usize,
}

/// Rows with their numbers, and the token ids of their texts.
#[derive(Default)]
struct Window {
    rows: Vec<(u64, Row)>,
    tokens: Vec<Vec<u32>>,
}

/// A window whose texts are being embedded.
struct QueuedWindow {
    rows: Vec<(u64, Row)>,
    /// Tokens of each text, without what was cut.
    counts: Vec<usize>,
    embeddings: Embeddings,
}

impl Run {
    /// Embeds all rows, a window at a time. The next window is read and tokenized while the model
    /// computes one.
    fn all(&mut self, mut rows: Rows) -> Result<()> {
        let bar = bar();
        let (mut number, mut queued) = (0, None);
        loop {
            let next = self.next_window(&mut rows, &mut number);
            let next = next.and_then(|window| window.map(|window| self.submit(window)).transpose());
            // What was queued before an error is written.
            if let Some(window) = queued.take() {
                self.write(window)?;
                bar.set_position(number);
            }
            queued = next?;
            if queued.is_none() {
                break;
            }
        }
        bar.finish_and_clear();
        if self.stop.load(Relaxed) {
            return Ok(());
        }
        ensure!(number > 0, "expected a text, found none");
        let resumed = self.output.resumed();
        ensure!(
            resumed <= number,
            "--resume: expected the rows of an interrupted run of these {number} texts, found \
             {resumed}"
        );
        if rows.blank_lines() > 0 {
            eprintln!("skipped {}", count(rows.blank_lines(), "empty line"));
        }
        Ok(())
    }

    /// Reads and tokenizes rows that the output does not have; none after the last.
    fn next_window(&mut self, rows: &mut Rows, number: &mut u64) -> Result<Option<Window>> {
        let (mut window, mut bytes) = (Window::default(), 0);
        while window.rows.len() < WINDOW_ROWS && bytes < WINDOW_BYTES && !self.stop.load(Relaxed) {
            let Some(row) = rows.next() else { break };
            let row = match row {
                Ok(row) => row,
                // The texts before it may have an error, which comes first.
                Err(error) => return self.tokenize_all(&window.rows).and(Err(error)),
            };
            if !self.output.has(*number, &row)? {
                bytes += row.bytes();
                window.rows.push((*number, row));
            } else if *number + 1 == self.output.resumed() {
                self.check_last(*number, &row.text)?;
            }
            *number += 1;
        }
        if window.rows.is_empty() {
            return Ok(None);
        }
        window.tokens = self.tokenize_all(&window.rows)?;
        Ok(Some(window))
    }

    /// The tokens of the texts of a window, by several threads: a GPU embeds faster than one
    /// tokenizes.
    fn tokenize_all(&self, rows: &[(u64, Row)]) -> Result<Vec<Vec<u32>>> {
        let of_thread = rows.len().div_ceil(self.threads).max(TOKENIZED_ROWS);
        let (encoder, name) = (&self.encoder, &self.name);
        let tokenize = |rows: &[(u64, Row)]| -> Result<Vec<_>> {
            rows.iter().map(|(number, row)| tokenize(encoder, name, *number, &row.text)).collect()
        };
        if rows.len() <= of_thread {
            return tokenize(rows);
        }
        thread::scope(|scope| {
            let parts = rows.chunks(of_thread).map(|rows| scope.spawn(move || tokenize(rows)));
            let parts: Vec<_> = parts.collect();
            let mut all = Vec::with_capacity(rows.len());
            for part in parts {
                all.extend(part.join().expect("tokenizing does not panic")?);
            }
            Ok(all)
        })
    }

    /// Whether the last row of an interrupted run has the vector that this run would give it.
    fn check_last(&self, number: u64, text: &str) -> Result<()> {
        let Some(last) = self.output.last() else { return Ok(()) };
        let tokens = tokenize(&self.encoder, &self.name, number, text)?;
        let vector = self.encoder.submit(vec![tokens])?.next().transpose()?.unwrap_or_default();
        let same = vector.iter().map(|x| x.to_bits()).eq(last.iter().map(|x| x.to_bits()));
        ensure!(
            same,
            "--resume: expected in row {} the vector that {} gives its text now; another model, \
             other options or other texts made it",
            number + 1,
            self.name
        );
        Ok(())
    }

    /// Whether the store's rows have the vectors that this run would give them: the last of them.
    fn check_present(&self) -> Result<()> {
        let Some((dataset, text, found)) = self.output.present() else { return Ok(()) };
        let tokens = self.encoder.tokenize(text)?;
        let fits = tokens.len() <= self.encoder.context() || self.encoder.options().truncate;
        let vector = match fits {
            true => self.encoder.submit(vec![tokens])?.next().transpose()?.unwrap_or_default(),
            false => Vec::new(),
        };
        ensure!(
            is_same(found, &vector),
            "--resume: dataset `{dataset}` has rows of another model or of other options: expected \
             for its text {} the vector that {} gives it now",
            bodkin_gguf::quoted(text),
            self.name
        );
        Ok(())
    }

    /// Lets the model embed the texts of a window.
    fn submit(&mut self, window: Window) -> Result<QueuedWindow> {
        let context = self.encoder.context();
        let counts = window.tokens.iter().map(|text| text.len().min(context)).collect();
        let embeddings = self.encoder.submit(window.tokens)?;
        self.texts += window.rows.len();
        self.truncated += embeddings.truncated();
        Ok(QueuedWindow { rows: window.rows, counts, embeddings })
    }

    /// Passes the vectors of a window on.
    fn write(&mut self, window: QueuedWindow) -> Result<()> {
        let rows = window.rows.iter().zip(window.counts);
        for (vector, ((number, row), tokens)) in window.embeddings.zip(rows) {
            if self.stop.load(Relaxed) {
                break;
            }
            self.output.push(*number, row, tokens, &vector?)?;
        }
        self.output.flush()
    }
}

/// The tokens of a text for a model of this name.
fn tokenize(encoder: &Encoder, name: &str, number: u64, text: &str) -> Result<Vec<u32>> {
    let tokens = encoder.tokenize(text)?;
    let (limit, found) = (encoder.context(), tokens.len());
    ensure!(
        found <= limit || encoder.options().truncate,
        "{name}: text {} has {found} tokens, the model takes {limit}; --truncate cuts longer texts",
        number + 1
    );
    Ok(tokens)
}

/// Whether two vectors are of one text, model and options. Unlike a file, a dataset gets rows from
/// several machines, which round differently: cosines of 0.9999, or a distance of 0.014.
fn is_same(a: &[f32], b: &[f32]) -> bool {
    const DISTANCE_MAX: f32 = 0.02;
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
    let distance = square(&mut a.iter().zip(b).map(|(a, b)| a - b));
    a.len() == b.len() && distance <= DISTANCE_MAX * square(&mut a.iter().copied())
}

/// The rows so far, on a terminal.
fn bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = style("{spinner} {human_pos} rows {per_sec} {elapsed}");
    let bar = ProgressBar::new_spinner().with_style(style);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

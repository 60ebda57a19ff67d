//! `bodkin embed`: embeddings of texts, as JSON, NumPy, Arrow or Parquet, or to a vector store.
//! Rows are read, computed and written a window at a time, so that memory does not grow with them.

#[cfg(feature = "flight")]
mod arrow;
mod output;
mod rows;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Result, ensure};
use indicatif::ProgressBar;

use bodkin::{Encoder, ModelFile};
use bodkin_engine::Tokenizer;

use crate::arguments::{Machine, TokenizerArgs, find};
use crate::interrupt::{self, Interrupted};
use crate::progress::style;
use crate::store::StoreArgs;
use output::{JsonLines, Npy, Output, Target};
use rows::{Format, Row, Rows, Sources};

#[cfg(not(feature = "flight"))]
use crate::store::WITHOUT_ARROW;

/// A window has at most this many rows, and ends after the row with which it has so many bytes.
const WINDOW_ROWS: usize = 1024;
const WINDOW_BYTES: usize = 4 << 20;

const AFTER: &str = "\
Prints one line of JSON for each text, in order: {\"embedding\":[...],\"tokens\":N}. The vector has
length 1; N includes the special tokens at the start and the end. Texts share batches of up to
--batch-size tokens; texts are never truncated. Texts of --file come after those of the command
line. A .txt file has one text per line; rows of .jsonl, .csv and .parquet files have a text in the
column --column names, and their other columns are passed on, with `text` before them.

--out FILE is FILE.partial until it is complete; --resume goes on with it, for the same texts.
Arrow is a stream of record batches with the columns id, vector, text and those of the caller; ids
count rows from 0 unless there is a column `id`. A store gets the same and a timestamp, is asked
whether all rows have landed, and some are read back. Arrow, Parquet and stores need a bodkin that
was built with `--features flight`, as those of releases are.";

/// How embeddings are written.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// One JSON object per line
    Json,
    /// A NumPy matrix of f32
    Npy,
    /// An Arrow IPC stream
    Arrow,
    /// Apache Parquet
    Parquet,
}

/// Arguments of `embed`.
#[derive(clap::Args)]
#[command(after_help = AFTER)]
#[command(mut_arg("ctx_size", |arg| arg.help("Maximum tokens per text [default: the model's]")))]
#[command(mut_arg("batch_size", |arg| arg.help("Batch size: tokens of all texts in one step")))]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    model: String,
    /// The texts; each gets one embedding [default: the lines of standard input]
    text: Vec<String>,
    /// Embed the texts of a .txt, .jsonl, .csv or .parquet file, or - (may be repeated)
    #[arg(short, long, value_name = "FILE")]
    file: Vec<PathBuf>,
    /// How files hold texts [default: as their names say, or txt]
    #[arg(long, value_name = "FORMAT", value_enum)]
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
    /// How to write embeddings
    #[arg(long, value_name = "FORMAT", value_enum, default_value = "json")]
    output: Kind,
    /// Write to this file [default: standard output]
    #[arg(short, long, value_name = "FILE", conflicts_with = "flight")]
    out: Option<PathBuf>,
    /// Go on where an interrupted run for the same texts ended
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    store: StoreArgs,
    /// Most rows that are sent to the store at a time
    #[arg(long, value_name = "N", default_value_t = 4096)]
    #[cfg_attr(not(feature = "flight"), expect(dead_code, reason = "it tells how to get Flight"))]
    put_rows: usize,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    #[command(flatten)]
    machine: Machine,
}

pub(crate) fn run(mut args: Args) -> Result<()> {
    let file = find(&args.model)?;
    let files = std::mem::take(&mut args.file);
    let texts = std::mem::take(&mut args.text);
    let target = Target::new(args.out.as_deref(), &files)?;
    let is_from_stdin = texts.is_empty() && files.is_empty();
    let rows = Rows::new(Sources {
        texts: texts,
        files: if is_from_stdin { vec![PathBuf::from("-")] } else { files },
        whole: args.whole,
        format: args.input,
        column: args.column.clone(),
    })?;
    let mut texts = Texts::new(&args, file)?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut output = open(&args, target, texts.dimension, &stop)?;
    let ended = Arc::clone(&stop);
    let _catch = interrupt::catch(move || ended.store(true, Relaxed));
    let result = match args.tokens.is_empty() {
        true => embed_rows(&mut texts, rows, output.as_mut(), &stop),
        false => {
            let row = Row { text: String::new(), columns: None };
            let tokens = vec![args.tokens.clone()];
            texts.embed(&[(0, row)], &tokens, output.as_mut(), &stop)
        }
    };
    let is_done = result.is_ok() && !stop.load(Relaxed);
    let note = match is_done {
        true => output.finish()?,
        false => output.stop(),
    };
    if let Some(note) = note {
        eprintln!("{note}");
    }
    result?;
    match is_done {
        true => Ok(()),
        false => Err(Interrupted.into()),
    }
}

fn open(
    args: &Args,
    target: Target,
    dimension: usize,
    stop: &Arc<AtomicBool>,
) -> Result<Box<dyn Output>> {
    #[cfg(not(feature = "flight"))]
    ensure!(
        args.store.flight.is_none() && !matches!(args.output, Kind::Arrow | Kind::Parquet),
        WITHOUT_ARROW
    );
    #[cfg(feature = "flight")]
    if args.store.flight.is_some() {
        let (stop, rows) = (Arc::clone(stop), args.put_rows);
        let output = arrow::StoreOutput::open(&args.store, args.resume, dimension, rows, stop)?;
        return Ok(Box::new(output));
    }
    let _ = stop;
    Ok(match args.output {
        Kind::Json => Box::new(JsonLines::open(target, args.resume)?),
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

/// The model, and how its texts become tokens.
struct Texts {
    encoder: Encoder,
    tokenizer: Option<Arc<Tokenizer>>,
    name: String,
    /// The most tokens of a text, and what says so.
    limit: usize,
    limited_by: &'static str,
    dimension: usize,
}

impl Texts {
    fn new(args: &Args, file: ModelFile) -> Result<Texts> {
        let longest = bodkin_engine::longest_text(&file.plan).unwrap_or(usize::MAX);
        let context = args.machine.context()?.filter(|context| *context < longest);
        let tokenizer = match args.tokens.is_empty() {
            true => Some(args.tokenizer.open(&file.file)?),
            false => None,
        };
        let (name, dimension) = (file.name.clone(), file.plan.output_width());
        let encoder = Encoder::open(file, &args.machine.options())?;
        let limited_by = if context.is_some() { "--ctx-size allows" } else { "the model takes" };
        let limit = context.unwrap_or(longest);
        Ok(Texts { encoder, tokenizer, name, limit, limited_by, dimension })
    }

    fn tokenize(&self, window: &[(u64, Row)]) -> Result<Vec<Vec<u32>>> {
        let Some(tokenizer) = &self.tokenizer else { return Ok(Vec::new()) };
        window.iter().map(|(_, row)| Ok(tokenizer.try_encode(&row.text, true, false)?)).collect()
    }

    /// Passes the vector of each row on.
    fn embed(
        &mut self,
        window: &[(u64, Row)],
        tokens: &[Vec<u32>],
        output: &mut dyn Output,
        stop: &AtomicBool,
    ) -> Result<()> {
        for ((number, _), tokens) in window.iter().zip(tokens) {
            let (name, text, tokens) = (&self.name, number + 1, tokens.len());
            let (limited_by, limit) = (self.limited_by, self.limit);
            ensure!(
                tokens <= limit,
                "{name}: text {text} has {tokens} tokens, {limited_by} {limit}"
            );
        }
        let written = std::cell::RefCell::new(Ok(()));
        let is_over = || stop.load(Relaxed) || written.borrow().is_err();
        self.encoder.embed_tokens_until(tokens, is_over, |i, vector| {
            let (number, row) = &window[i];
            if written.borrow().is_ok() {
                let result = output.push(*number, row, tokens[i].len(), vector);
                *written.borrow_mut() = result;
            }
        })?;
        written.into_inner()?;
        output.flush()
    }
}

/// Embeds all rows, a window at a time.
fn embed_rows(
    texts: &mut Texts,
    mut rows: Rows,
    output: &mut dyn Output,
    stop: &AtomicBool,
) -> Result<()> {
    let bar = bar();
    let mut number = 0;
    loop {
        let (mut window, mut bytes) = (Vec::new(), 0);
        while window.len() < WINDOW_ROWS && bytes < WINDOW_BYTES && !stop.load(Relaxed) {
            let Some(row) = rows.next() else { break };
            let row = row?;
            if !output.has(number, &row)? {
                bytes += row.text.len();
                window.push((number, row));
            }
            number += 1;
        }
        if window.is_empty() {
            break;
        }
        let tokens = texts.tokenize(&window)?;
        texts.embed(&window, &tokens, output, stop)?;
        bar.set_position(number);
    }
    bar.finish_and_clear();
    ensure!(number > 0 || stop.load(Relaxed), "expected a text, found none");
    Ok(())
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

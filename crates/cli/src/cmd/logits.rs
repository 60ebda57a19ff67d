//! `bodkin logits`: raw logits of given tokens as a NumPy file, to compare with other programs.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use bodkin::Scorer;

use crate::arguments::{Machine, find_decoder};
use crate::{npy, output};

/// Arguments of `logits`.
#[derive(clap::Args)]
#[command(mut_arg("ctx_size", |arg| arg.help("Context size in tokens [default: as given]")))]
pub(crate) struct Args {
    /// Path to a GGUF file, or a model name as in `list`
    model: String,
    /// Token ids from position 0, without added special tokens
    #[arg(long, value_delimiter = ',', required = true, value_name = "IDS")]
    tokens: Vec<u32>,
    /// Positions: all, last, or a list such as 0,5
    #[arg(long, default_value = "all", value_name = "LIST")]
    positions: String,
    /// NumPy file to write: f32 [positions, vocabulary]
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    machine: Machine,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let file = find_decoder(&args.model)?;
    let vocabulary = file.plan.output_width();
    for &id in &args.tokens {
        ensure!(
            (id as usize) < vocabulary,
            "--tokens: token id {id}: the vocabulary has {vocabulary} tokens"
        );
    }
    let tokens = args.tokens.len();
    let positions = positions(&args.positions, tokens)?;
    let mut options = args.machine.options();
    let context = options.context()?.unwrap_or(tokens);
    ensure!(tokens <= context, "the prompt has {tokens} tokens, --ctx-size allows {context}");
    options.ctx_size = Some(context);
    options.batch_size = Some(options.step_tokens()?.min(tokens));
    output::check(&args.output, [file.file.path()])?;
    output::write(&args.output, |out| {
        let failed = || format!("cannot write {}", args.output.display());
        let mut scorer = Scorer::open(file, &options)?;
        out.write_all(&npy::header(positions.len(), vocabulary)).with_context(failed)?;
        let mut result = Ok(());
        let wanted = |position| positions.binary_search(&position).is_ok();
        scorer.logits_at(&args.tokens, wanted, |_, row| {
            if result.is_ok() {
                result = row.iter().try_for_each(|x| out.write_all(&x.to_le_bytes()));
            }
        })?;
        result.with_context(failed)
    })
}

/// Ascending positions below `len`.
fn positions(text: &str, len: usize) -> Result<Vec<usize>> {
    let mut positions = match text {
        "all" => (0..len).collect(),
        "last" => vec![len - 1],
        list => list
            .split(',')
            .map(|p| {
                p.trim()
                    .parse()
                    .with_context(|| format!("--positions: expected a number, found `{p}`"))
            })
            .collect::<Result<Vec<usize>>>()?,
    };
    positions.sort_unstable();
    positions.dedup();
    if let Some(&last) = positions.last()
        && last >= len
    {
        bail!("--positions: {last} is past the last of the {len} tokens");
    }
    Ok(positions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_checked() {
        assert_eq!(positions("all", 3).unwrap(), [0, 1, 2]);
        assert_eq!(positions("last", 3).unwrap(), [2]);
        assert_eq!(positions("2,0,2", 3).unwrap(), [0, 2]);
        assert!(positions("3", 3).unwrap_err().to_string().contains("past the last"));
        assert!(positions("x", 3).unwrap_err().to_string().contains("expected a number"));
    }
}

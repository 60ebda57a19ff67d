//! NaN and infinities: a row that they reach gets no token. The rows beside it, and sequences that
//! take over its pages and its state slot, have the bits that they have without it.

use std::ops::ControlFlow;
use std::sync::Arc;

use bodkin_backend::{Backend, Batch, Limits, Model, OutputRequest, Result, SamplingParams, Step};
use bodkin_gguf::Format;

use super::case::{Case, HALF_STATE, Maker, usual_attention};
use super::compare::bits;
use super::prompt::Pages;
use super::state;

/// The token whose embedding is not finite.
const BROKEN: u32 = 66;
const WIDTH: usize = 64;
/// Of multi-step decode.
const STEPS: usize = 3;

pub(super) fn check(backend: &dyn Backend, failures: &mut Vec<String>) {
    // Heads of 64 columns may have a kernel of their own.
    for (value, dim) in [(f32::NAN, 16), (f32::INFINITY, 16), (f32::NAN, 64), (f32::INFINITY, 64)] {
        let name = format!("an embedding of {value}, heads of {dim}");
        let (mut maker, x) = Maker::start(name, WIDTH);
        maker.set_row_of_table(BROKEN as usize, &[value; WIDTH]);
        let x = state::conv(&mut maker, x, 4, true);
        let x = maker.attention(x, Format::F32, usual_attention(4, 2, dim));
        maker.logits(x);
        let case = maker.finish(HALF_STATE, 1);
        let all = SamplingParams {
            temperature: 0.8,
            uniforms: vec![1 << 31; STEPS],
            ..SamplingParams::greedy()
        };
        for params in [SamplingParams::greedy(), SamplingParams { top_k: 20, ..all.clone() }, all] {
            for (len, steps) in [(3, 1), (1, STEPS)] {
                let what = format!("{}, {len} tokens, {params:?}", case.name);
                match fault(backend, &case, len, steps, &params) {
                    Ok(None) => {}
                    Ok(Some(fault)) => failures.push(format!("{what}: {fault}")),
                    Err(error) => failures.push(format!("{what}: {error}")),
                }
            }
        }
    }
}

/// Compares a step with a broken sequence between two others, and the one after it.
fn fault(
    backend: &dyn Backend,
    case: &Case,
    len: usize,
    steps: usize,
    params: &SamplingParams,
) -> Result<Option<String>> {
    let pages = vec![3; case.plan.windows().len()];
    let limits = Limits { tokens: 3 * len, outputs: 3, pages, state_slots: 3 };
    let load = || backend.load(Arc::clone(&case.plan), &case.file, &limits, &|_, _| ());
    let (fine, broken) = (&[1, 2, 3][..len], &[BROKEN; 3][..len]);
    let row = OutputRequest::Token(params);
    let (mut fresh, mut model) = (load()?, load()?);
    let (mut wanted, _) = run(&mut *fresh, [fine; 3], row, 1)?;
    wanted[1] = None;
    let (found, _) = run(&mut *model, [fine, broken, fine], row, steps)?;
    if found != wanted {
        return Ok(Some(format!("sampled {found:?}, expected {wanted:?}")));
    }
    let (_, wanted) = run(&mut *load()?, [fine; 3], OutputRequest::Logits, 1)?;
    let (_, found) = run(&mut *model, [fine; 3], OutputRequest::Logits, 1)?;
    let is_same = bits(&found).eq(bits(&wanted));
    Ok((!is_same).then(|| "it reaches a sequence in the same pages".to_owned()))
}

/// Runs three new sequences, in the same pages and state slots at every call. Returns the tokens
/// of all steps that ran, and the logits.
fn run(
    model: &mut dyn Model,
    prompts: [&[u32]; 3],
    row: OutputRequest<'_>,
    steps: usize,
) -> Result<(Vec<Option<u32>>, Vec<f32>)> {
    let mut pages = Pages::new(model, false);
    let mut batch = Batch::default();
    for prompt in prompts {
        let mut sequence = pages.start(0);
        sequence.is_prefill = prompt.len() > 1;
        pages.append(&mut sequence, prompt, &mut batch);
        batch.output_last();
    }
    let step = Step { batch: &batch, requests: &[row; 3], steps, observer: None };
    let (mut tokens, mut logits) = (Vec::new(), Vec::new());
    model.step(step, &mut |output| {
        tokens.extend_from_slice(output.tokens);
        logits.extend_from_slice(output.logits);
        ControlFlow::Continue(())
    })?;
    Ok((tokens, logits))
}

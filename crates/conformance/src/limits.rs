//! What a model does with steps that it was not loaded for, and what it says while it loads.

use std::sync::{Arc, Mutex, PoisonError};

use bodkin_backend::{Backend, Batch, Error, Result};
use bodkin_gguf::Format;
use bodkin_model::{EmbedBy, Op};

use super::case::{Case, FLOAT, HALF_STATE, Maker, VOCABULARY, usual_attention};
use super::prompt::{Feeding, Pages, run_prompt};

/// Steps beyond the limits are errors, and leave the model as it was.
pub(super) fn check(backend: &dyn Backend, failures: &mut Vec<String>) {
    let case = case();
    let result = try_check(backend, &case, failures);
    if let Err(error) = result.and_then(|()| check_positions(backend, failures)) {
        failures.push(format!("limits: {error}"));
    }
}

/// A sequence has no more tokens than a table has positions.
fn check_positions(backend: &dyn Backend, failures: &mut Vec<String>) -> Result<()> {
    let (mut maker, a) = Maker::start("limits of positions", 8);
    let table = maker.matrix(Format::F32, 9, 8);
    let b = maker.push(Op::Embed { table, by: EmbedBy::Position }, 8);
    let value = maker.push(Op::Add { a, b }, 8);
    maker.logits(value);
    let case = maker.finish(FLOAT, 9);
    let load =
        |case: &Case| backend.load(Arc::clone(&case.plan), &case.file, &case.limits(), &|_, _| ());
    run_prompt(load(&case)?.as_mut(), &case, Feeding::Whole)?;
    let longer = Case { tokens: vec![0; 10], ..case };
    match run_prompt(load(&longer)?.as_mut(), &longer, Feeding::Whole) {
        Err(Error::Limit { .. }) => Ok(()),
        Err(other) => Err(other),
        Ok(_) => {
            failures.push("limits: a position that the table has not is accepted".to_owned());
            Ok(())
        }
    }
}

fn case() -> Case {
    let (mut maker, x) = Maker::start("limits", 48);
    let value = maker.attention(x, Format::F32, usual_attention(2, 1, 16));
    maker.logits(value);
    maker.finish(HALF_STATE, 20)
}

fn try_check(backend: &dyn Backend, case: &Case, failures: &mut Vec<String>) -> Result<()> {
    let reports = Mutex::new(Vec::new());
    let progress = |done, total| {
        reports.lock().unwrap_or_else(PoisonError::into_inner).push((done, total));
    };
    let limits = case.limits();
    let mut model = backend.load(Arc::clone(&case.plan), &case.file, &limits, &progress)?;
    let reports = reports.into_inner().unwrap_or_else(PoisonError::into_inner);
    let all = case.plan.cost().weight_bytes;
    let grows = reports.windows(2).all(|pair| pair[0].0 <= pair[1].0);
    if !grows || reports.last() != Some(&(all, all)) {
        failures.push(format!("progress: {reports:?} does not grow to {all} bytes"));
    }
    if model.limits() != &limits || model.plan() != &*case.plan {
        failures.push("limits: the model has others than it was loaded with".to_owned());
    }

    let before = run_prompt(model.as_mut(), case, Feeding::Whole)?;
    for (what, step) in wrong_steps(model.as_ref()) {
        let mut logits = vec![0.0; step.outputs.len() * VOCABULARY];
        match model.forward(&step, &mut logits) {
            Err(Error::Limit { .. }) => {}
            Err(other) => failures.push(format!("limits: {what}: another error: {other}")),
            Ok(()) => failures.push(format!("limits: {what} is accepted")),
        }
    }
    if run_prompt(model.as_mut(), case, Feeding::Whole)? != before {
        failures.push("limits: a refused step changed the model".to_owned());
    }
    Ok(())
}

fn wrong_steps(model: &dyn bodkin_backend::Model) -> Vec<(&'static str, Batch)> {
    let step = |tokens: &[u32]| {
        let mut pages = Pages::new(model, false);
        let mut batch = Batch::default();
        let mut sequence = pages.start(0);
        pages.append(&mut sequence, tokens, &mut batch);
        batch
    };
    let too_long = step(&vec![0; model.limits().tokens + 1]);
    let mut too_wide = step(&vec![0; model.limits().outputs + 1]);
    too_wide.outputs = (0..too_wide.tokens.len() as u32).collect();
    let unknown = step(&[0, VOCABULARY as u32]);
    let largest = step(&[u32::MAX]);
    let mut outside = step(&[0, 1]);
    outside.spans[0].tables[0].pages[0] = model.limits().pages[0] as u32;
    vec![
        ("too many tokens", too_long),
        ("too many rows of logits", too_wide),
        ("a token id of the vocabulary's size", unknown),
        ("the largest token id", largest),
        ("a page that does not exist", outside),
    ]
}

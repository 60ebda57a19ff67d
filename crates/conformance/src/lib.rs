//! The acceptance suite of a backend: every operation, every weight format and odd shapes against
//! the reference interpreter, and the promise that a row's result depends on its sequence alone.
//! A backend's test is one line:
//!
//! ```no_run
//! # let backend = bodkin_conformance::Reference;
//! assert_eq!(bodkin_conformance::check(&backend), Vec::<String>::new());
//! ```
//!
//! Models are made in memory from a fixed seed. The suite must not know any particular backend,
//! nor an architecture: its plans are made by hand.

#![forbid(unsafe_code)]

mod case;
mod chains;
mod compare;
mod encoders;
mod experts;
mod formats;
mod limits;
mod nonfinite;
mod observed;
mod ops;
mod profiled;
mod prompt;
mod random;
mod reference;
mod sampling;
mod sparse;
mod state;
mod traced;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use bodkin_backend::{Backend, KvType, Model, Result};

use case::Case;
use compare::{bits, nmse};
use observed::Record;
use prompt::{Feeding, run_prompt, run_prompt_observed};
pub use reference::Reference;

/// What a backend got wrong, one line each with the operation, format and shape; empty if it got
/// everything right.
pub fn check(backend: &dyn Backend) -> Vec<String> {
    let mut failures = check_named(backend, |_| true);
    failures.extend(check_steps(backend));
    failures
}

/// What a backend got wrong that is no matter of an operation: limits, state, sampling, numbers
/// that are not finite, timelines and profiles.
pub fn check_steps(backend: &dyn Backend) -> Vec<String> {
    let mut failures = Vec::new();
    limits::check(backend, &mut failures);
    state::check(backend, &mut failures);
    sampling::check(backend, &mut failures);
    nonfinite::check(backend, &mut failures);
    if let Err(error) = check_traced(backend, &mut failures) {
        failures.push(format!("traced: {error}"));
    }
    if let Err(error) = check_profiled(backend, &mut failures) {
        failures.push(format!("profiled: {error}"));
    }
    failures
}

/// What a backend got wrong in multi-step decode of more rows than backends treat as a small step.
pub fn check_many_rows(backend: &dyn Backend) -> Vec<String> {
    let mut failures = Vec::new();
    sampling::check_many_rows(backend, &mut failures);
    failures
}

/// What a backend got wrong in the cases with such names.
pub fn check_named(backend: &dyn Backend, is_chosen: impl Fn(&str) -> bool) -> Vec<String> {
    let mut failures = Vec::new();
    for case in cases(backend, is_chosen) {
        if let Err(error) = check_case(backend, case, &mut failures) {
            failures.push(format!("{}: {error}", case.name));
        }
    }
    failures
}

/// Whether a case is large enough for many tiles and threads: code without tiles takes long.
pub fn is_large(name: &str) -> bool {
    const LARGE: [&str; 5] =
        ["decoder F16", "wide decoder", "many rows", "Indexer", "value_dim: 216"];
    LARGE.iter().any(|large| name.contains(large))
}

/// The logits of every case, by the case's name, each prompt in one step. For backends with
/// settings that must not change a bit: threads, rewrites of the plan.
///
/// # Errors
/// What the backend says about the first case that it cannot run.
pub fn logits(backend: &dyn Backend) -> Result<Vec<(String, Vec<f32>)>> {
    logits_named(backend, |_| true)
}

/// The logits of the cases with such names.
///
/// # Errors
/// What the backend says about the first case that it cannot run.
pub fn logits_named(
    backend: &dyn Backend,
    is_chosen: impl Fn(&str) -> bool,
) -> Result<Vec<(String, Vec<f32>)>> {
    logits_of(backend, is_chosen, Feeding::Whole)
}

/// The logits of the cases with such names, one token after the other, as if they were generated.
///
/// # Errors
/// What the backend says about the first case that it cannot run.
pub fn generated_logits_named(
    backend: &dyn Backend,
    is_chosen: impl Fn(&str) -> bool,
) -> Result<Vec<(String, Vec<f32>)>> {
    logits_of(backend, is_chosen, Feeding::Generated)
}

fn logits_of(
    backend: &dyn Backend,
    is_chosen: impl Fn(&str) -> bool,
    feeding: Feeding,
) -> Result<Vec<(String, Vec<f32>)>> {
    let run = |case: &Case| {
        let mut model = case.load(backend)?;
        Ok((case.name.clone(), run_prompt(model.as_mut(), case, feeding)?))
    };
    cases(backend, is_chosen).map(run).collect()
}

/// The cases with such names, or those of them that keep keys and values where a backend has them
/// otherwise than usual.
fn cases(
    backend: &dyn Backend,
    is_chosen: impl Fn(&str) -> bool,
) -> impl Iterator<Item = &'static Case> {
    let is_usual = backend.kv_type() == KvType::Auto;
    let cases = CASES.iter().filter(move |case| is_usual || !case.plan.slots.is_empty());
    // Whether a case is refused takes loading it, so that is asked last.
    cases.filter(move |case| is_chosen(&case.name)).filter(|case| !case.is_refused(backend))
}

/// Made once, because quantising takes longer than running.
static CASES: LazyLock<Vec<Case>> = LazyLock::new(|| {
    let cases = [ops::cases, chains::cases, experts::cases, encoders::cases, state::cases];
    let rest = [sparse::cases, formats::cases];
    cases.into_iter().chain(rest).flat_map(|cases| cases()).collect()
});

/// Traces the case with the most operations.
fn check_traced(backend: &dyn Backend, failures: &mut Vec<String>) -> Result<()> {
    let case =
        cases(backend, |_| true).max_by_key(|case| case.plan.ops.len()).expect("there are cases");
    traced::check(backend, case, case.load(backend)?.as_mut(), failures)
}

/// Profiles the case with the most layers with experts.
fn check_profiled(backend: &dyn Backend, failures: &mut Vec<String>) -> Result<()> {
    let layers = |case: &&Case| case.plan.routed_layers().len();
    let case = cases(backend, |_| true).max_by_key(layers).expect("there are cases");
    profiled::check(case, case.load(backend)?.as_mut(), failures)
}

/// What the reference interpreter gives for a case.
struct Expected {
    logits: Vec<f32>,
    record: Record,
    expert_counts: Vec<(usize, Vec<u64>)>,
}

/// The results of the reference, which are computed once: it is slower than any backend, and a
/// backend is checked in many variants.
fn expected(case: &'static Case, kv_type: KvType) -> Result<Arc<Expected>> {
    /// By the case's address: names are for people.
    type Known = HashMap<(usize, KvType), Arc<Expected>>;
    static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (std::ptr::from_ref(case).addr(), kv_type);
    if let Some(expected) = known().get(&key) {
        return Ok(Arc::clone(expected));
    }
    let (plan, limits) = (Arc::clone(&case.plan), case.limits());
    let mut reference = reference::load(kv_type, plan, &case.file, &limits, &|_, _| ());
    let mut record = Record::new(case);
    let logits = run_prompt_observed(reference.as_mut(), case, &mut record)?;
    let expert_counts = expert_counts(reference.as_ref());
    let expected = Arc::new(Expected { logits, record, expert_counts });
    known().insert(key, Arc::clone(&expected));
    Ok(expected)
}

/// How many rows chose each expert, by layer.
fn expert_counts(model: &dyn Model) -> Vec<(usize, Vec<u64>)> {
    model.stats().experts.into_iter().map(|e| (e.layer, e.counts)).collect()
}

fn check_case(
    backend: &dyn Backend,
    case: &'static Case,
    failures: &mut Vec<String>,
) -> Result<()> {
    let expected = expected(case, backend.kv_type())?;
    let Expected { logits: wanted, record, expert_counts: wanted_counts } = &*expected;
    let mut model = case.load(backend)?;
    let whole = run_prompt(model.as_mut(), case, Feeding::Whole)?;
    if expert_counts(model.as_ref()) != *wanted_counts {
        failures.push(format!("{}: other counts of experts", case.name));
    }
    let generated = run_prompt(model.as_mut(), case, Feeding::Generated)?;
    let limit = case.limit(backend.kv_type());
    for (how, found) in [("", &whole), (", generated", &generated)] {
        let nmse = nmse(found, wanted);
        if nmse.is_nan() || nmse > limit {
            failures.push(format!("{}{how}: NMSE {nmse:.2e}, at most {limit:.0e}", case.name));
        }
    }
    if !bits(&run_prompt(model.as_mut(), case, Feeding::AmongPrompts)?).eq(bits(&generated)) {
        failures.push(format!("{}: generated tokens depend on those beside them", case.name));
    }
    observed::check(model.as_mut(), case, limit, &whole, record, failures)?;
    let vocabulary = case.plan.output_width();
    for feeding in Feeding::OTHERS {
        let found = run_prompt(model.as_mut(), case, feeding)?;
        let rows = feeding.rows(case.tokens.len());
        let same = rows.flat_map(|row| &whole[row * vocabulary..][..vocabulary]);
        if !same.map(|x| x.to_bits()).eq(bits(&found)) {
            let name = &case.name;
            failures.push(format!("{name}: {feeding:?} differs in bits from the whole prompt"));
        }
    }
    Ok(())
}

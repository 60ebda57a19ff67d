//! Sampling in steps: the tokens are those that the reference sampler samples from the logits, in
//! multi-step decode that was ended and went on, for many rows, and beside rows that ask for
//! logits.

use std::ops::ControlFlow;
use std::sync::Arc;

use bodkin_backend::{
    Backend, Batch, Limits, Matmul, Model, Observer, OutputRequest, Penalties, ReferenceSampler,
    Result, SamplingParams, Span, Step, candidates::Candidates,
};
use bodkin_gguf::Format;

use super::case::{Case, HALF_STATE, Maker, usual_attention};
use super::compare::bits;
use super::prompt::{Pages, Sequence};
use super::random::Random;
use super::state;

const STEPS: usize = 7;
/// More rows than the batch sizes that a backend may treat as small.
const MANY: usize = 18;
/// Tokens of each sequence's prompt.
const PROMPT: usize = 5;
/// More than a group of a kernel's threads sees at once, and than a block keeps.
const WIDE_VOCABULARY: usize = 3001;
const NARROW_VOCABULARY: usize = 67;

/// Checks common parameters with recurrent state, and all with keys and values alone.
pub(super) fn check(backend: &dyn Backend, failures: &mut Vec<String>) {
    for case in state::cases() {
        let pairs = pairs_of_params(&case);
        pairs[..2]
            .iter()
            .for_each(|pair| check_decode(backend, &case, pair, DecodeMode::Single, failures));
    }
    for vocabulary in [NARROW_VOCABULARY, WIDE_VOCABULARY] {
        let case = attention_case(vocabulary);
        let pairs = pairs_of_params(&case);
        pairs
            .iter()
            .for_each(|pair| check_decode(backend, &case, pair, DecodeMode::Single, failures));
        let many = many_params(&case);
        check_decode(backend, &case, &many, DecodeMode::Single, failures);
        check_mixed(backend, &case, &many, failures);
    }
    let hybrid = hybrid_case();
    check_mixed(backend, &hybrid, &many_params(&hybrid), failures);
    check_many_rows(backend, failures);
}

/// Checks multi-step decode of many rows, with keys and values alone and with recurrent state,
/// against observed steps: no backend records those.
pub(super) fn check_many_rows(backend: &dyn Backend, failures: &mut Vec<String>) {
    for case in [attention_case(NARROW_VOCABULARY), hybrid_case()] {
        check_decode(backend, &case, &many_params(&case), DecodeMode::Observed, failures);
    }
}

/// Attention and recurrent state.
fn hybrid_case() -> Case {
    state::cases().pop().expect("the last plan has attention and recurrent state")
}

/// Parameters for [`MANY`] rows.
fn many_params(case: &Case) -> Vec<SamplingParams> {
    pairs_of_params(case).into_iter().flatten().cycle().take(MANY).collect()
}

/// How decode steps run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum DecodeMode {
    /// Multi-step decode.
    Multi,
    /// Single steps.
    Single,
    /// Single steps with an observer.
    Observed,
}

/// An observer that ignores what it is shown.
struct Ignoring;

impl Observer for Ignoring {
    fn matmul(&mut self, _: &Matmul<'_>) {}
}

/// Compares multi-step decode of one sequence for each of `params` with decode in another
/// mode.
fn check_decode(
    backend: &dyn Backend,
    case: &Case,
    params: &[SamplingParams],
    other: DecodeMode,
    failures: &mut Vec<String>,
) {
    let name = &case.name;
    let both = decode(backend, case, params, DecodeMode::Multi)
        .and_then(|found| Ok((found, decode(backend, case, params, other)?)));
    match both {
        Ok((found, wanted)) if found == wanted => {}
        Ok((found, wanted)) => failures.push(format!(
            "{name}, {params:?}: multi-step decode gives {found:?}, the logits of mode {other:?} \
             {wanted:?}"
        )),
        Err(error) => failures.push(format!("{name}: multi-step decode: {error}")),
    }
}

/// Attention before logits of this many tokens.
fn attention_case(vocabulary: usize) -> Case {
    let name = format!("vocabulary of {vocabulary}");
    let (mut maker, x) = Maker::start_speaking(name, vocabulary, 64);
    let x = maker.attention(x, Format::F32, usual_attention(4, 2, 16));
    maker.logits(x);
    maker.finish(HALF_STATE, 19)
}

/// Parameters for two sequences: the most common ones first, then unusual ones.
fn pairs_of_params(case: &Case) -> Vec<[SamplingParams; 2]> {
    let mut random = Random::of(&case.name);
    let mut uniforms = || (0..STEPS).map(|_| random.bits() as u32).collect::<Vec<u32>>();
    let usual = SamplingParams {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        min_p: 0.05,
        uniforms: uniforms(),
        ..SamplingParams::greedy()
    };
    let flat = SamplingParams {
        temperature: 1.7,
        top_k: 66,
        uniforms: uniforms(),
        ..SamplingParams::greedy()
    };
    let open = SamplingParams {
        temperature: 1.2,
        top_p: 0.9,
        uniforms: uniforms(),
        ..SamplingParams::greedy()
    };
    let all = SamplingParams { temperature: 0.9, uniforms: uniforms(), ..SamplingParams::greedy() };
    let most = SamplingParams {
        temperature: 1.3,
        top_k: 200,
        top_p: 0.97,
        uniforms: uniforms(),
        ..SamplingParams::greedy()
    };
    let likely = SamplingParams { min_p: 0.02, uniforms: uniforms(), ..most.clone() };
    // Extreme values.
    let first_and_last: Vec<u32> =
        (0..STEPS).map(|i| if i % 2 == 0 { 0 } else { u32::MAX - (1 << 14) }).collect();
    let ends = SamplingParams { uniforms: first_and_last, ..all.clone() };
    let best = SamplingParams { top_k: WIDE_VOCABULARY + 1, top_p: 0.0, ..ends.clone() };
    let share = SamplingParams { min_p: 1.0, ..ends.clone() };
    let cold = SamplingParams { temperature: 1e-40, ..ends.clone() };
    let none = (0..NARROW_VOCABULARY as u32).map(|token| (token, f32::NEG_INFINITY)).collect();
    let nothing = SamplingParams { biases: none, ..ends.clone() };
    let history = case.tokens[5..10].to_vec();
    let penalties = Penalties { repeat: 1.4, frequency: 0.2, presence: 0.3 };
    let penalty_window = history.len() + 2;
    let wary = SamplingParams { penalties, penalty_window, history, ..SamplingParams::greedy() };
    let biases = vec![(2, 3.5), (60, f32::NEG_INFINITY), (11, 4.0), (66, -2.0)];
    let biased = SamplingParams { biases, uniforms: uniforms(), ..usual.clone() };
    vec![
        [SamplingParams::greedy(), SamplingParams::greedy()],
        [usual, SamplingParams::greedy()],
        [flat, biased.clone()],
        [SamplingParams { temperature: 0.0, ..biased }, wary.clone()],
        [SamplingParams { temperature: 1.0, top_k: 20, uniforms: uniforms(), ..wary }, open],
        [all, most],
        [SamplingParams { top_k: 0, top_p: 1.0, ..likely.clone() }, likely],
        [ends, best],
        [share, cold.clone()],
        [SamplingParams { top_k: 20, ..cold }, nothing],
    ]
}

/// The parameters after these tokens were sampled.
fn after(params: &SamplingParams, sampled: impl Iterator<Item = u32>) -> SamplingParams {
    let mut params = params.clone();
    for token in sampled {
        params.history.push(token);
        params.uniforms.drain(..params.uniforms.len().min(1));
    }
    let passed = params.history.len().saturating_sub(params.penalty_window);
    params.history.drain(..passed);
    params
}

/// A model, and sequences whose prompts it has read.
struct Decoding {
    model: Box<dyn Model>,
    pages: Pages,
    sequences: Vec<Sequence>,
}

impl Decoding {
    fn start(backend: &dyn Backend, case: &Case, sequences: usize) -> Result<Decoding> {
        let limits = Limits {
            tokens: PROMPT * sequences,
            outputs: sequences,
            pages: vec![sequences; case.plan.windows().len()],
            state_slots: sequences,
        };
        let plan = Arc::clone(&case.plan);
        let mut model = backend.load(plan, &case.file, &limits, &|_, _| ())?;
        let mut pages = Pages::new(model.as_ref(), false);
        let mut sequences: Vec<Sequence> = (0..sequences).map(|_| pages.start(0)).collect();
        let mut prompts = Batch::default();
        for (i, sequence) in sequences.iter_mut().enumerate() {
            let start = PROMPT * i % (case.tokens.len() - PROMPT);
            pages.append(sequence, &case.tokens[start..start + PROMPT], &mut prompts);
        }
        model.forward(&prompts, &mut [])?;
        Ok(Decoding { model, pages, sequences })
    }

    /// A decode row of each sequence, with pages for all steps.
    fn decode_batch(&mut self, case: &Case) -> Batch {
        let mut batch = Batch::default();
        for (i, sequence) in self.sequences.iter_mut().enumerate() {
            let position = sequence.position;
            let mut all = Batch::default();
            self.pages.append(sequence, &[0; STEPS], &mut all);
            let span = all.spans.remove(0);
            let token = case.tokens[(10 + i) % case.tokens.len()];
            batch.push(Span { len: 1, position, is_prefill: false, ..span }, &[token]);
            batch.output_last();
        }
        batch
    }
}

/// The tokens of [`STEPS`] decode steps, `[steps, params]`: by multi-step decode that ends after
/// some steps and goes on, or by steps whose logits the reference sampler reads.
fn decode(
    backend: &dyn Backend,
    case: &Case,
    params: &[SamplingParams],
    mode: DecodeMode,
) -> Result<Vec<u32>> {
    let mut decoding = Decoding::start(backend, case, params.len())?;
    let mut batch = decoding.decode_batch(case);
    let mut found = Vec::new();
    if mode == DecodeMode::Multi {
        let ended = 3;
        multi_step(&mut *decoding.model, &batch, params, STEPS, &mut found, ended)?;
        batch.tokens = found[(ended - 1) * params.len()..].to_vec();
        batch.spans.iter_mut().for_each(|span| span.position += ended);
        let sampled = |row: usize| found.iter().skip(row).step_by(params.len()).copied();
        let params: Vec<SamplingParams> =
            params.iter().enumerate().map(|(row, params)| after(params, sampled(row))).collect();
        multi_step(&mut *decoding.model, &batch, &params, STEPS - ended, &mut found, STEPS)?;
        return Ok(found);
    }
    let width = case.plan.output_width();
    let mut samplers = vec![ReferenceSampler::default(); params.len()];
    samplers.iter_mut().zip(params).for_each(|(sampler, params)| sampler.begin(params));
    let mut logits = vec![0.0; params.len() * width];
    let requests = vec![OutputRequest::Logits; params.len()];
    for _ in 0..STEPS {
        let observer: Option<&mut dyn Observer> = match mode {
            DecodeMode::Observed => Some(&mut Ignoring),
            _ => None,
        };
        let step = Step { batch: &batch, requests: &requests, steps: 1, observer };
        decoding.model.step(step, &mut |output| {
            logits.copy_from_slice(output.logits);
            ControlFlow::Continue(())
        })?;
        let rows = samplers.iter_mut().zip(params).zip(logits.chunks_exact_mut(width));
        let tokens = rows.map(|((sampler, params), logits)| {
            sampler.sample(params, logits, &mut Candidates::default())
        });
        batch.tokens = tokens.collect();
        found.extend(&batch.tokens);
        batch.spans.iter_mut().for_each(|span| span.position += 1);
    }
    Ok(found)
}

/// Runs multi-step decode until `found` has the tokens of `ended` steps.
fn multi_step(
    model: &mut dyn Model,
    batch: &Batch,
    params: &[SamplingParams],
    steps: usize,
    found: &mut Vec<u32>,
    ended: usize,
) -> Result<()> {
    let rows: Vec<OutputRequest<'_>> = params.iter().map(OutputRequest::Token).collect();
    let step = Step { batch, requests: &rows, steps, observer: None };
    model.step(step, &mut |output| {
        found.extend(output.tokens.iter().flatten());
        match found.len() < ended * params.len() {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    })
}

/// One step of prefill chunks and decode rows, some of which ask for a token and some for logits,
/// against the same step in which all ask for logits.
fn check_mixed(
    backend: &dyn Backend,
    case: &Case,
    params: &[SamplingParams],
    failures: &mut Vec<String>,
) {
    let name = &case.name;
    match try_mixed(backend, case, params) {
        Ok(true) => {}
        Ok(false) => failures.push(format!("{name}: tokens or logits of a mixed step differ")),
        Err(error) => failures.push(format!("{name}: a mixed step: {error}")),
    }
}

fn try_mixed(backend: &dyn Backend, case: &Case, params: &[SamplingParams]) -> Result<bool> {
    let width = case.plan.output_width();
    let (_, all) = mixed_step(backend, case, params, |_| false)?;
    let is_token = |i: &usize| i % 4 != 1;
    let (tokens, logits) = mixed_step(backend, case, params, |i| is_token(&i))?;
    let rows = 0..params.len() - 1;
    let sample = |i: usize| {
        let (mut sampler, mut logits) = (ReferenceSampler::default(), all[i * width..].to_vec());
        sampler.begin(&params[i]);
        sampler.sample(&params[i], &mut logits[..width], &mut Candidates::default())
    };
    let same_tokens = rows.clone().filter(is_token).map(sample).eq(tokens);
    let wanted = rows.filter(|i| !is_token(i)).flat_map(|i| &all[i * width..][..width]);
    Ok(same_tokens && bits(&logits).eq(wanted.map(|x| x.to_bits())))
}

/// Every third sequence has a chunk of two prompt tokens, the last one of them no output. Returns
/// the tokens and logits of the step.
fn mixed_step(
    backend: &dyn Backend,
    case: &Case,
    params: &[SamplingParams],
    is_token: impl Fn(usize) -> bool,
) -> Result<(Vec<u32>, Vec<f32>)> {
    let mut decoding = Decoding::start(backend, case, params.len())?;
    let mut batch = Batch::default();
    for (i, sequence) in decoding.sequences.iter_mut().enumerate() {
        sequence.is_prefill = i % 3 == 2;
        let len = if sequence.is_prefill { 2 } else { 1 };
        decoding.pages.append(sequence, &case.tokens[i % 5..][..len], &mut batch);
        if i + 1 < params.len() {
            batch.output_last();
        }
    }
    let row = |i: usize| match is_token(i) {
        true => OutputRequest::Token(&params[i]),
        false => OutputRequest::Logits,
    };
    let rows: Vec<OutputRequest<'_>> = (0..batch.outputs.len()).map(row).collect();
    let step = Step { batch: &batch, requests: &rows, steps: 1, observer: None };
    let mut found = (Vec::new(), Vec::new());
    decoding.model.step(step, &mut |output| {
        let tokens = output.tokens.iter().flatten().copied();
        found = (tokens.collect(), output.logits.to_vec());
        ControlFlow::Continue(())
    })?;
    Ok(found)
}

//! Generation: the tokens of [`crate::Model::generate`] are those that rules choose from logits,
//! also where it was ended and went on.

use bodkin_gguf::Format;

use super::case::{Case, HALF_STATE, Maker, usual_attention};
use super::feed::{Pages, Sequence};
use super::random::Random;
use super::{load, state};
use crate::error::Result;
use crate::{Backend, Batch, Penalties, SamplingParams, Span};

const STEPS: usize = 7;
/// More than a group of a kernel's threads sees at once, and than a block keeps.
const WIDE_VOCABULARY: usize = 3001;
const NARROW_VOCABULARY: usize = 67;

/// Checks the usual rules with recurrent state, and all with keys and values alone.
pub(super) fn check(backend: &dyn Backend, failures: &mut Vec<String>) {
    for case in state::cases() {
        check_case(backend, &case, &pairs_of_rules(&case)[..2], failures);
    }
    for vocabulary in [NARROW_VOCABULARY, WIDE_VOCABULARY] {
        let case = speaking(vocabulary);
        check_case(backend, &case, &pairs_of_rules(&case), failures);
    }
}

fn check_case(
    backend: &dyn Backend,
    case: &Case,
    pairs: &[[SamplingParams; 2]],
    failures: &mut Vec<String>,
) {
    for (i, rules) in pairs.iter().enumerate() {
        let name = format!("{}, rules {i}", case.name);
        let found = tokens(backend, case, rules, true).and_then(|found| {
            let wanted = tokens(backend, case, rules, false)?;
            Ok((found, wanted))
        });
        match found {
            Ok((found, wanted)) if found == wanted => {}
            Ok((found, wanted)) => {
                failures.push(format!("{name}: generated {found:?}, logits say {wanted:?}"));
            }
            Err(error) => failures.push(format!("{name}: generation: {error}")),
        }
    }
}

/// Attention before logits of so many tokens.
fn speaking(vocabulary: usize) -> Case {
    let name = format!("vocabulary of {vocabulary}");
    let (mut maker, x) = Maker::start_speaking(name, vocabulary, 64);
    let x = maker.attention(x, Format::F32, usual_attention(4, 2, 16));
    maker.logits(x);
    maker.finish(HALF_STATE, 19)
}

/// Rules for two sequences: those that nearly everybody has, and odd ones.
fn pairs_of_rules(case: &Case) -> Vec<[SamplingParams; 2]> {
    let mut random = Random::of(&case.name);
    let mut draws = || (0..STEPS).map(|_| random.bits() as u32).collect::<Vec<u32>>();
    let usual = SamplingParams {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        min_p: 0.05,
        uniforms: draws(),
        ..SamplingParams::greedy()
    };
    let flat = SamplingParams {
        temperature: 1.7,
        top_k: 66,
        uniforms: draws(),
        ..SamplingParams::greedy()
    };
    let open = SamplingParams {
        temperature: 1.2,
        top_p: 0.9,
        uniforms: draws(),
        ..SamplingParams::greedy()
    };
    let all = SamplingParams { temperature: 0.9, uniforms: draws(), ..SamplingParams::greedy() };
    let most = SamplingParams {
        temperature: 1.3,
        top_k: 200,
        top_p: 0.97,
        uniforms: draws(),
        ..SamplingParams::greedy()
    };
    let likely = SamplingParams { min_p: 0.02, uniforms: draws(), ..most.clone() };
    // What is at the edge of what rules say.
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
    let biased = SamplingParams { biases, uniforms: draws(), ..usual.clone() };
    vec![
        [SamplingParams::greedy(), SamplingParams::greedy()],
        [usual, SamplingParams::greedy()],
        [flat, biased.clone()],
        [SamplingParams { temperature: 0.0, ..biased }, wary.clone()],
        [SamplingParams { temperature: 1.0, top_k: 20, uniforms: draws(), ..wary }, open],
        [all, most],
        [SamplingParams { top_k: 0, top_p: 1.0, ..likely.clone() }, likely],
        [ends, best],
        [share, cold.clone()],
        [SamplingParams { top_k: 20, ..cold }, nothing],
    ]
}

/// A rule as it is after tokens that it chose.
fn after(rule: &SamplingParams, chosen: impl Iterator<Item = u32>) -> SamplingParams {
    let mut rule = rule.clone();
    for token in chosen {
        rule.history.push(token);
        rule.uniforms.drain(..rule.uniforms.len().min(1));
    }
    let passed = rule.history.len().saturating_sub(rule.penalty_window);
    rule.history.drain(..passed);
    rule
}

/// What two sequences generate after prompts: by the backend, with an end after some steps, or from
/// logits.
fn tokens(
    backend: &dyn Backend,
    case: &Case,
    rules: &[SamplingParams; 2],
    is_own: bool,
) -> Result<Vec<u32>> {
    let mut model = load(backend, case)?;
    let mut pages = Pages::new(model.as_ref(), false);
    let mut sequences = [pages.start(0), pages.start(0)];
    let mut prompts = Batch::default();
    for (sequence, tokens) in sequences.iter_mut().zip(case.tokens.chunks(5)) {
        pages.append(sequence, tokens, &mut prompts);
        prompts.outputs.push(prompts.tokens.len() as u32 - 1);
    }
    let mut logits = vec![0.0; 2 * case.plan.output_width()];
    model.forward(&prompts, &mut logits)?;
    let mut batch = first_step(&mut pages, &mut sequences, &case.tokens[10..12]);
    let mut found = Vec::new();
    if !is_own {
        crate::generate(model.as_mut(), batch, rules, STEPS, &mut |chosen| {
            found.extend(chosen);
            true
        })?;
        return Ok(found);
    }
    let ended = 3;
    model.generate(batch.clone(), rules, STEPS, &mut |chosen| {
        found.extend(chosen);
        found.len() < 2 * ended
    })?;
    batch.tokens = found[2 * ended - 2..].to_vec();
    batch.spans.iter_mut().for_each(|span| span.position += ended);
    let chosen = |row: usize| found.iter().skip(row).step_by(2).copied();
    let rules = [after(&rules[0], chosen(0)), after(&rules[1], chosen(1))];
    model.generate(batch, &rules, STEPS - ended, &mut |chosen| {
        found.extend(chosen);
        true
    })?;
    Ok(found)
}

/// A step of one token of each sequence, with pages for all steps.
fn first_step(pages: &mut Pages, sequences: &mut [Sequence; 2], tokens: &[u32]) -> Batch {
    let mut all = Batch::default();
    let positions = sequences.each_ref().map(|sequence| sequence.position);
    for sequence in sequences {
        pages.append(sequence, &[0; STEPS], &mut all);
    }
    let spans = all.spans.into_iter().zip(positions);
    let spans = spans
        .map(|(span, position)| Span { len: 1, position, is_prefill: false, ..span })
        .collect();
    Batch { tokens: tokens.to_vec(), spans, outputs: vec![0, 1], ..Batch::default() }
}

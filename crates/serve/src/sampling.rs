//! The fields about sampling and length, which all interfaces share but for a few names.

use bodkin::{Request, SamplerOptions};
use bodkin_engine::Tokenizer;
use serde_json::{Map, Value};

use crate::error::{ApiError, Result};
use crate::fields::Fields;

/// The most stop strings of a request.
const STOPS: usize = 64;

/// The largest value of fields that have no natural end.
const LARGE: f32 = 1e6;

/// A request with the options of another one, changed by those of the body.
pub(crate) fn request(
    fields: &mut Fields,
    defaults: &Request,
    tokenizer: &Tokenizer,
) -> Result<Request> {
    let mut request = defaults.clone();
    options(fields, &mut request.sampling)?;
    if let Some(value) = fields.take("logit_bias") {
        request.sampling.logit_bias = logit_bias(fields, &value, tokenizer)?;
    }
    let stop = fields.strings("stop")?;
    if !stop.is_empty() {
        request.stop = stop;
    }
    if request.stop.len() > STOPS {
        let message = format!("stop: expected at most {STOPS} texts, found {}", request.stop.len());
        return Err(ApiError::field("stop", message));
    }
    request.ignore_end = fields.boolean("ignore_eos")?.unwrap_or(false);
    Ok(request)
}

/// What the requests of a model start from.
#[derive(Clone, Default)]
#[expect(clippy::option_option, reason = "absent, no limit, and a limit are three cases")]
pub(crate) struct Defaults {
    pub(crate) request: Request,
    /// Variables of chat templates that requests do not set.
    pub(crate) variables: Map<String, Value>,
    /// The most tokens of an answer; none within for no limit.
    max_tokens: Option<Option<usize>>,
}

impl Defaults {
    /// Reads the most tokens of an answer from the first of these fields that is there. Without
    /// them and a default of the server it is `otherwise`; none for no limit.
    pub(crate) fn max_tokens(
        &self,
        fields: &mut Fields,
        names: &[&str],
        least: usize,
        otherwise: Option<usize>,
    ) -> Result<Option<usize>> {
        Ok(max_tokens(fields, names, least)?.or(self.max_tokens).unwrap_or(otherwise))
    }
}

/// The most tokens of an answer, as the first of these fields that is there says: none within for
/// no limit, which is written as a number below zero.
#[expect(clippy::option_option, reason = "absent, no limit, and a limit are three cases")]
fn max_tokens(fields: &mut Fields, names: &[&str], least: usize) -> Result<Option<Option<usize>>> {
    let mut found = None;
    for name in names {
        let Some(n) = fields.integer(name, -2..=i64::from(u32::MAX))? else { continue };
        let limit = usize::try_from(n).ok();
        if limit.is_some_and(|limit| limit < least) {
            let field = fields.field(name);
            let expected = format!("at least {least}, or -1 for no limit");
            let message = format!("{field}: expected {expected}, found {n}");
            return Err(ApiError::field(field, message));
        }
        found = found.or(Some(limit));
    }
    Ok(found)
}

/// What requests start from: the options of `request`, changed by fields that the server was given.
/// These are those about sampling, `max_tokens`, and `chat_template_kwargs`.
pub(crate) fn defaults(given: &Map<String, Value>, mut request: Request) -> Result<Defaults> {
    let mut fields = Fields::within("default", given.clone());
    options(&mut fields, &mut request.sampling)?;
    let max_tokens = max_tokens(&mut fields, &["max_tokens"], 1)?;
    request.max_tokens = max_tokens.flatten();
    let variables = fields.object("chat_template_kwargs")?.rest();
    match fields.rest().keys().next() {
        None => Ok(Defaults { request, variables, max_tokens }),
        Some(name) => {
            let message = format!("default.{name}: requests have no such field with a default");
            Err(ApiError::field(name, message))
        }
    }
}

/// Changes sampling options by the fields that are there.
pub(crate) fn options(fields: &mut Fields, options: &mut SamplerOptions) -> Result<()> {
    let SamplerOptions {
        temperature,
        top_k,
        top_p,
        min_p,
        typical_p,
        top_n_sigma,
        repeat_last_n,
        repeat_penalty,
        frequency_penalty,
        presence_penalty,
        dry_multiplier,
        dry_base,
        dry_allowed_length,
        dry_penalty_last_n,
        dry_sequence_breakers,
        xtc_probability,
        xtc_threshold,
        mirostat,
        mirostat_tau,
        mirostat_eta,
        logit_bias: _,
        seed,
        min_keep,
    } = options;
    let numbers = [
        ("temperature", temperature, 0.0..=100.0),
        ("top_p", top_p, 0.0..=1.0),
        ("min_p", min_p, 0.0..=1.0),
        ("typical_p", typical_p, 0.0..=1.0),
        ("top_n_sigma", top_n_sigma, -LARGE..=LARGE),
        ("frequency_penalty", frequency_penalty, -100.0..=100.0),
        ("presence_penalty", presence_penalty, -100.0..=100.0),
        ("dry_multiplier", dry_multiplier, 0.0..=LARGE),
        ("dry_base", dry_base, 0.0..=LARGE),
        ("xtc_probability", xtc_probability, 0.0..=1.0),
        ("xtc_threshold", xtc_threshold, 0.0..=1.0),
        ("mirostat_tau", mirostat_tau, 0.0..=LARGE),
        ("mirostat_eta", mirostat_eta, 0.0..=LARGE),
    ];
    for (name, option, range) in numbers {
        *option = fields.number(name, range)?.unwrap_or(*option);
    }
    for name in ["repetition_penalty", "repeat_penalty"] {
        *repeat_penalty = fields.number(name, 0.01..=100.0)?.unwrap_or(*repeat_penalty);
    }
    let large = i64::from(i32::MAX);
    for (name, option) in
        [("repeat_last_n", repeat_last_n), ("dry_penalty_last_n", dry_penalty_last_n)]
    {
        *option = fields.integer(name, -1..=large)?.map_or(*option, |n| n as i32);
    }
    // Below zero is written for "all".
    *top_k = fields.integer("top_k", -large..=large)?.map_or(*top_k, |n| n.max(0) as u32);
    *dry_allowed_length =
        fields.integer("dry_allowed_length", 0..=large)?.map_or(*dry_allowed_length, |n| n as u32);
    *mirostat = fields.integer("mirostat", 0..=2)?.map_or(*mirostat, |n| n as u32);
    *min_keep = fields.count("min_keep", 0)?.unwrap_or(*min_keep);
    let breakers = fields.strings("dry_sequence_breakers")?;
    if !breakers.is_empty() {
        *dry_sequence_breakers = breakers;
    }
    // -1 is written for a random seed.
    let given = fields.integer("seed", i64::MIN..=i64::MAX)?;
    *seed = given.map_or(*seed, |n| (n != -1).then_some(n as u64));
    Ok(())
}

/// Biases of token ids or of all tokens of a text: as OpenAI writes them, an object, or as
/// llama-server does, an array of pairs. `false` forbids the token.
fn logit_bias(fields: &Fields, value: &Value, tokenizer: &Tokenizer) -> Result<Vec<(u32, f32)>> {
    let mismatch = |found: &Value| {
        fields.mismatch("logit_bias", "pairs of token ids and numbers from -100 to 100", found)
    };
    let bias = |value: &Value| match value {
        Value::Bool(false) => Ok(f32::NEG_INFINITY),
        value => {
            let bias = value.as_f64().filter(|x| x.abs() <= 100.0);
            bias.map(|x| x as f32).ok_or_else(|| mismatch(value))
        }
    };
    let mut biases = Vec::new();
    let mut add = |id: u64, value: f32| match u32::try_from(id) {
        Ok(id) if (id as usize) < tokenizer.vocab_size() => {
            biases.push((id, value));
            Ok(())
        }
        _ => Err(ApiError::field("logit_bias", format!("logit_bias: there is no token {id}"))),
    };
    match value {
        Value::Object(map) => {
            for (id, value) in map {
                let bias = bias(value)?;
                match id.parse() {
                    Ok(id) => add(id, bias)?,
                    Err(_) => {
                        for id in tokenizer.try_encode(id, false, false)? {
                            add(u64::from(id), bias)?;
                        }
                    }
                }
            }
        }
        Value::Array(pairs) => {
            for pair in pairs {
                let Some([token, value]) = pair.as_array().map(Vec::as_slice) else {
                    return Err(mismatch(pair));
                };
                let bias = bias(value)?;
                match token {
                    Value::String(text) => {
                        for id in tokenizer.try_encode(text, false, false)? {
                            add(u64::from(id), bias)?;
                        }
                    }
                    token => add(token.as_u64().ok_or_else(|| mismatch(token))?, bias)?,
                }
            }
        }
        other => return Err(mismatch(other)),
    }
    Ok(biases)
}

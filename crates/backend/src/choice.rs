//! How tokens are chosen, as data: what a device is told that chooses them itself. A rule holds the
//! steps that most requests are content with; others are made of the same [`Candidates`] by who
//! has them. This file must not know where random numbers come from, nor texts.

use std::collections::VecDeque;

use crate::candidates::Candidates;
use crate::likeliest;

/// Penalties for tokens that were there already: repetition (Keskar et al. 2019), frequency and
/// presence (OpenAI's).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// What logits of tokens that were there are divided by; 1 is off.
    pub repeat: f32,
    /// What is subtracted for each time that a token was there; 0 is off.
    pub frequency: f32,
    /// What is subtracted if a token was there; 0 is off.
    pub presence: f32,
}

impl Penalties {
    /// Those that change nothing.
    pub const NONE: Penalties = Penalties { repeat: 1.0, frequency: 0.0, presence: 0.0 };

    /// The logit of a token that was there so many times.
    pub fn apply(&self, logit: f32, count: u32) -> f32 {
        // Dividing a negative logit would make the token likelier.
        let logit = if logit <= 0.0 { logit * self.repeat } else { logit / self.repeat };
        logit - (count as f32 * self.frequency + self.presence)
    }
}

/// How the tokens of one row are chosen, step by step: biases, penalties, top-k, top-p, min-p,
/// temperature, draw.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// What logits are divided by; at 0 the likeliest token is taken, and none of the numbers
    /// below down to `min_p` matters.
    pub temperature: f32,
    /// Only so many of the best tokens; 0 is all.
    pub top_k: usize,
    /// Only the best tokens that have this probability together; 1 is all.
    pub top_p: f32,
    /// Only tokens with this share of the best one's probability; 0 is all.
    pub min_p: f32,
    /// What is added to logits of single tokens, each of which occurs once.
    pub biases: Vec<(u32, f32)>,
    /// Of tokens that are among the latest.
    pub penalties: Penalties,
    /// How many of the latest tokens are penalised.
    pub window: usize,
    /// The latest tokens before the first step, oldest first, the one that it reads among them: as
    /// many as the window sees.
    pub latest: Vec<u32>,
    /// Where each step's token stands among its candidates, in parts of 2^32 of their probability;
    /// none where the likeliest is taken.
    pub draws: Vec<u32>,
}

impl Rule {
    /// Takes the likeliest token.
    pub fn likeliest() -> Rule {
        Rule {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            biases: Vec::new(),
            penalties: Penalties::NONE,
            window: 0,
            latest: Vec::new(),
            draws: Vec::new(),
        }
    }

    /// Whether logits are changed before tokens are chosen.
    pub fn adjusts(&self) -> bool {
        !self.biases.is_empty() || self.window > 0
    }
}

/// Chooses the tokens of a row by its rule: the plain meaning of it.
#[derive(Debug)]
pub struct Chooser<'a> {
    rule: &'a Rule,
    latest: VecDeque<u32>,
    step: usize,
    candidates: Candidates,
}

impl<'a> Chooser<'a> {
    /// Before the first step.
    pub fn new(rule: &'a Rule) -> Chooser<'a> {
        let latest = rule.latest.iter().copied().collect();
        Chooser { rule, latest, step: 0, candidates: Candidates::default() }
    }

    /// The next step's token; the logits are changed on the way.
    ///
    /// # Panics
    /// If the rule has draws, but none for this step.
    pub fn choose(&mut self, logits: &mut [f32]) -> u32 {
        let rule = self.rule;
        self.adjust(logits);
        let token = if rule.temperature <= 0.0 {
            likeliest(logits)
        } else {
            let candidates = &mut self.candidates;
            candidates.fill(logits, rule.top_k);
            candidates.top_p(rule.top_p, 0);
            candidates.min_p(rule.min_p, 0);
            candidates.temperature(rule.temperature);
            candidates.draw(f64::from(rule.draws[self.step]) / 4_294_967_296.0).0
        };
        self.step += 1;
        self.latest.push_back(token);
        token
    }

    fn adjust(&mut self, logits: &mut [f32]) {
        for &(id, bias) in &self.rule.biases {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
        let passed = self.latest.len().saturating_sub(self.rule.window);
        self.latest.drain(..passed);
        let mut latest: Vec<u32> = self.latest.iter().copied().collect();
        latest.sort_unstable();
        for same in latest.chunk_by(|a, b| a == b) {
            if let Some(logit) = logits.get_mut(same[0] as usize) {
                *logit = self.rule.penalties.apply(*logit, same.len() as u32);
            }
        }
    }
}

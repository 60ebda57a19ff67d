//! Records a routing trace from the steps of a model.

use std::collections::HashMap;
use std::path::Path;

use bodkin_backend::{Matmul, Observer};
use bodkin_model::{Plan, WeightId};

use super::{RoutingTrace, invalid};
use crate::error::Result;

/// An observer that keeps the experts of each row. It reads them from the first matmul behind each
/// routing, whose rows say which expert each is multiplied with.
#[derive(Clone, Debug)]
pub struct Recorder {
    experts: usize,
    used: usize,
    layers: Vec<usize>,
    /// Which routing the weight of such a matmul belongs to.
    weights: HashMap<String, usize>,
    /// For each layer, `[tokens, used]`.
    choices: Vec<Vec<u16>>,
}

impl Recorder {
    /// A recorder for the steps of a model; `name` is its file.
    ///
    /// # Errors
    /// If the model has no experts, or not the same number of them in each layer.
    pub fn new(plan: &Plan, name: &Path) -> Result<Recorder> {
        let routings = plan.routings().map(|routing| [routing.experts, routing.used]);
        let routings: Vec<[usize; 2]> = routings.collect();
        let routed = plan.routed_weights().into_iter().enumerate();
        let first = |(i, weights): (usize, Vec<WeightId>)| {
            Some((plan.weight(*weights.first()?).name.clone(), i))
        };
        let weights = routed.filter_map(first).collect();
        let Some(&[experts, used]) = routings.first() else {
            return Err(invalid(name, "layers", "a model with experts".to_owned(), "none"));
        };
        if let Some(other) = routings.iter().find(|routing| **routing != [experts, used]) {
            let expected = format!("{used} of {experts} in each layer");
            return Err(invalid(
                name,
                "experts",
                expected,
                format!("{} of {}", other[1], other[0]),
            ));
        }
        let choices = vec![Vec::new(); routings.len()];
        Ok(Recorder { experts, used, layers: plan.routed_layers(), weights, choices })
    }

    /// What was recorded, for the file `name`.
    ///
    /// # Errors
    /// If that is nothing, or more than a file holds.
    pub fn finish(self, name: &Path) -> Result<RoutingTrace> {
        let tokens = self.choices.iter().map(|layer| layer.len() / self.used).min().unwrap_or(0);
        let mut choices = Vec::with_capacity(tokens * self.used * self.layers.len());
        for token in 0..tokens {
            let row = token * self.used..(token + 1) * self.used;
            self.choices.iter().for_each(|layer| choices.extend(&layer[row.clone()]));
        }
        RoutingTrace::new(name, [self.experts, self.used], self.layers, choices)
    }
}

impl Observer for Recorder {
    fn matmul(&mut self, matmul: &Matmul<'_>) {
        if let Some(&layer) = self.weights.get(&matmul.weight.name) {
            self.choices[layer].extend(matmul.rows.iter().map(|row| row.expert as u16));
        }
    }
}

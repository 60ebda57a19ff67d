//! A mixture-of-experts (MoE) feed-forward layer. Its tensors determine its components: a gate,
//! fused gate and up, biases, latent projections around the experts, a shared expert.

use crate::error::{Error, Result};
use crate::ids::{Value, WeightId};
use crate::op::{Act, Op, Routing};

use super::Builder;

/// The settings of a layer of experts besides its tensors.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLayer {
    /// How experts are selected and weighted.
    pub routing: Routing,
    /// The activation of experts.
    pub act: Act,
    /// The numbers of each token's experts, if not the scores decide on them.
    pub chosen: Option<Value>,
    /// The most that a gate, and the magnitude of what it gates, may be in experts.
    pub clamp: Option<f32>,
    /// Likewise in the shared expert.
    pub shared_clamp: Option<f32>,
    /// Whether the weights multiply the input of the experts instead of their output.
    pub weighs_input: bool,
}

impl ExpertLayer {
    /// Experts that the scores decide on, whose outputs are weighted, without clamps.
    pub fn new(routing: Routing, act: Act) -> ExpertLayer {
        let (chosen, clamp, shared_clamp, weighs_input) = (None, None, None, false);
        ExpertLayer { routing, act, chosen, clamp, shared_clamp, weighs_input }
    }
}

impl Builder<'_> {
    /// The weighted sum of the selected experts, plus the shared expert if there is one. Tensors
    /// determine the width of experts.
    pub fn experts(&mut self, input: Value, routing: Routing, act: Act) -> Result<Value> {
        self.expert_layer(input, &ExpertLayer::new(routing, act))
    }

    /// As [`Builder::experts`], with all settings.
    pub fn expert_layer(&mut self, input: Value, layer: &ExpertLayer) -> Result<Value> {
        let ExpertLayer { routing, act, chosen, clamp, shared_clamp, weighs_input } = *layer;
        let width = self.width(input);
        let scores = self.linear(input, "ffn_gate_inp", routing.experts)?;
        let bias = self.routing_bias(routing.experts)?;
        let route = Op::Route { input: scores, chosen, bias, routing };
        let route = self.push(route, 2 * routing.used);
        let x = match self.rows("ffn_latent_down") {
            Some(latent) => self.linear(input, "ffn_latent_down", latent)?,
            None => input,
        };
        let latent = self.width(x);
        let x = if weighs_input { self.weighted_inputs(x, route, routing.used) } else { x };
        let h = self.expert_hidden((x, latent), route, &routing, (act, clamp))?;
        let shape = [self.width(h) / routing.used, latent];
        let h = self.expert_linear(h, route, "ffn_down_exps", routing.experts, shape)?;
        let sum = match weighs_input {
            true => self.sum_of_parts(h, routing.used),
            false => self.push(Op::ExpertSum { input: h, route }, latent),
        };
        let sum = match self.has("ffn_latent_down") {
            true => self.linear(sum, "ffn_latent_up", width)?,
            false => sum,
        };
        let shared = self.shared_expert(input, (act, shared_clamp))?;
        Ok(shared.map_or(sum, |shared| self.add(sum, shared)))
    }

    /// The bias of the selection, whose name ends in `.bias` in most files.
    fn routing_bias(&mut self, experts: usize) -> Result<Option<WeightId>> {
        match self.bias("exp_probs_b", experts)? {
            None => self.find_optional(&format!("{}exp_probs_b", self.prefix), experts, 1),
            bias => Ok(bias),
        }
    }

    /// The input times the weight of each expert, `[rows, used * cols]`.
    fn weighted_inputs(&mut self, input: Value, route: Value, used: usize) -> Value {
        let width = self.width(input);
        let weighted = |b: &mut Self, expert: usize| {
            let gate = b.slice(route, expert, 1);
            b.push(Op::Glu { gate, up: input, act: Act::Identity }, width)
        };
        let first = weighted(self, 0);
        (1..used).fold(first, |all, expert| {
            let next = weighted(self, expert);
            self.concat(all, next, 1, width)
        })
    }

    /// The sum of equal parts of a row.
    fn sum_of_parts(&mut self, input: Value, parts: usize) -> Value {
        let width = self.width(input) / parts;
        if parts == 1 {
            return input;
        }
        let first = self.slice(input, 0, width);
        (1..parts).fold(first, |sum, part| {
            let next = self.slice(input, part * width, width);
            self.add(sum, next)
        })
    }

    /// `act(gate) * up` after a clamp of both, if there is one.
    fn gated(&mut self, gate: Value, up: Value, (act, clamp): (Act, Option<f32>)) -> Value {
        let width = self.width(up);
        let (gate, up) = match clamp {
            Some(high) => (
                self.push(Op::Clamp { input: gate, low: f32::NEG_INFINITY, high }, width),
                self.push(Op::Clamp { input: up, low: -high, high }, width),
            ),
            None => (gate, up),
        };
        self.push(Op::Glu { gate, up, act }, width)
    }

    /// The hidden activations of the selected experts, `[rows, used * hidden]`. The input is
    /// `[rows, width]`, or `[rows, used * width]`.
    pub(super) fn expert_hidden(
        &mut self,
        (x, width): (Value, usize),
        route: Value,
        routing: &Routing,
        gating: (Act, Option<f32>),
    ) -> Result<Value> {
        let (experts, used) = (routing.experts, routing.used);
        if let Some(rows) = self.rows("ffn_gate_up_exps") {
            let hidden = rows / experts / 2;
            let shape = [width, 2 * hidden];
            let both = self.expert_linear(x, route, "ffn_gate_up_exps", experts, shape)?;
            let gate = self.slices(both, used, 0, hidden);
            let up = self.slices(both, used, hidden, hidden);
            return Ok(self.gated(gate, up, gating));
        }
        let shape = [width, self.rows("ffn_up_exps").unwrap_or(0) / experts];
        let up = self.expert_linear(x, route, "ffn_up_exps", experts, shape)?;
        if !self.has("ffn_gate_exps") {
            return Ok(self.push(Op::Act { input: up, act: gating.0 }, self.width(up)));
        }
        let gate = self.expert_linear(x, route, "ffn_gate_exps", experts, shape)?;
        Ok(self.gated(gate, up, gating))
    }

    /// Matmuls with the selected experts' matrices `name`, each `[rows, cols]`.
    pub(super) fn expert_linear(
        &mut self,
        input: Value,
        route: Value,
        name: &str,
        experts: usize,
        [cols, rows]: [usize; 2],
    ) -> Result<Value> {
        let weight = self.expert_matrices(name, cols, rows, experts)?;
        let bias = self.matrix_bias(name, rows, experts)?;
        let width = self.width(route) / 2 * rows;
        Ok(self.push(Op::ExpertLinear { input, route: Some(route), weight, bias, experts }, width))
    }

    /// The matrices `name` of all experts: `[cols, rows, experts]` in the file.
    pub(super) fn expert_matrices(
        &mut self,
        name: &str,
        cols: usize,
        rows: usize,
        experts: usize,
    ) -> Result<WeightId> {
        let id = self.weight(name, cols, rows * experts)?;
        let name = format!("{}{name}.weight", self.prefix);
        let found = &self.tensors[name.as_str()].shape;
        let wanted = vec![cols as u64, rows as u64, experts as u64];
        let is_same = found.iter().chain(&[1; 3]).zip(&wanted).all(|(f, w)| f == w);
        match is_same && rows > 0 {
            true => Ok(id),
            false => Err(Error::Shape { name, found: found.clone(), wanted }),
        }
    }

    /// A bias for each expert, if the file has them.
    fn matrix_bias(&mut self, name: &str, cols: usize, experts: usize) -> Result<Option<WeightId>> {
        self.find_optional(&format!("{}{name}.bias", self.prefix), cols, experts)
    }

    /// The shared expert, times its gate if there is one.
    fn shared_expert(&mut self, input: Value, gating: (Act, Option<f32>)) -> Result<Option<Value>> {
        let Some(hidden) = self.rows("ffn_up_shexp") else { return Ok(None) };
        let width = self.width(input);
        let up = self.linear(input, "ffn_up_shexp", hidden)?;
        let h = if self.has("ffn_gate_shexp") {
            let gate = self.linear(input, "ffn_gate_shexp", hidden)?;
            self.gated(gate, up, gating)
        } else {
            self.push(Op::Act { input: up, act: gating.0 }, hidden)
        };
        let up = self.linear(h, "ffn_down_shexp", width)?;
        if !self.has("ffn_gate_inp_shexp") {
            return Ok(Some(up));
        }
        let gate = self.linear(input, "ffn_gate_inp_shexp", 1)?;
        Ok(Some(self.push(Op::Glu { gate, up, act: Act::Sigmoid }, width)))
    }
}

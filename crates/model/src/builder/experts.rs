//! A mixture-of-experts (MoE) feed-forward layer. Its tensors determine its components: a gate,
//! fused gate and up, biases, latent projections around the experts, a shared expert.

use crate::error::{Error, Result};
use crate::ids::{Value, WeightId};
use crate::op::{Act, Op, Routing};

use super::Builder;

impl Builder<'_> {
    /// The weighted sum of the selected experts, plus the shared expert if there is one. Tensors
    /// determine the width of experts.
    pub fn experts(&mut self, input: Value, routing: Routing, act: Act) -> Result<Value> {
        let width = self.width(input);
        let scores = self.linear(input, "ffn_gate_inp", routing.experts)?;
        let bias = self.routing_bias(routing.experts)?;
        let route = self.push(Op::Route { input: scores, bias, routing }, 2 * routing.used);
        let x = match self.rows("ffn_latent_down") {
            Some(latent) => self.linear(input, "ffn_latent_down", latent)?,
            None => input,
        };
        let latent = self.width(x);
        let h = self.expert_hidden(x, route, &routing, act)?;
        let shape = [self.width(h) / routing.used, latent];
        let h = self.expert_linear(h, route, "ffn_down_exps", routing.experts, shape)?;
        let sum = self.push(Op::ExpertSum { input: h, route }, latent);
        let sum = match x == input {
            true => sum,
            false => self.linear(sum, "ffn_latent_up", width)?,
        };
        let shared = self.shared_expert(input, act)?;
        Ok(shared.map_or(sum, |shared| self.add(sum, shared)))
    }

    /// The bias of the selection, whose name ends in `.bias` in most files.
    fn routing_bias(&mut self, experts: usize) -> Result<Option<WeightId>> {
        match self.bias("exp_probs_b", experts)? {
            None => self.find_optional(&format!("{}exp_probs_b", self.prefix), experts, 1),
            bias => Ok(bias),
        }
    }

    /// The hidden activations of the selected experts, `[rows, used * hidden]`.
    pub(super) fn expert_hidden(
        &mut self,
        x: Value,
        route: Value,
        routing: &Routing,
        act: Act,
    ) -> Result<Value> {
        let (experts, used, width) = (routing.experts, routing.used, self.width(x));
        if let Some(rows) = self.rows("ffn_gate_up_exps") {
            let hidden = rows / experts / 2;
            let shape = [width, 2 * hidden];
            let both = self.expert_linear(x, route, "ffn_gate_up_exps", experts, shape)?;
            let gate = self.slices(both, used, 0, hidden);
            let up = self.slices(both, used, hidden, hidden);
            return Ok(self.push(Op::Glu { gate, up, act }, used * hidden));
        }
        let shape = [width, self.rows("ffn_up_exps").unwrap_or(0) / experts];
        let up = self.expert_linear(x, route, "ffn_up_exps", experts, shape)?;
        if !self.has("ffn_gate_exps") {
            return Ok(self.push(Op::Act { input: up, act }, self.width(up)));
        }
        let gate = self.expert_linear(x, route, "ffn_gate_exps", experts, shape)?;
        Ok(self.push(Op::Glu { gate, up, act }, self.width(up)))
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
    fn shared_expert(&mut self, input: Value, act: Act) -> Result<Option<Value>> {
        let Some(hidden) = self.rows("ffn_up_shexp") else { return Ok(None) };
        let width = self.width(input);
        let up = self.linear(input, "ffn_up_shexp", hidden)?;
        let h = if self.has("ffn_gate_shexp") {
            let gate = self.linear(input, "ffn_gate_shexp", hidden)?;
            self.push(Op::Glu { gate, up, act }, hidden)
        } else {
            self.push(Op::Act { input: up, act }, hidden)
        };
        let up = self.linear(h, "ffn_down_shexp", width)?;
        if !self.has("ffn_gate_inp_shexp") {
            return Ok(Some(up));
        }
        let gate = self.linear(input, "ffn_gate_inp_shexp", 1)?;
        Ok(Some(self.push(Op::Glu { gate, up, act: Act::Sigmoid }, width)))
    }
}

//! The shapes of operations with recurrent state.

/// The scan of a state-space model, Mamba 2 or Mamba 1. Each head has the state `h`,
/// `[head_dim, state]`:
///
/// ```text
/// dt = softplus(dt + dt_bias);  h = exp(dt * a) * h + dt * x outer b;  y = h c + d * x
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scan {
    /// Heads; a multiple of `groups`.
    pub heads: usize,
    /// Width of a head of x.
    pub head_dim: usize,
    /// Groups of heads that share b and c.
    pub groups: usize,
    /// Width of b and c in a group.
    pub state: usize,
    /// Whether each element of x has a `dt`, a `d` and a row of `a` of its own (Mamba 1), not each
    /// head. Heads only divide the elements among workers then.
    pub is_channelwise: bool,
}

impl Scan {
    /// The width of `dt`.
    pub fn dt_width(&self) -> usize {
        self.heads * if self.is_channelwise { self.head_dim } else { 1 }
    }
}

/// The gated delta rule (Yang, Kautz and Hatamizadeh 2024), also with decays by channel (Kimi Delta
/// Attention, 2025). Each value head has the state `s`, `[head_dim, head_dim]`, with a row for each
/// element of k:
///
/// ```text
/// q = q / sqrt(q . q + eps) / sqrt(head_dim);  k = k / sqrt(k . k + eps)
/// s = exp(a * softplus(decay + dt_bias)) * s;  s = s + k outer sigmoid(beta) * (v - k s);  y = q s
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaRule {
    /// Heads of q and k.
    pub key_heads: usize,
    /// Heads of v; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Width of a head of q, k or v.
    pub head_dim: usize,
    /// Whether value head `h` has key head `h mod key_heads`. If not, consecutive value heads share
    /// a key head.
    pub is_cyclic: bool,
    /// Whether each row of the state has a decay of its own, not each head.
    pub is_channelwise: bool,
}

impl DeltaRule {
    /// The key head of a value head.
    pub fn key_head(&self, value_head: usize) -> usize {
        match self.is_cyclic {
            true => value_head % self.key_heads,
            false => value_head / (self.value_heads / self.key_heads),
        }
    }

    /// The width of q, k and v together.
    pub fn qkv_width(&self) -> usize {
        (2 * self.key_heads + self.value_heads) * self.head_dim
    }

    /// The width of the result.
    pub fn width(&self) -> usize {
        self.value_heads * self.head_dim
    }

    /// The width of `decay`.
    pub fn decay_width(&self) -> usize {
        self.value_heads * if self.is_channelwise { self.head_dim } else { 1 }
    }
}

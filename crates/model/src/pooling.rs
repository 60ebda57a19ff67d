//! How the rows of a text become its embedding, and plans that compute embeddings instead of
//! logits.

use std::fmt;
use std::str::FromStr;

use crate::op::{Op, PoolKind};
use crate::plan::Plan;
use crate::split::Part;

/// What is made of the hidden states of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The first one, of BERT's CLS token.
    Cls,
    /// The last one.
    Last,
    /// The scores of a classifier that reads the first one: how well a document answers a query.
    Rank,
}

impl Pooling {
    /// All of them.
    pub const ALL: [Pooling; 4] = [Pooling::Mean, Pooling::Cls, Pooling::Last, Pooling::Rank];

    /// The operation that pools.
    pub fn kind(self) -> PoolKind {
        match self {
            Pooling::Mean => PoolKind::Mean,
            Pooling::Cls | Pooling::Rank => PoolKind::First,
            Pooling::Last => PoolKind::Last,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Pooling::Mean => "mean",
            Pooling::Cls => "cls",
            Pooling::Last => "last",
            Pooling::Rank => "rank",
        }
    }
}

impl fmt::Display for Pooling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Pooling {
    type Err = String;

    fn from_str(text: &str) -> Result<Pooling, String> {
        let found = Pooling::ALL.into_iter().find(|pooling| pooling.name() == text);
        found.ok_or_else(|| "expected mean, cls, last or rank".to_owned())
    }
}

impl Plan {
    /// The same model without its output head: the hidden states that the head reads, which are
    /// normalised, are pooled. The weights of the head are gone, unless they are also the token
    /// table. A mean is left to the caller, who can go on behind a prefix whose sum it has, except
    /// where recurrent state would have to be stored for it.
    ///
    /// # Panics
    /// If the plan computes no logits.
    pub(crate) fn pooled(&self, kind: PoolKind) -> Plan {
        let head = |(i, op): (usize, &Op)| match op {
            Op::Logits { input, .. } => Some((i, *input)),
            _ => None,
        };
        let head = self.ops.iter().enumerate().find_map(head);
        let (at, input) = head.expect("a decoder has an output head");
        let mut plan = Part::of(self, &[], 0, &self.ops[..at]).plan;
        let kind = match kind {
            PoolKind::Mean if self.states.is_empty() => PoolKind::Sum,
            kind => kind,
        };
        plan.ops.push(Op::Pool { input, kind });
        plan.widths.push(self.width(input));
        plan
    }
}

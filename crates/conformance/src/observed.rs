//! What observers are shown: the same matmuls as the reference shows, in the same order, with
//! about the same inputs; and logits that observing does not change.

use bodkin_backend::{InputRow, Matmul, Model, Observer, Result};

use super::case::Case;
use super::compare::nmse;
use super::prompt::run_prompt_observed;

/// Everything that was shown. The experts of a token are in ascending order: rounding may exchange
/// experts whose scores are almost the same.
pub(super) struct Record {
    /// Tokens of the step.
    tokens: usize,
    /// The weight of each matmul, its experts, and the one of each row.
    matmuls: Vec<(String, usize, Vec<usize>)>,
    /// The rows of each matmul.
    values: Vec<Vec<f32>>,
}

impl Record {
    /// Nothing yet, of a step of a case.
    pub(super) fn new(case: &Case) -> Record {
        Record { tokens: case.tokens.len(), matmuls: Vec::new(), values: Vec::new() }
    }
}

impl Observer for Record {
    fn matmul(&mut self, matmul: &Matmul<'_>) {
        let Matmul { weight, experts, rows } = *matmul;
        let fits = |row: &InputRow<'_>| row.values.len() == weight.cols && row.expert < experts;
        assert!(rows.iter().all(fits), "rows that the weight can be multiplied with");
        let mut order: Vec<usize> = (0..rows.len()).collect();
        if experts > 1 {
            assert!(
                rows.len().is_multiple_of(self.tokens),
                "the same number of experts for each token"
            );
            let used = rows.len() / self.tokens;
            order.sort_by_key(|&i| (i / used, rows[i].expert));
        }
        let rows = || order.iter().map(|&i| &rows[i]);
        let chosen = rows().map(|row| row.expert).collect();
        self.matmuls.push((weight.name.clone(), experts, chosen));
        self.values.push(rows().flat_map(|row| row.values).copied().collect());
    }
}

/// Compares what `model` shows with the reference's record, and its logits with those of a step
/// without an observer.
pub(super) fn check(
    model: &mut dyn Model,
    case: &Case,
    limit: f64,
    alone: &[f32],
    wanted: &Record,
    failures: &mut Vec<String>,
) -> Result<()> {
    let name = &case.name;
    let mut found = Record::new(case);
    let observed = run_prompt_observed(model, case, &mut found)?;
    if !observed.iter().map(|x| x.to_bits()).eq(alone.iter().map(|x| x.to_bits())) {
        failures.push(format!("{name}: observed differs in bits from the whole prompt"));
    }
    if found.matmuls != wanted.matmuls {
        failures.push(format!("{name}: other matmuls are observed"));
        return Ok(());
    }
    let inputs = found.values.iter().zip(&wanted.values).zip(&found.matmuls);
    for ((found, wanted), (weight, ..)) in inputs {
        let nmse = nmse(found, wanted);
        if nmse.is_nan() || nmse > limit {
            failures
                .push(format!("{name}: input of {weight}: NMSE {nmse:.2e}, at most {limit:.0e}"));
        }
    }
    Ok(())
}

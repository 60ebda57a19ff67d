//! Step metadata as the kernels read it: one array of words that begins with the offset of each of
//! its parts. This file must not know the device.

use bodkin_backend::{Batch, OutputRequest, SamplingParams};

use crate::constants::{KV_SPLIT, NO_PARTIALS, SAMPLING_WORDS};

/// Words before the first part.
const HEADER: usize = 10;
/// Capacity for the sampling parameters of each output row, with lists of usual length.
const PARAMS_CAPACITY: usize = 256;

/// The words of the largest step whose sequences share no pages, with sampling parameters for every
/// output row.
pub(crate) fn capacity(tokens: usize, outputs: usize, pages: &[usize]) -> usize {
    let spans = (9 + 2 * pages.len()) * tokens + outputs + pages.iter().sum::<usize>();
    HEADER + spans + outputs * PARAMS_CAPACITY
}

/// Replaces `out` by a step's metadata. `rows` are the requests of the output rows in `steps`
/// steps; empty if the host samples.
pub(crate) fn write(
    batch: &Batch,
    rows: &[OutputRequest<'_>],
    steps: usize,
    partials: PartialLimits,
    out: &mut Vec<u32>,
) {
    out.clear();
    out.resize(HEADER, 0);
    (out[0], out[1]) = (batch.tokens.len() as u32, batch.spans.len() as u32);
    begin(out, 2);
    out.extend(&batch.tokens);
    begin(out, 3);
    out.extend(batch.positions().map(|position| position as u32));
    begin(out, 4);
    for (i, span) in (0..).zip(&batch.spans) {
        out.extend(std::iter::repeat_n(i, span.len));
    }
    begin(out, 5);
    out.extend(&batch.outputs);
    begin(out, 6);
    let mut first = 0;
    for span in &batch.spans {
        let is_prefill = u32::from(span.is_prefill);
        out.extend([first, span.len as u32, span.position as u32, span.state_slot, is_prefill]);
        first += span.len as u32;
    }
    begin(out, 7);
    let tables = out.len();
    let windows = batch.spans.first().map_or(0, |span| span.tables.len());
    out.resize(tables + 2 * windows * batch.spans.len(), 0);
    for window in 0..windows {
        for (i, span) in batch.spans.iter().enumerate() {
            let table = &span.tables[window];
            let at = tables + 2 * (window * batch.spans.len() + i);
            (out[at], out[at + 1]) = (table.skipped as u32, out.len() as u32);
            out.extend(&table.pages);
        }
    }
    begin(out, 8);
    let numbers = out.len();
    out.resize(numbers + SAMPLING_WORDS * rows.len(), 0);
    for (row, at) in rows.iter().zip((numbers..).step_by(SAMPLING_WORDS)) {
        // A row that asks for logits is sampled, too, by zeros: greedily. Nobody reads its token.
        if let OutputRequest::Token(params) = row {
            write_params(params, steps, at, out);
        }
    }
    begin(out, 9);
    write_first_partials(batch, steps, partials, out);
}

/// KV splits whose partial results have memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartialLimits {
    /// Of a row, at most: fewer than its context has if all attention has windows.
    pub(crate) row: usize,
    /// Of all rows of a step. Sequences that share pages can have more.
    pub(crate) all: usize,
}

/// Appends the index of each row's first partial result, or [`NO_PARTIALS`] if the row has one KV
/// split, or the memory is full. Rows of decode take memory first: those of prefill need it only
/// where no kernel of prefill takes the heads.
fn write_first_partials(batch: &Batch, steps: usize, limits: PartialLimits, out: &mut Vec<u32>) {
    let rows = out.len();
    out.resize(rows + batch.tokens.len(), NO_PARTIALS);
    let mut taken = 0;
    for is_prefill in [false, true] {
        let mut end = rows;
        for span in &batch.spans {
            let first = end;
            end += span.len;
            // At the last step.
            let positions = span.position + span.len + steps.saturating_sub(1);
            let splits = positions.div_ceil(KV_SPLIT).min(limits.row);
            if span.is_prefill != is_prefill || splits < 2 {
                continue;
            }
            for row in &mut out[first..end] {
                if taken + splits <= limits.all {
                    *row = taken as u32;
                    taken += splits;
                }
            }
        }
    }
}

/// Writes sampling parameters to `out[at..]`, and appends their lists.
fn write_params(params: &SamplingParams, steps: usize, at: usize, out: &mut Vec<u32>) {
    let mut numbers = [0; SAMPLING_WORDS];
    numbers[0] = params.temperature.to_bits();
    numbers[1] = u32::try_from(params.top_k).unwrap_or(u32::MAX);
    let SamplingParams { top_p, min_p, penalties: p, .. } = params;
    let floats = [*top_p, *min_p, p.repeat, p.frequency, p.presence];
    numbers[2..7].copy_from_slice(&floats.map(f32::to_bits));
    numbers[7] = u32::try_from(params.penalty_window).unwrap_or(u32::MAX);
    numbers[8] = params.history.len() as u32;
    numbers[9] = out.len() as u32;
    if params.penalty_window > 0 {
        out.extend(&params.history);
        out.resize(out.len() + steps, 0);
    }
    (numbers[10], numbers[11]) = (params.biases.len() as u32, out.len() as u32);
    out.extend(params.biases.iter().flat_map(|&(token, bias)| [token, bias.to_bits()]));
    numbers[12] = out.len() as u32;
    out.extend(&params.uniforms);
    out[at..at + SAMPLING_WORDS].copy_from_slice(&numbers);
}

/// The next part begins here.
fn begin(out: &mut [u32], part: usize) {
    out[part] = out.len() as u32;
}

#[cfg(test)]
mod tests {
    use bodkin_backend::{PageTable, Span};

    use super::*;

    #[test]
    fn every_part_is_where_the_header_says() {
        let table = |skipped, pages: &[u32]| PageTable { skipped, pages: pages.to_vec() };
        let one = Span {
            len: 2,
            position: 70,
            tables: vec![table(0, &[4, 5, 6]), table(1, &[9, 8])],
            state_slot: 3,
            is_prefill: true,
        };
        let tables = vec![table(0, &[1]), table(0, &[2])];
        let two = Span { len: 1, position: 0, tables, state_slot: 0, is_prefill: false };
        let (tokens, spans, outputs) = (vec![11, 12, 13], vec![one, two], vec![1, 2]);
        let batch = Batch { tokens, spans, outputs, ..Batch::default() };
        let mut metadata = vec![77; 3];
        let params = SamplingParams {
            temperature: 0.5,
            top_k: 7,
            biases: vec![(5, 1.5)],
            penalty_window: 4,
            history: vec![21, 22],
            uniforms: vec![91, 92],
            ..SamplingParams::greedy()
        };
        let greedy = SamplingParams::greedy();
        let rows = [OutputRequest::Token(&greedy), OutputRequest::Token(&params)];
        let partials = PartialLimits { row: 3, all: 7 };
        write(&batch, &rows, 2, partials, &mut metadata);
        let part = |i: usize, len: usize| &metadata[metadata[i] as usize..][..len];
        assert_eq!(metadata[..2], [3, 2]);
        assert_eq!(part(2, 3), [11, 12, 13]);
        assert_eq!(part(3, 3), [70, 71, 0]);
        assert_eq!(part(4, 3), [0, 0, 1]);
        assert_eq!(part(5, 2), [1, 2]);
        assert_eq!(part(6, 10), [0, 2, 70, 3, 1, 2, 1, 0, 0, 0]);
        let pages = |window: usize, span: usize, position: usize| {
            let table = part(7, 8)[2 * (2 * window + span)..][..2].to_vec();
            metadata[table[1] as usize + position / 32 - table[0] as usize]
        };
        assert_eq!([pages(0, 0, 70), pages(0, 0, 0), pages(1, 0, 70)], [6, 4, 8]);
        assert_eq!([pages(0, 1, 0), pages(1, 1, 0)], [1, 2]);
        let params = &part(8, 32)[16..];
        assert_eq!((params[..2].to_vec(), params[7]), (vec![0.5f32.to_bits(), 7], 4));
        let list = |i: usize, len: usize| &metadata[params[i] as usize..][..len];
        assert_eq!((params[8], list(9, 4)), (2, &[21, 22, 0, 0][..]));
        assert_eq!((params[10], list(11, 2)), (1, &[5, 1.5f32.to_bits()][..]));
        assert_eq!(list(12, 2), [91, 92]);
        assert_eq!(part(9, 3), [NO_PARTIALS; 3]);
        assert!(metadata.len() <= capacity(3, 2, &[4, 4]));
    }

    #[test]
    fn rows_with_several_kv_splits_have_partial_results_while_there_is_memory() {
        let span = |position, len, is_prefill| Span {
            len,
            position,
            tables: Vec::new(),
            state_slot: 0,
            is_prefill,
        };
        let prefill = span(KV_SPLIT, 2, true);
        // The second reaches its second split at the last step; the third is too long.
        let decode = [4 * KV_SPLIT, KV_SPLIT - 2, 9 * KV_SPLIT, KV_SPLIT - 3];
        let decode = decode.map(|position| span(position, 1, false));
        let batch = Batch {
            tokens: vec![0; 6],
            spans: std::iter::once(prefill).chain(decode).collect(),
            ..Batch::default()
        };
        let first_partials = |row: usize, all: usize| {
            let mut metadata = Vec::new();
            write(&batch, &[], 3, PartialLimits { row, all }, &mut metadata);
            metadata[metadata[9] as usize..].to_vec()
        };
        assert_eq!(first_partials(20, 9), [7, NO_PARTIALS, 0, 5, NO_PARTIALS, NO_PARTIALS]);
        // Windows let a row have three splits at most.
        assert_eq!(first_partials(3, 20), [8, 10, 0, 3, 5, NO_PARTIALS]);
    }
}

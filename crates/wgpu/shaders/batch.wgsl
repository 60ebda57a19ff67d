// What every shader has: the parameters of its dispatch, fixed at load, and the data of the step.

@group(0) @binding(0) var<uniform> params: array<vec4<u32>, 8>;
@group(1) @binding(0) var<storage, read> batch: array<u32>;

fn param(i: u32) -> u32 {
    return params[i >> 2u][i & 3u];
}

fn param_f32(i: u32) -> f32 {
    return bitcast<f32>(param(i));
}

// Workgroups count rows of the step in x, so that those that read the same weights run together; y
// and z count one dimension together, which this is.
fn linear_id(id: vec3<u32>, groups: vec3<u32>) -> u32 {
    return id.y + id.z * groups.y;
}

// The header of the step: where rows and spans begin, and the words of a span.
const ROWS_AT: u32 = 3u;
const SPANS_AT: u32 = 4u;
const SPAN_WORDS: u32 = 5u;
// For each list of rows: where it begins, its length, and its first input and output row.
const LISTS: u32 = 8u;

// Of a row: its token, its position and its span.
fn row_token(row: u32) -> u32 {
    return batch[batch[ROWS_AT] + 3u * row];
}
fn row_position(row: u32) -> u32 {
    return batch[batch[ROWS_AT] + 3u * row + 1u];
}
fn row_span(row: u32) -> u32 {
    return batch[batch[ROWS_AT] + 3u * row + 2u];
}

// Of a span: first row, length, first position, state slot; then for each window the pages that
// were freed and where its page table begins.
fn span_at(span: u32) -> u32 {
    return batch[SPANS_AT] + span * batch[SPAN_WORDS];
}
fn span_row(span: u32) -> u32 {
    return batch[span_at(span)];
}
fn span_len(span: u32) -> u32 {
    return batch[span_at(span) + 1u];
}
fn span_position(span: u32) -> u32 {
    return batch[span_at(span) + 2u];
}
fn span_slot(span: u32) -> u32 {
    return batch[span_at(span) + 3u];
}
fn page_of(span: u32, window: u32, position: u32) -> u32 {
    let at = span_at(span) + 4u + 2u * window;
    return batch[batch[at + 1u] + position / 32u - batch[at]];
}

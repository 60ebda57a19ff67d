// Normalised rows as bytes, for the matmuls that read them.

@group(0) @binding(5) var<storage, read_write> rows_as_bytes: array<u32>;

// Columns of a chunk, and chunks of a row.
const CHUNK: u32 = 4u * QUADS;
const CHUNKS: u32 = 6u;

// The columns that a step of the norm makes, chunks in different banks.
var<workgroup> staged: array<f32, STEP + STEP / CHUNK>;

fn stage_column(c: u32, y: f32) {
    staged[c + c / CHUNK] = y;
}

// A thread stores a chunk of those that begin with column `base`.
fn store_chunk(row: u32, base: u32, thread: u32) {
    let i = base / CHUNK + thread;
    if thread >= STEP / CHUNK || i >= param(CHUNKS) {
        return;
    }
    let first = thread * (CHUNK + 1u);
    let x = quantized(array<vec4<f32>, QUADS>(
        //@ for j QUADS
        vec4(staged[first + 4u * {j}u], staged[first + 4u * {j}u + 1u],
            staged[first + 4u * {j}u + 2u], staged[first + 4u * {j}u + 3u]),
        //@ end
    ));
    store_columns(row, param(CHUNKS), i, x);
}

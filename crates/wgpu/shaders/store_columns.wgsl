// Writes the columns of chunks where `input_bytes.wgsl` reads them.
fn store_columns(first: u32, x: Columns) {
    //@ for v WORD_VECTORS
    rows_as_bytes[first + {v}u] =
        vec4(x.words[4 * {v}], x.words[4 * {v} + 1], x.words[4 * {v} + 2], x.words[4 * {v} + 3]);
    //@ end
    rows_as_bytes[first + WORD_VECTORS] = vec4(bitcast<u32>(x.scale), bitcast<u32>(x.sum), 0u, 0u);
}

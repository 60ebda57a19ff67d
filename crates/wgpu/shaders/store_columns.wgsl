// Writes the columns of chunk `i` of a row's `chunks` where `input_bytes.wgsl` reads them.
fn store_columns(row: u32, chunks: u32, i: u32, x: Columns) {
    let first = 4u * row * row_vectors(chunks);
    //@ for v WORD_VECTORS
    let at{v} = first + 4u * ({v}u * chunks + i);
    //@ for w 4
    rows_as_bytes[at{v} + {w}u] = x.words[4 * {v} + {w}];
    //@ end
    //@ end
    let scale_at = first + 4u * WORD_VECTORS * chunks + 2u * i;
    rows_as_bytes[scale_at] = bitcast<u32>(x.scale);
    rows_as_bytes[scale_at + 1u] = bitcast<u32>(x.sum);
}

// Single precision; the words of a head are its elements.

fn {kv}_head_words(dim: u32) -> u32 {
    return dim;
}

// The product of the head that begins at word `at` with the query in shared memory.
fn {kv}_dot(at: u32, dim: u32) -> f32 {
    var sum = 0.0;
    for (var i = 0u; i < dim; i++) {
        sum += query[i] * bitcast<f32>({kv}[at + i]);
    }
    return sum;
}

fn {kv}_element(at: u32, i: u32) -> f32 {
    return bitcast<f32>({kv}[at + i]);
}

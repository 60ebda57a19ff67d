// Half precision, two elements in a word.

fn {kv}_head_words(dim: u32) -> u32 {
    return (dim + 1u) / 2u;
}

// The product of the head that begins at word `at` with the query in shared memory.
fn {kv}_dot(at: u32, dim: u32) -> f32 {
    var sum = 0.0;
    for (var i = 0u; i < dim / 2u; i++) {
        let x = unpack2x16float({kv}[at + i]);
        sum += query[2u * i] * x.x;
        sum += query[2u * i + 1u] * x.y;
    }
    if (dim & 1u) == 1u {
        sum += query[dim - 1u] * unpack2x16float({kv}[at + dim / 2u]).x;
    }
    return sum;
}

fn {kv}_element(at: u32, i: u32) -> f32 {
    let x = unpack2x16float({kv}[at + i / 2u]);
    return select(x.x, x.y, (i & 1u) == 1u);
}

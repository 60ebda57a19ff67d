// Bytes: nine words for 32 elements, the first of them the scale.

fn {kv}_head_words(dim: u32) -> u32 {
    return (dim + 31u) / 32u * 9u;
}

// The product of the head that begins at word `at` with the query in shared memory.
fn {kv}_dot(at: u32, dim: u32) -> f32 {
    var sum = 0.0;
    for (var block = 0u; 32u * block < dim; block++) {
        let word = at + 9u * block;
        var part = 0.0;
        for (var i = 0u; i < 8u; i++) {
            let d = 32u * block + 4u * i;
            let x = vec4<f32>(unpack4xI8({kv}[word + 1u + i]));
            for (var j = 0u; j < 4u; j++) {
                if d + j < dim {
                    part += query[d + j] * x[j];
                }
            }
        }
        sum += part * bitcast<f32>({kv}[word]);
    }
    return sum;
}

fn {kv}_element(at: u32, i: u32) -> f32 {
    let word = at + 9u * (i / 32u);
    let code = unpack4xI8({kv}[word + 1u + i % 32u / 4u])[i % 4u];
    return f32(code) * bitcast<f32>({kv}[word]);
}

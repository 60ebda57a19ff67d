// Rows of f32 that weights are multiplied with.

@group(0) @binding(2) var<storage, read> input: array<f32>;

// Eight columns of the row that begins at `at`; zero beyond the last.
fn input8(at: u32, octet: u32) -> Octet {
    let cols = param(COLS);
    let c = 8u * octet;
    if c + 8u <= cols {
        let i = at + c;
        return Octet(
            vec4(input[i], input[i + 1u], input[i + 2u], input[i + 3u]),
            vec4(input[i + 4u], input[i + 5u], input[i + 6u], input[i + 7u]),
        );
    }
    var values = array<f32, 8>();
    for (var j = 0u; j < 8u; j++) {
        if c + j < cols {
            values[j] = input[at + c + j];
        }
    }
    return Octet(
        vec4(values[0], values[1], values[2], values[3]),
        vec4(values[4], values[5], values[6], values[7]),
    );
}

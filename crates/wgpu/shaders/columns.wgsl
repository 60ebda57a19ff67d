// Columns of an input row as signed bytes, with a scale for each chunk of the weight.

struct Columns {
    words: array<u32, QUADS>,
    sum: i32,
    scale: f32,
}

// Vectors of four words of a row of `chunks`: the first of each chunk, then the second if a chunk has
// two, then scales and sums in pairs. So threads that read neighbouring chunks read neighbouring
// vectors, of a half or a third of the cache lines that whole chunks would lie in.
fn row_vectors(chunks: u32) -> u32 {
    return WORD_VECTORS * chunks + (chunks + 1u) / 2u;
}

fn bytes(x: vec4<f32>, inverse: f32) -> u32 {
    return pack4xI8(vec4<i32>(round(x * inverse)));
}

// The columns of a chunk as bytes.
fn quantized(x: array<vec4<f32>, QUADS>) -> Columns {
    var most = vec4<f32>();
    var total = vec4<f32>();
    //@ for j QUADS
    most = max(most, abs(x[{j}]));
    total += x[{j}];
    //@ end
    let largest = max(max(most.x, most.y), max(most.z, most.w));
    var scale = largest / 127.0;
    let inverse = select(127.0 / largest, 0.0, largest < 1.0e-36);
    // NaN and infinity stay what they are: as integers they would be lost.
    let check = (total.x + total.y) + (total.z + total.w);
    if (bitcast<u32>(check) & 0x7f800000u) == 0x7f800000u {
        scale = check;
    }
    let words = array<u32, QUADS>(
        //@ for j QUADS
        bytes(x[{j}], inverse),
        //@ end
    );
    var sum = 0;
    //@ for j QUADS
    sum += dot4I8Packed(words[{j}], 0x01010101u);
    //@ end
    return Columns(words, sum, scale);
}

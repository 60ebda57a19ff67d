// Columns of an input row as signed bytes, with a scale for each chunk of the weight.

struct Columns {
    words: array<u32, QUADS>,
    sum: i32,
    scale: f32,
}

fn bytes(x: vec4<f32>, inverse: f32) -> u32 {
    return pack4xI8(vec4<i32>(round(x * inverse)));
}

// Those that chunk `i` of the weight is multiplied with, of the row that begins at element `at`.
fn columns(at: u32, i: u32) -> Columns {
    var most = vec4<f32>();
    var total = vec4<f32>();
    //@ for j QUADS
    let x{j} = input4(at, i * QUADS + {j}u);
    most = max(most, abs(x{j}));
    total += x{j};
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
        bytes(x{j}, inverse),
        //@ end
    );
    var sum = 0;
    //@ for j QUADS
    sum += dot4I8Packed(words[{j}], 0x01010101u);
    //@ end
    return Columns(words, sum, scale);
}

fn dot_chunk(c: Chunk, x: Columns) -> f32 {
    return int_dot(c, x.words, x.sum) * x.scale;
}

// A weight. The codes of a row are read in chunks of four words, which hold QUADS times four
// columns; rows are padded to 32 columns. What follows of its layout gives a chunk with its scales,
// four of its columns as they are, and for integers the product of a chunk with bytes. No value has
// the row's factor.

@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>;

struct Chunk {
    codes: vec4<u32>,
    scale: vec2<f32>,
}

fn word(i: u32) -> u32 {
    return weight[i >> 2u][i & 3u];
}

fn factor(row: u32) -> f32 {
    return bitcast<f32>(word(param(FACTORS_AT) + row));
}

// Chunks of a row.
fn row_chunks() -> u32 {
    return param(GROUPS) * 8u / QUADS;
}

// Chunk `i` of all of the weight's.
fn chunk(i: u32) -> Chunk {
    return Chunk(weight[i], chunk_scale(i));
}

// The pair of scales of group `i` of all.
fn group_scales(i: u32) -> vec2<f32> {
    return unpack2x16float(word(param(SCALES_AT) + i));
}

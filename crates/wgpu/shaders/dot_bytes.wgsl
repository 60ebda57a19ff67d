fn dot_chunk(c: Chunk, x: Columns) -> f32 {
    return int_dot(c, x.words, x.sum) * x.scale;
}

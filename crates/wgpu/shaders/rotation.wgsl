// The pair that an element of a head belongs to, and the pair's other element.
struct Pair {
    number: u32,
    other: u32,
    // The first element turns one way, the second the other.
    is_second: bool,
}

fn pair_of(i: u32, pairs: u32) -> Pair {
    if param(IS_NORM) != 0u {
        return Pair(i / 2u, i ^ 1u, (i & 1u) == 1u);
    }
    let is_second = i >= pairs;
    return Pair(i % pairs, select(i + pairs, i - pairs, is_second), is_second);
}

// An element of a pair, rotated by the pair's cosine and sine.
fn rotate(x: f32, other: f32, angle: vec2<f32>, is_second: bool) -> f32 {
    return x * angle.x + select(-other, other, is_second) * angle.y;
}


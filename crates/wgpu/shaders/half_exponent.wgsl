// The exponent of the power of two that brings `x` between 2^13 and 2^14, as a divisor: halves end
// at 65504.
fn exponent_of(x: f32) -> i32 {
    let exponent = i32(bitcast<u32>(x) >> 23u) - 127;
    return max(exponent, -110) - 13;
}

//! How two results are compared.

pub(super) fn bits(values: &[f32]) -> impl Iterator<Item = u32> {
    values.iter().map(|x| x.to_bits())
}

/// The squared error relative to the squared reference.
pub(super) fn nmse(found: &[f32], wanted: &[f32]) -> f64 {
    assert_eq!(found.len(), wanted.len(), "logits of the same rows");
    let pairs = found.iter().zip(wanted).map(|(&f, &w)| (f64::from(f), f64::from(w)));
    let (error, size) =
        pairs.fold((0.0, 0.0), |(error, size), (f, w)| (error + (f - w).powi(2), size + w * w));
    if error == 0.0 { 0.0 } else { error / size }
}

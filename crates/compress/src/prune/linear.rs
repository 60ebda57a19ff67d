//! Linear algebra for pruning, on ndarray's matmul: the Cholesky factor of an inverse. It must not
//! know weights.

use std::ops::Range;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, ArrayViewMut2, Axis, Slice};

/// The block size: nearly all of the work is matmuls of blocks.
const BLOCK: usize = 64;

/// Some rows and columns of a matrix.
pub(super) fn part<T>(
    mut matrix: ArrayView2<'_, T>,
    rows: Range<usize>,
    cols: Range<usize>,
) -> ArrayView2<'_, T> {
    matrix.slice_axis_inplace(Axis(0), Slice::from(rows));
    matrix.slice_axis_inplace(Axis(1), Slice::from(cols));
    matrix
}

/// Some rows and columns of a matrix, to be changed.
pub(super) fn part_mut<T>(
    mut matrix: ArrayViewMut2<'_, T>,
    rows: Range<usize>,
    cols: Range<usize>,
) -> ArrayViewMut2<'_, T> {
    matrix.slice_axis_inplace(Axis(0), Slice::from(rows));
    matrix.slice_axis_inplace(Axis(1), Slice::from(cols));
    matrix
}

/// The upper triangular `U` with `transpose(U) * U = inverse(H)`, of a symmetric `H` whose lower
/// triangle is given; the upper triangle is not read. None if `H` is not positive definite.
///
/// With rows and columns in reverse order, `H = L * transpose(L)`; put back in order, `L` is an
/// upper triangular `V` with `H = V * transpose(V)`, and `U` is its inverse. So one factor and one
/// triangular inverse do, and the inverse of `H` is never made.
pub(super) fn factor_of_inverse(h: ArrayView2<f32>) -> Option<Array2<f32>> {
    let n = h.nrows();
    // Row `i` of the reversed matrix is row `n - 1 - i`; what was below the diagonal is above it.
    let mut l = Array2::from_shape_fn((n, n), |(i, j)| {
        let (i, j) = (n - 1 - i.max(j), n - 1 - i.min(j));
        f64::from(h[(j, i)])
    });
    cholesky(l.view_mut())?;
    let inverse = invert_lower(l.view());
    let u = Array2::from_shape_fn((n, n), |(i, j)| inverse[(n - 1 - i, n - 1 - j)] as f32);
    u.iter().all(|x| x.is_finite()).then_some(u)
}

/// Replaces the lower triangle of a positive definite matrix by its Cholesky factor.
fn cholesky(mut a: ArrayViewMut2<f64>) -> Option<()> {
    let n = a.nrows();
    for from in (0..n).step_by(BLOCK) {
        let to = n.min(from + BLOCK);
        for i in from..n {
            // Row `i` of this block's columns; rows below the block use all of its rows.
            for j in from..to.min(i + 1) {
                let dot: f64 = (from..j).map(|k| a[(i, k)] * a[(j, k)]).sum();
                let rest = a[(i, j)] - dot;
                a[(i, j)] = match i == j {
                    true => (rest > 0.0).then(|| rest.sqrt())?,
                    false => rest / a[(j, j)],
                };
            }
        }
        let done = part(a.view(), 0..n, from..to).to_owned();
        let width = to - from;
        for row in (to..n).step_by(BLOCK) {
            let end = n.min(row + BLOCK);
            let (all, own) =
                (part(done.view(), row..n, 0..width), part(done.view(), row..end, 0..width));
            let mut rest = part_mut(a.view_mut(), row..n, row..end);
            general_mat_mul(-1.0, &all, &own.t(), 1.0, &mut rest);
        }
    }
    Some(())
}

/// The inverse of a lower triangular matrix; the upper triangle is not read.
fn invert_lower(l: ArrayView2<f64>) -> Array2<f64> {
    let n = l.nrows();
    let mut inverse = Array2::zeros((n, n));
    for from in (0..n).step_by(BLOCK) {
        let to = n.min(from + BLOCK);
        let mut own = Array2::<f64>::zeros((to - from, to - from));
        for j in 0..to - from {
            own[(j, j)] = 1.0 / l[(from + j, from + j)];
            for i in j + 1..to - from {
                let dot: f64 = (j..i).map(|k| l[(from + i, from + k)] * own[(k, j)]).sum();
                own[(i, j)] = -dot / l[(from + i, from + i)];
            }
        }
        let above = part(inverse.view(), 0..from, 0..from);
        let product = part(l, from..to, 0..from).dot(&above);
        let mut left = part_mut(inverse.view_mut(), from..to, 0..from);
        general_mat_mul(-1.0, &own, &product, 0.0, &mut left);
        part_mut(inverse.view_mut(), from..to, from..to).assign(&own);
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_gives_the_inverse() {
        for n in [1, 5, 64, 150] {
            let x = Array2::from_shape_fn((2 * n, n), |(i, j)| {
                ((i * 7919 + j * 104_729) % 1009) as f32 / 500.0 - 1.0
            });
            let mut h = x.t().dot(&x);
            h.diag_mut().mapv_inplace(|d| d + 0.1);
            let u = factor_of_inverse(h.view()).unwrap();
            let product = u.t().dot(&u).dot(&h);
            for ((i, j), &found) in product.indexed_iter() {
                assert!((found - f32::from(u8::from(i == j))).abs() < 2e-3, "{n}: {i} {j} {found}");
            }
            assert!((0..n).all(|i| (0..i).all(|j| u[(i, j)] == 0.0)));
        }
    }

    #[test]
    fn what_is_not_positive_definite_has_none() {
        assert!(factor_of_inverse(Array2::from_elem((3, 3), 1.0).view()).is_none());
        assert!(factor_of_inverse(Array2::from_elem((2, 2), f32::NAN).view()).is_none());
    }
}

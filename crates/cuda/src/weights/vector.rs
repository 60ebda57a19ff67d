//! Weights that are vectors, such as biases and norms, in f32.

use std::ops::Range;

use bodkin_model::Weight;

use crate::packed::Shard;

/// A device's shard of a vector: the same elements of each of its pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Vector {
    pieces: usize,
    own: Range<usize>,
}

impl Vector {
    /// Of a weight that is sharded into `pieces` if the matmul is whose bias it is.
    pub(super) fn of(weight: &Weight, pieces: Option<usize>, shard: Shard) -> Vector {
        let len = weight.rows * weight.cols;
        match pieces {
            Some(pieces) => Vector { pieces, own: shard.rows(len / pieces) },
            None => Vector { pieces: 1, own: 0..len },
        }
    }

    pub(super) fn bytes(&self) -> usize {
        4 * self.pieces * self.own.len()
    }

    pub(super) fn write(&self, weight: &Weight, data: &[u8], to: &mut [f32]) {
        let mut all = vec![0.0; weight.rows * weight.cols];
        weight.format.dequantize(data, &mut all);
        let (piece, len) = (all.len() / self.pieces, self.own.len());
        for i in 0..self.pieces {
            to[i * len..][..len].copy_from_slice(&all[i * piece..][self.own.clone()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use bodkin_gguf::Format;

    use super::*;

    #[test]
    fn parts_of_biases_together_are_the_whole() {
        let (matrices, rows) = (3, 71);
        let values: Vec<f32> = (0..matrices * rows).map(|i| i as f32).collect();
        let data: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let (name, bytes) = (String::new(), data.len() as u64);
        let weight =
            Weight { name, format: Format::F32, cols: rows, rows: matrices, bytes, layer: None };
        let mut together = vec![Vec::<f32>::new(); matrices];
        for index in 0..3 {
            let vector = Vector::of(&weight, Some(matrices), Shard { index, count: 3 });
            let mut own = vec![f32::NAN; vector.bytes() / 4];
            vector.write(&weight, &data, &mut own);
            let pieces = own.chunks_exact(own.len() / matrices);
            together.iter_mut().zip(pieces).for_each(|(all, piece)| all.extend(piece));
        }
        assert_eq!(together.concat(), values);
    }
}

//! NumPy's file format.

/// The bytes of a header.
pub(crate) const HEADER_BYTES: usize = 128;

/// The header of a matrix of f32, version 1.0: a dictionary, padded so that every header has the
/// same length.
pub(crate) fn header(rows: usize, columns: usize) -> Vec<u8> {
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    let length = HEADER_BYTES - header.len() - 2;
    header.extend((length as u16).to_le_bytes());
    let shape =
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    header.extend(shape.as_bytes());
    header.resize(HEADER_BYTES - 1, b' ');
    header.push(b'\n');
    header
}

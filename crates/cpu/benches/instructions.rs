//! Multiplies a few rows of weights by one token, for an emulator that counts instructions:
//! `instructions LAYOUT TIMES`. Prints the bytes that the rows have in a file. `cargo xtask
//! instructions` runs it.

use bodkin_cpu::Isa;
use bodkin_cpu::linear::{Activations, OutRows, PackedLayout, PackedWeight, SCRATCH_LEN, matmul};

const ROWS: usize = 64;
const COLS: usize = 2048;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let [name, times] = arguments.as_slice() else { panic!("expected LAYOUT TIMES") };
    let is_named = |layout: &&PackedLayout| format!("{layout:?}") == *name;
    let layout = *PackedLayout::ALL.iter().find(is_named).expect("a packed layout");
    let times: usize = times.parse().expect("a number");
    let (isa, format) = (Isa::detect(), layout.format());
    let row_bytes = format.row_bytes(COLS).expect("2048 is a multiple of all blocks");
    // Codes 0x71 and scales 0x7171 (f16) are ordinary numbers in every format.
    let weight = PackedWeight::pack(format, &vec![0x71; ROWS * row_bytes], ROWS, COLS);
    let activation_format = layout.activation_format(isa);
    let mut x = Activations::with_bytes(activation_format.bytes(1, COLS));
    // SAFETY: one thread.
    unsafe { x.reshape(activation_format, 1, COLS).set(isa, 0, &[1.0; COLS]) }
    let (mut out, mut scratch) = (vec![0.0; ROWS], vec![0.0; SCRATCH_LEN]);
    for _ in 0..times {
        let out = OutRows::new(&mut out, ROWS);
        // SAFETY: one thread.
        unsafe { matmul(isa, &weight, None, 0..weight.panels(), &x, 0..1, out, &mut scratch) }
    }
    println!("{}", ROWS * row_bytes);
}

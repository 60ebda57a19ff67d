//! Matmul speeds beside the limits of the machine: `cargo bench -p bodkin-cpu --bench linear
//! [KIND...]`. Decode (one token) is given as bytes of packed weight per second, next to a loop
//! that only reads as many bytes; prefill (512 tokens) as operations per second, two for each
//! weight and token, next to a loop of int8 dot products alone.

use std::ops::Range;
use std::time::Instant;

use bodkin_cpu::Isa;
use bodkin_cpu::linear::{Activations, OutRows, PackedLayout, PackedWeight, SCRATCH_LEN, matmul};

const ROWS: usize = 8192;
const COLS: usize = 2048;
const TOKENS: usize = 512;
/// Enough to come from memory, not from a cache.
const DECODE_BYTES: usize = 1 << 30;
const THREADS: [usize; 2] = [1, 2];

fn main() {
    let names: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    println!("plain reading: {}", two(|threads| format!("{:.1} GB/s", read_speed(threads))));
    #[cfg(target_arch = "x86_64")]
    println!("int8 dot products: {}", two(|threads| format!("{:.0} Gop/s", peak::speed(threads))));
    println!(
        "layout  isa        pack GB/s  decode GB/s (1, 2 threads)  prefill Gop/s (1, 2 threads)"
    );
    for &layout in PackedLayout::ALL {
        let name = format!("{layout:?}");
        if names.is_empty() || names.iter().any(|n| n.eq_ignore_ascii_case(&name)) {
            measure(layout, &name);
        }
    }
}

fn measure(layout: PackedLayout, name: &str) {
    let format = layout.format();
    let row_bytes = format.row_bytes(COLS).expect("2048 is a multiple of all blocks");
    // Codes 0x71 and scales 0x7171 (f16) are ordinary numbers in every format.
    let source = vec![0x71; ROWS * row_bytes];
    let start = Instant::now();
    let mut weights = vec![PackedWeight::pack(format, &source, ROWS, COLS)];
    let pack_speed = source.len() as f64 / start.elapsed().as_secs_f64() / 1e9;
    while weights.len() * weights[0].bytes() < DECODE_BYTES {
        weights.push(PackedWeight::pack(format, &source, ROWS, COLS));
    }
    let isas: Vec<Isa> = match std::env::var_os("BODKIN_CPU") {
        None => Isa::available().collect(),
        Some(_) => Isa::from_env().into_iter().collect(),
    };
    for isa in isas.into_iter().rev() {
        let bytes = weights.len() * weights[0].bytes();
        let decode = |threads| {
            let seconds = matmul_seconds(isa, &weights, 1, threads);
            format!("{:.1} of {:.1}", bytes as f64 / seconds / 1e9, read_speed(threads))
        };
        let prefill = |threads| {
            let seconds = matmul_seconds(isa, &weights[..1], TOKENS, threads);
            format!("{:.0}", 2.0 * (ROWS * COLS * TOKENS) as f64 / seconds / 1e9)
        };
        let (decode, prefill) = (two(decode), two(prefill));
        println!("{name:7} {:10} {pack_speed:5.1}      {decode:28} {prefill}", isa.name());
    }
}

fn two(figure: impl Fn(usize) -> String) -> String {
    THREADS.map(figure).join(", ")
}

/// The part of `count` that a thread takes.
fn share(count: usize, thread: usize, threads: usize) -> Range<usize> {
    count * thread / threads..count * (thread + 1) / threads
}

/// The best of three runs over all weights.
fn matmul_seconds(isa: Isa, weights: &[PackedWeight], tokens: usize, threads: usize) -> f64 {
    let layout = weights[0].layout();
    let is_prefill = tokens > 1;
    let format =
        if is_prefill { layout.prefill_format(isa) } else { layout.activation_format(isa) };
    let mut x = Activations::with_bytes(format.bytes(tokens, COLS));
    let writer = x.reshape(format, tokens, COLS);
    let row: Vec<f32> = (0..COLS).map(|i| (i % 17) as f32 - 8.0).collect();
    for token in 0..tokens {
        // SAFETY: one thread.
        unsafe { writer.set(isa, token, &row) }
    }
    let mut out = vec![0.0; tokens * ROWS];
    let out = OutRows::new(&mut out, ROWS);
    best_of_three(|| {
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let x = &x;
                scope.spawn(move || {
                    let room = &mut vec![0.0; SCRATCH_LEN];
                    for weight in weights {
                        let panels = share(weight.panels(), thread, threads);
                        // SAFETY: threads have disjoint panels.
                        unsafe { matmul(isa, weight, None, panels, x, 0..tokens, out, room) }
                    }
                });
            }
        });
    })
}

fn best_of_three(run: impl Fn()) -> f64 {
    let time = || {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    };
    time().min(time()).min(time())
}

/// GB/s of summing up words.
fn read_speed(threads: usize) -> f64 {
    use std::sync::OnceLock;
    static WORDS: OnceLock<Vec<u64>> = OnceLock::new();
    let words = WORDS.get_or_init(|| (0..DECODE_BYTES as u64 / 8).collect());
    let sum = |words: &[u64]| {
        let (blocks, _) = words.as_chunks::<32>();
        blocks.iter().fold([0u64; 32], |mut sums, block| {
            sums.iter_mut().zip(block).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
            sums
        })
    };
    let seconds = best_of_three(|| {
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let part = &words[share(words.len(), thread, threads)];
                scope.spawn(move || std::hint::black_box(sum(part)));
            }
        });
    });
    DECODE_BYTES as f64 / seconds / 1e9
}

/// The peak rate of int8 dot products on registers.
#[cfg(target_arch = "x86_64")]
mod peak {
    use std::arch::x86_64::*;

    use super::{Isa, best_of_three};

    const ROUNDS: usize = 20_000_000;
    const CHAINS: usize = 12;

    pub(super) fn speed(threads: usize) -> f64 {
        if Isa::detect().name() != "avx512" {
            return f64::NAN;
        }
        let seconds = best_of_three(|| {
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    // SAFETY: the instruction set was checked above.
                    scope.spawn(|| unsafe { peak_loop() });
                }
            });
        });
        (threads * ROUNDS * CHAINS * 128) as f64 / seconds / 1e9
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn peak_loop() {
        let a = std::hint::black_box(_mm512_set1_epi8(3));
        let b = std::hint::black_box(_mm512_set1_epi8(5));
        let mut sums = [_mm512_setzero_si512(); CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
        }
        std::hint::black_box(sums);
    }
}

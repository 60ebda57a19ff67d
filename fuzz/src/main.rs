//! Runs fuzz targets on random mutations of their seeds, with a stable compiler:
//!
//! ```text
//! cargo run --release --manifest-path fuzz/Cargo.toml --no-default-features -- TARGET RUNS SEED
//! ```
//!
//! `TARGET` may be `all`. The input of the current run is in `fuzz/artifacts/TARGET`, so that it
//! survives a crash. With 0 runs it writes the seeds to `fuzz/corpus/TARGET` and the words of the
//! format to `fuzz/corpus/TARGET.dict`, from which `cargo +nightly fuzz run TARGET -- -dict=FILE`
//! fuzzes the same target guided by coverage.

#![forbid(unsafe_code)]

use std::env;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use bodkin_fuzz::{TARGETS, Target};

/// The most inputs that are mutated: the seeds and accepted mutations.
const MAX_POOL: usize = 512;
/// The longest input, in bytes.
const MAX_BYTES: usize = 1 << 16;

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let number = |i: usize, default: u64| match arguments.get(i) {
        Some(text) => text.parse().expect("a number"),
        None => default,
    };
    let name = arguments.first().map_or("all", String::as_str);
    let targets = TARGETS.iter().filter(|target| name == "all" || name == target.name);
    for target in targets {
        match number(1, 100_000) {
            0 => write_corpus(target),
            runs => run(target, runs, number(2, 1)),
        }
    }
}

fn write_corpus(target: &Target) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    fs::create_dir_all(&folder).expect("a writable folder");
    for (i, seed) in (target.seeds)().iter().enumerate() {
        fs::write(folder.join(format!("seed-{i}")), seed).expect("a writable folder");
    }
    let escaped =
        |word: &&str| word.bytes().map(|byte| format!("\\x{byte:02x}")).collect::<String>();
    let words = target.dictionary.iter().map(|word| format!("\"{}\"\n", escaped(word)));
    let words = words.collect::<String>();
    fs::write(folder.with_extension("dict"), words).expect("a writable folder");
}

fn run(target: &Target, runs: u64, seed: u64) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("artifacts");
    fs::create_dir_all(&folder).expect("a writable folder");
    let current = folder.join(target.name);
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut pool = (target.seeds)();
    for (i, seed) in pool.iter().enumerate() {
        assert!((target.parse)(seed), "{}: seed {i} is rejected", target.name);
    }
    let (mut accepted, mut slowest, start) = (0, Duration::ZERO, Instant::now());
    for _ in 0..runs {
        let mut input = pool[random.below(pool.len())].clone();
        for _ in 0..=random.below(6) {
            let other = &pool[random.below(pool.len())];
            mutate(&mut input, other, target.dictionary, &mut random);
        }
        input.truncate(MAX_BYTES);
        fs::write(&current, &input).expect("a writable folder");
        let before = Instant::now();
        let is_accepted = (target.parse)(&input);
        slowest = slowest.max(before.elapsed());
        if is_accepted {
            accepted += 1;
            match pool.len() {
                MAX_POOL.. => {
                    let replaced = random.below(MAX_POOL);
                    pool[replaced] = input;
                }
                _ => pool.push(input),
            }
        }
    }
    fs::remove_file(&current).expect("the input of the last run");
    println!(
        "{}: {runs} runs, {accepted} accepted, slowest {:.1} ms, {:.0} s",
        target.name,
        1e3 * slowest.as_secs_f64(),
        start.elapsed().as_secs_f64()
    );
}

/// xorshift64.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % end.max(1)
    }
}

/// Changes an input at a random position.
fn mutate(input: &mut Vec<u8>, other: &[u8], dictionary: &[&str], random: &mut Random) {
    const NUMBERS: [u64; 12] = [
        0,
        1,
        2,
        7,
        0x7f,
        0xff,
        0xffff,
        0x7fff_ffff,
        0xffff_ffff,
        i64::MAX as u64,
        u64::MAX,
        0x7ff0_0000_7f80_0000,
    ];
    let at = random.below(input.len() + 1);
    let len = random.below(16).min(input.len() - at);
    let range = at..at + len;
    match random.below(8) {
        0 if at < input.len() => input[at] ^= 1 << random.below(8),
        1 if at < input.len() => input[at] = random.below(256) as u8,
        2 => drop(input.drain(range)),
        3 => {
            let copy = input[range].to_vec();
            let to = random.below(input.len() + 1);
            input.splice(to..to, copy);
        }
        4 => {
            let number = NUMBERS[random.below(NUMBERS.len())].to_le_bytes();
            let width = (1 << random.below(4)).min(input.len() - at);
            input[at..at + width].copy_from_slice(&number[..width]);
        }
        5 => {
            let from = random.below(other.len() + 1);
            let end = (from + random.below(64)).min(other.len());
            input.splice(range, other[from..end].iter().copied());
        }
        6 if !dictionary.is_empty() => {
            let word = dictionary[random.below(dictionary.len())];
            input.splice(range, word.bytes());
        }
        _ => {
            let bytes = b"0123456789{}[]()\"'%,.-+:*? \n";
            input.insert(at, bytes[random.below(bytes.len())]);
        }
    }
}

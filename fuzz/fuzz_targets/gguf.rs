//! `cargo +nightly fuzz run gguf`: see `bodkin_fuzz::gguf`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodkin_fuzz::gguf(bytes);
});
